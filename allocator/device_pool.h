// Unplanned memory: parameters, blocks that live across steps, and requests that diverge from their plan.
//
// Served by the driver's stream-ordered memory pool, which keeps freed memory; by cudaMalloc on devices without pools,
// which is slow and safe, since cudaFree waits for the device. A block that other streams have used is freed on a
// separate stream that waits for all of them, so neither the host nor the block's stream waits.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_runtime.h"

namespace memo {

class DevicePool {
 public:
  explicit DevicePool(const CudaRuntime& cuda) : cuda_(cuda) {}

  // nullptr when the device is out of memory even after `trim`.
  void* allocate(std::size_t nbytes, int device, Stream stream) {
    OnDevice guard(cuda_, device);
    if (void* at = try_allocate(nbytes, device, stream)) return at;
    trim(device);
    return try_allocate(nbytes, device, stream);
  }

  // Frees a block; `elsewhere`: other streams that have used it.
  void release(void* at, std::size_t nbytes, int device, Stream stream, const std::vector<Stream>& elsewhere) {
    OnDevice guard(cuda_, device);
    Device& state = of(device);
    if (state.pool == nullptr) {
      cuda_.ok(cuda_.device_synchronize());
      cuda_.ok(cuda_.free(at));
      state.malloced -= nbytes;
      return;
    }
    const Stream on = elsewhere.empty() ? stream : after_all(state, stream, elsewhere);
    if (cuda_.ok(cuda_.free_async(at, on))) return;
    // The stream was destroyed; its work may still run.
    cuda_.ok(cuda_.device_synchronize());
    cuda_.ok(cuda_.free_async(at, nullptr));
  }

  // Waits for the device and returns the pool's free memory to it.
  void trim(int device) {
    OnDevice guard(cuda_, device);
    cuda_.ok(cuda_.device_synchronize());
    if (of(device).pool != nullptr) cuda_.ok(cuda_.pool_trim(of(device).pool, 0));
  }

  // Drops the cached capabilities of the devices; no block may be in use.
  void forget() {
    devices_.clear();
    n_plain_mallocs_ = 0;
  }

  // cudaMalloc calls: none where the device has pools.
  std::size_t n_plain_mallocs() const { return n_plain_mallocs_; }

  // Bytes taken from the device, in use or free in the pool.
  std::size_t reserved(int device) {
    OnDevice guard(cuda_, device);
    Device& state = of(device);
    std::uint64_t nbytes = state.malloced;
    if (state.pool != nullptr) cuda_.ok(cuda_.pool_get(state.pool, kPoolReservedNow, &nbytes));
    return static_cast<std::size_t>(nbytes);
  }

 private:
  struct Device {
    bool known = false;
    MemoryPool pool = nullptr;   // nullptr: the device has none
    Stream reclaim = nullptr;
    std::size_t malloced = 0;
  };

  Device& of(int device) {
    if (devices_.size() <= static_cast<std::size_t>(device)) devices_.resize(static_cast<std::size_t>(device) + 1);
    Device& state = devices_[static_cast<std::size_t>(device)];
    if (!state.known) {
      state.known = true;
      int supported = 0;
      if (cuda_.ok(cuda_.device_attribute(&supported, kMemoryPoolsSupported, device)) && supported != 0 &&
          cuda_.ok(cuda_.default_pool(&state.pool, device))) {
        std::uint64_t keep = UINT64_MAX;  // a synchronisation must not return memory that the next step needs
        cuda_.ok(cuda_.pool_set(state.pool, kPoolReleaseThreshold, &keep));
      }
    }
    return state;
  }

  void* try_allocate(std::size_t nbytes, int device, Stream stream) {
    Device& state = of(device);
    void* at = nullptr;
    if (state.pool != nullptr) return cuda_.ok(cuda_.malloc_async(&at, nbytes, stream)) ? at : nullptr;
    if (!cuda_.ok(cuda_.malloc(&at, nbytes))) return nullptr;
    state.malloced += nbytes;
    ++n_plain_mallocs_;
    return at;
  }

  // Returns a stream ordered after all work issued so far on `stream` and `elsewhere`.
  Stream after_all(Device& state, Stream stream, const std::vector<Stream>& elsewhere) {
    bool ordered = state.reclaim != nullptr || cuda_.ok(cuda_.stream_create(&state.reclaim, kStreamNonBlocking));
    auto follow = [&](Stream other) {
      const Event event = ordered ? cuda_.mark(other) : nullptr;
      ordered = event != nullptr && cuda_.ok(cuda_.stream_wait(state.reclaim, event, 0));
      if (event != nullptr) cuda_.ok(cuda_.event_destroy(event));  // the runtime keeps it until it has fired
    };
    follow(stream);
    for (Stream other : elsewhere) follow(other);
    if (ordered) return state.reclaim;
    cuda_.ok(cuda_.device_synchronize());
    return stream;
  }

  const CudaRuntime& cuda_;
  std::vector<Device> devices_;
  std::size_t n_plain_mallocs_ = 0;
};

}  // namespace memo
