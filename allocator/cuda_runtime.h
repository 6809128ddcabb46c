// CUDA runtime functions that the allocator calls, resolved at run time.
//
// Compiles without CUDA headers and links no library: `open` takes the path of the runtime that torch has loaded (or of
// a stand-in), so that both use the same one. Constants are those of the runtime's public interface.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>
#include <type_traits>

namespace memo {

using Stream = void*;
using Event = void*;
using MemoryPool = void*;

constexpr int kSuccess = 0;
constexpr int kMemoryPoolsSupported = 115;     // cudaDevAttrMemoryPoolsSupported
constexpr int kPoolReleaseThreshold = 4;       // cudaMemPoolAttrReleaseThreshold
constexpr int kPoolReservedNow = 5;            // cudaMemPoolAttrReservedMemCurrent
constexpr unsigned kStreamNonBlocking = 1;     // cudaStreamNonBlocking
constexpr unsigned kEventDisableTiming = 2;    // cudaEventDisableTiming

struct CudaRuntime {
  int (*malloc)(void**, std::size_t) = nullptr;
  int (*free)(void*) = nullptr;
  int (*malloc_async)(void**, std::size_t, Stream) = nullptr;
  int (*free_async)(void*, Stream) = nullptr;
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*device_attribute)(int*, int, int) = nullptr;
  int (*device_synchronize)() = nullptr;
  int (*default_pool)(MemoryPool*, int) = nullptr;
  int (*pool_set)(MemoryPool, int, void*) = nullptr;
  int (*pool_get)(MemoryPool, int, void*) = nullptr;
  int (*pool_trim)(MemoryPool, std::size_t) = nullptr;
  int (*stream_create)(Stream*, unsigned) = nullptr;
  int (*stream_wait)(Stream, Event, unsigned) = nullptr;
  int (*event_create)(Event*, unsigned) = nullptr;
  int (*event_record)(Event, Stream) = nullptr;
  int (*event_query)(Event) = nullptr;
  int (*event_destroy)(Event) = nullptr;
  int (*last_error)() = nullptr;

  // Returns an empty string on success, else the reason why the library cannot be used; nothing is changed then.
  std::string open(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return dlerror();
    CudaRuntime found;
    std::string missing;
    auto resolve = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) missing = std::string(path) + " has no " + name;
    };
    resolve(found.malloc, "cudaMalloc");
    resolve(found.free, "cudaFree");
    resolve(found.malloc_async, "cudaMallocAsync");
    resolve(found.free_async, "cudaFreeAsync");
    resolve(found.get_device, "cudaGetDevice");
    resolve(found.set_device, "cudaSetDevice");
    resolve(found.device_attribute, "cudaDeviceGetAttribute");
    resolve(found.device_synchronize, "cudaDeviceSynchronize");
    resolve(found.default_pool, "cudaDeviceGetDefaultMemPool");
    resolve(found.pool_set, "cudaMemPoolSetAttribute");
    resolve(found.pool_get, "cudaMemPoolGetAttribute");
    resolve(found.pool_trim, "cudaMemPoolTrimTo");
    resolve(found.stream_create, "cudaStreamCreateWithFlags");
    resolve(found.stream_wait, "cudaStreamWaitEvent");
    resolve(found.event_create, "cudaEventCreateWithFlags");
    resolve(found.event_record, "cudaEventRecord");
    resolve(found.event_query, "cudaEventQuery");
    resolve(found.event_destroy, "cudaEventDestroy");
    resolve(found.last_error, "cudaGetLastError");
    if (missing.empty()) *this = found;
    return missing;
  }

  bool is_open() const { return malloc != nullptr; }

  // True on success. Clears the runtime's last error, which torch would otherwise report for its next kernel.
  bool ok(int code) const {
    if (code != kSuccess) last_error();
    return code == kSuccess;
  }

  // Records a new event on `stream`; nullptr when the stream no longer exists or no event can be created.
  Event mark(Stream stream) const {
    Event event = nullptr;
    if (!ok(event_create(&event, kEventDisableTiming))) return nullptr;
    if (ok(event_record(event, stream))) return event;
    event_destroy(event);
    return nullptr;
  }
};

// Makes `device` current in a scope: frees come from threads on which another device is current, or none.
class OnDevice {
 public:
  OnDevice(const CudaRuntime& cuda, int device) : cuda_(cuda) {
    if (!cuda.ok(cuda.get_device(&before_))) before_ = device;
    if (before_ != device) cuda.ok(cuda.set_device(device));
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cuda_.ok(cuda_.set_device(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const CudaRuntime& cuda_;
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace memo
