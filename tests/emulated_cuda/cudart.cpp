// A CUDA runtime whose device is this machine's own memory. Preloaded before torch's CUDA build, it lets the CUDA path run where no GPU is.
// Device memory is mapped host memory, copies are memcpy, and every stream is a queue that runs as late as it may: when somebody waits for it, or an
// operator is computed on it. A missing edge between two streams therefore shows as wrong data, and not once in a thousand runs but always.
// With EMULATED_CUDA_LINK (bytes per second, each way) events tell the time of a clock that only copies over that link and
// torch.cuda._sleep move on: what a step waits for its copies is then arithmetic, on however busy a machine.
// Kernels are not run: torch's operators are computed by its own CPU kernels (operators.py); one that is launched all the same is named on stderr.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace {

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
thread_local cudaError_t last_error = cudaSuccess;

struct Mark;
struct Op {
  std::function<void()> run;
  std::shared_ptr<Mark> wait;  // instead of run
  double issued = 0;
};
struct Stream {
  std::deque<Op> queue;
  bool running = false;
  double time = 0;  // of the clock that the link moves on, in milliseconds
};
struct Mark {
  Stream* stream;
  bool done = false;
  double at = 0;
  int asked = 0;
};
struct Event {
  std::shared_ptr<Mark> mark;
};

Stream legacy;
std::set<Stream*> streams{&legacy};
std::map<uintptr_t, size_t> device_memory, pinned_memory;
size_t used = 0;
std::unordered_map<const void*, std::string> kernels;
std::set<std::string> named;

size_t number(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
const size_t total = number("EMULATED_CUDA_BYTES", size_t(8) << 30);
const bool eager = number("EMULATED_CUDA_EAGER", 0);
size_t random_state = number("EMULATED_CUDA_SEED", 0);  // 0: nothing runs by chance

const double link = number("EMULATED_CUDA_LINK", 0);
double host_time = 0, lane_free[2] = {0, 0};  // when the host has seen what it waited for; when each way of the link is free

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream* of(cudaStream_t stream) {
  auto raw = reinterpret_cast<uintptr_t>(stream);
  return raw <= 2 ? &legacy : reinterpret_cast<Stream*>(stream);
}

void until(const std::shared_ptr<Mark>& mark);

void step(Stream* stream) {
  Op op = std::move(stream->queue.front());
  stream->queue.pop_front();
  if (op.wait) until(op.wait);
  stream->time = std::max(stream->time, op.wait ? std::max(op.issued, op.wait->at) : op.issued);
  if (!op.wait) op.run();
}

void over_the_link(Stream* stream, bool out, size_t bytes) {
  double begin = std::max(stream->time, lane_free[out]);
  stream->time = lane_free[out] = begin + bytes / link * 1e3;
}

void seen_by_host(double time) { host_time = std::max(host_time, time); }

void flush(Stream* stream) {
  while (!stream->queue.empty()) step(stream);
}

void until(const std::shared_ptr<Mark>& mark) {
  while (!mark->done && !mark->stream->queue.empty()) step(mark->stream);
  if (!mark->done) { fprintf(stderr, "emulated CUDA: an event is waited for that nothing will reach\n"); abort(); }
}

bool inside(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  auto at = ranges.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (at == ranges.begin()) return false;
  --at;
  return reinterpret_cast<uintptr_t>(pointer) < at->first + at->second;
}

// A copy that begins in one of them and ends outside of it is refused, as by the driver.
bool leaves(const std::map<uintptr_t, size_t>& ranges, const void* pointer, size_t bytes) {
  auto first = reinterpret_cast<uintptr_t>(pointer);
  auto at = ranges.lower_bound(first + bytes);
  if (at == ranges.begin()) return false;
  --at;
  auto end = at->first + at->second;
  return first < end && (first < at->first || end < first + bytes);
}

void chance() {
  if (!random_state) return;
  random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
  size_t draw = random_state >> 33;
  if (draw % 3) return;
  size_t which = (draw / 3) % streams.size();
  auto it = streams.begin();
  std::advance(it, which);
  if (!(*it)->queue.empty()) step(*it);
}

void push(cudaStream_t handle, Op op) {
  Stream* stream = of(handle);
  op.issued = host_time;
  stream->queue.push_back(std::move(op));
  if (eager) flush(stream);
  chance();
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool synchronous) {
  Lock lock(mutex);
  if (!bytes) return cudaSuccess;
  bool pageable = false;
  for (const void* p : {const_cast<const void*>(to), from}) {
    if (leaves(pinned_memory, p, bytes)) return fail(cudaErrorInvalidValue);
    if (!inside(device_memory, p) && !inside(pinned_memory, p)) pageable = true;
  }
  bool to_device = inside(device_memory, to), from_device = inside(device_memory, from);
  Stream* on = of(stream);
  push(stream, {[=] {
    memcpy(to, from, bytes);
    if (link && to_device != from_device) over_the_link(on, from_device, bytes);
  }, nullptr});
  if (synchronous || pageable) {
    flush(on);
    seen_by_host(on->time);
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

// For operators.py: what was queued on a stream before an operator happens before it.
void emulated_cuda_flush(void* stream) { Lock lock(mutex); flush(of(static_cast<cudaStream_t>(stream))); }
// For driver.cpp: the range of device memory that an address is in.
int emulated_cuda_range(uintptr_t* base, size_t* bytes, uintptr_t pointer) {
  Lock lock(mutex);
  if (!inside(device_memory, reinterpret_cast<void*>(pointer))) return CUDA_ERROR_INVALID_VALUE;
  auto at = --device_memory.upper_bound(pointer);
  *base = at->first;
  *bytes = at->second;
  return CUDA_SUCCESS;
}
size_t emulated_cuda_pending() { Lock lock(mutex); size_t n = 0; for (auto s : streams) n += s->queue.size(); return n; }

cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { return d == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int) { snprintf(id, n, "0000:00:00.0"); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", getenv("EMULATED_CUDA_NAME") ? getenv("EMULATED_CUDA_NAME") : "NVIDIA H100 80GB HBM3");
  p->major = 9; p->minor = 0; p->multiProcessorCount = 132; p->totalGlobalMem = total; p->warpSize = 32;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = 65536; p->regsPerMultiprocessor = 65536; p->maxThreadsPerMultiProcessor = 2048; p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 50 << 20; p->memPitch = 2147483647; p->textureAlignment = 512; p->asyncEngineCount = 3;
  p->unifiedAddressing = 1; p->concurrentKernels = 1; p->canMapHostMemory = 1; p->maxBlocksPerMultiProcessor = 32; p->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock(mutex);
  for (auto s : streams) flush(s);
  for (auto s : streams) seen_by_host(s->time);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_, size_t* total_) { Lock lock(mutex); *free_ = total - used; *total_ = total; return cudaSuccess; }
// Addresses that were never given before, the next one above the last, as a driver's mostly are: allocators choose by address.
static void* addresses(size_t bytes, int access) {
  static uintptr_t next = uintptr_t(1) << 45;
  void* p = mmap(reinterpret_cast<void*>(next), bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  next += (bytes + (2 << 20) - 1) & ~uintptr_t((2 << 20) - 1);
  return p;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  Lock lock(mutex);
  bytes = (bytes + 4095) & ~size_t(4095);
  if (used + bytes > total) return fail(cudaErrorMemoryAllocation);
  void* p = addresses(bytes, PROT_READ | PROT_WRITE);
  if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (bytes <= size_t(256) << 20) memset(p, 0xff, bytes);  // not a number in every floating type
  used += bytes;
  device_memory[reinterpret_cast<uintptr_t>(p)] = bytes;
  *pointer = p;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  Lock lock(mutex);
  if (!pointer) return cudaSuccess;
  for (auto s : streams) flush(s);  // as CUDA does
  auto at = device_memory.find(reinterpret_cast<uintptr_t>(pointer));
  if (at == device_memory.end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, at->second);
  used -= at->second;
  device_memory.erase(at);
  return cudaSuccess;
}

// The driver's addresses with and without memory, of which torch makes expandable segments.
static CUresult driver_refuses() { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult driver_attribute(int* value, CUdevice_attribute, CUdevice) { *value = 0; return CUDA_SUCCESS; }
static CUresult driver_reserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(mutex);
  void* p = addresses(bytes, PROT_NONE);
  *pointer = reinterpret_cast<CUdeviceptr>(p);
  return p == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
static CUresult driver_forget(CUdeviceptr pointer, size_t bytes) { munmap(reinterpret_cast<void*>(pointer), bytes); return CUDA_SUCCESS; }
static CUresult driver_create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  Lock lock(mutex);
  if (used + bytes > total) return CUDA_ERROR_OUT_OF_MEMORY;
  used += *handle = bytes;  // a handle is its size
  return CUDA_SUCCESS;
}
static CUresult driver_release(CUmemGenericAllocationHandle handle) { Lock lock(mutex); used -= handle; return CUDA_SUCCESS; }
static CUresult driver_map(CUdeviceptr pointer, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  Lock lock(mutex);
  void* p = reinterpret_cast<void*>(pointer);
  mprotect(p, bytes, PROT_READ | PROT_WRITE);
  memset(p, 0xff, bytes);
  device_memory[pointer] = bytes;
  return CUDA_SUCCESS;
}
static CUresult driver_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
static CUresult driver_unmap(CUdeviceptr pointer, size_t bytes) {
  Lock lock(mutex);
  for (auto s : streams) flush(s);
  mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  device_memory.erase(device_memory.lower_bound(pointer), device_memory.lower_bound(pointer + bytes));
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> here{
      {"cuDeviceGetAttribute", (void*)driver_attribute}, {"cuMemAddressReserve", (void*)driver_reserve},
      {"cuMemAddressFree", (void*)driver_forget},        {"cuMemCreate", (void*)driver_create},
      {"cuMemRelease", (void*)driver_release},           {"cuMemMap", (void*)driver_map},
      {"cuMemSetAccess", (void*)driver_access},          {"cuMemUnmap", (void*)driver_unmap}};
  auto at = here.find(name);
  *found = at != here.end() ? at->second : dlsym(RTLD_DEFAULT, name);
  if (!*found) *found = (void*)driver_refuses;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

static std::multimap<size_t, void*> pool_free;
static std::map<void*, size_t> pool_given;
static size_t pool_reserved = 0;
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  Lock lock(mutex);
  n = (n + 4095) & ~size_t(4095);
  auto at = pool_free.find(n);
  if (at != pool_free.end()) { *p = at->second; pool_free.erase(at); }
  else if (cudaError_t e = cudaMalloc(p, n)) return e;
  else pool_reserved += n;
  pool_given[*p] = n;
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) {
  Lock lock(mutex);
  auto at = pool_given.find(p);
  if (at == pool_given.end()) return fail(cudaErrorInvalidValue);
  size_t n = at->second;
  pool_given.erase(at);
  push(s, {[=] { pool_free.emplace(n, p); }, nullptr});
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = reinterpret_cast<cudaMemPool_t>(&pool_reserved); return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) { *static_cast<size_t*>(value) = pool_reserved; return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  Lock lock(mutex);
  for (auto s : streams) flush(s);
  for (auto& [n, p] : pool_free) { pool_reserved -= n; cudaFree(p); }
  pool_free.clear();
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  bytes = (bytes + 4095) & ~size_t(4095);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  pinned_memory[reinterpret_cast<uintptr_t>(p)] = bytes;
  *pointer = p;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
  Lock lock(mutex);
  for (auto s : streams) flush(s);
  auto at = pinned_memory.find(reinterpret_cast<uintptr_t>(pointer));
  if (at == pinned_memory.end()) return fail(cudaErrorInvalidValue);
  munmap(pointer, at->second);
  pinned_memory.erase(at);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  Lock lock(mutex);
  if (inside(pinned_memory, pointer)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned_memory[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  Lock lock(mutex);
  for (auto s : streams) flush(s);
  return pinned_memory.erase(reinterpret_cast<uintptr_t>(pointer)) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* pointer) {
  Lock lock(mutex);
  memset(a, 0, sizeof *a);
  bool device = inside(device_memory, pointer), pinned = inside(pinned_memory, pointer);
  a->type = device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = device || pinned ? 0 : -1;
  a->devicePointer = device || pinned ? const_cast<void*>(pointer) : nullptr;
  a->hostPointer = pinned ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, nullptr, true); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) { return copy(to, from, n, s, false); }
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return copy(to, from, n, s, false); }
cudaError_t cudaMemset(void* to, int value, size_t n) { Lock lock(mutex); flush(&legacy); memset(to, value, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t s) {
  Lock lock(mutex);
  push(s, {[=] { memset(to, value, n); }, nullptr});
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char room[1 << 16]; *p = room; return cudaSuccess; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) {
  Lock lock(mutex);
  auto made = new Stream;
  streams.insert(made);
  *s = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { Lock lock(mutex); flush(of(s)); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) { *p = 0; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { Lock lock(mutex); flush(of(s)); seen_by_host(of(s)->time); return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { Lock lock(mutex); return of(s)->queue.empty() ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  Lock lock(mutex);
  push(s, {[=] { fn(data); }, nullptr});
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t fn, void* data, unsigned) {
  Lock lock(mutex);
  push(s, {[=] { fn(s, cudaSuccess, data); }, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = reinterpret_cast<cudaEvent_t>(new Event); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { Lock lock(mutex); delete reinterpret_cast<Event*>(e); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Lock lock(mutex);
  auto mark = std::make_shared<Mark>();
  mark->stream = of(s);
  reinterpret_cast<Event*>(e)->mark = mark;
  push(s, {[mark] { mark->done = true; mark->at = link ? mark->stream->time : now(); }, nullptr});
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Lock lock(mutex);
  auto mark = reinterpret_cast<Event*>(e)->mark;
  if (mark && (!mark->done || link)) push(s, {nullptr, mark});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  Lock lock(mutex);
  auto mark = reinterpret_cast<Event*>(e)->mark;
  if (!mark || mark->done) return cudaSuccess;
  if (++mark->asked > 50) { until(mark); return cudaSuccess; }  // whoever polls is answered in the end
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Lock lock(mutex);
  auto mark = reinterpret_cast<Event*>(e)->mark;
  if (mark) until(mark);
  if (mark && link) seen_by_host(mark->at);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  Lock lock(mutex);
  auto from = reinterpret_cast<Event*>(a)->mark, to = reinterpret_cast<Event*>(b)->mark;
  if (!from || !to) return fail(cudaErrorInvalidResourceHandle);
  if (!from->done || !to->done) return fail(cudaErrorNotReady);
  *ms = static_cast<float>(to->at - from->at);
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaError" : "cudaSuccess"; }
const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "an error of the emulated device" : "no error"; }
cudaError_t cudaGetLastError() { auto e = last_error; last_error = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError() { return last_error; }

// Kernels.
void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { kernels[host] = name; }
static thread_local cudaStream_t configured;
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st* s) { configured = s; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void* s) { *static_cast<cudaStream_t*>(s) = configured; return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) { *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(entry)); return cudaSuccess; }
static cudaError_t launched(const void* kernel, void** arguments, cudaStream_t handle) {
  Lock lock(mutex);
  auto known = kernels.find(kernel);
  std::string name = known == kernels.end() ? "?" : known->second;
  if (link && name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep: cycles at 1 GHz
    int64_t cycles = *static_cast<int64_t*>(arguments[0]);
    Stream* on = of(handle);
    push(handle, {[=] { on->time += cycles * 1e-6; }, nullptr});
    return cudaSuccess;
  }
  if (named.insert(name).second) fprintf(stderr, "emulated CUDA: a kernel was launched and not run: %s\n", name.c_str());
  if (getenv("EMULATED_CUDA_STRICT")) abort();
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** a, size_t, cudaStream_t s) { return launched(kernel, a, s); }
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** a, size_t, cudaStream_t s) { return launched(kernel, a, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* kernel, void** a) { return launched(kernel, a, c->stream); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = 90; a->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 8; return cudaSuccess; }

#define REFUSED(signature) cudaError_t signature { return fail(cudaErrorNotSupported); }
REFUSED(cudaIpcCloseMemHandle(void*))
REFUSED(cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t))
REFUSED(cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*))
REFUSED(cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t))
REFUSED(cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned))
REFUSED(cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode))
REFUSED(cudaStreamEndCapture(cudaStream_t, cudaGraph_t*))
REFUSED(cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t))
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
