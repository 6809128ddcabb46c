// A stand-in for the CUDA runtime, as far as the planned allocator uses it: memory with a limit, streams, events.
//
// A stream is a queue of operations that runs as far as it may at every call; a stalled one stands still, as a GPU that is
// behind does, until something waits for it. `standin_write` and `standin_verify` are the kernels: queued on a stream, they
// fill memory with a tag and check that the tag is still there. A block given away too early, or to a stream that does not
// wait, is seen as a tag that is not there. Each allocation lies between two pages that cannot be touched.

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidHandle = 400, kNotReady = 600;
constexpr std::size_t kPage = 4096;
constexpr int kPoolReserved = 5, kMemoryPoolsSupported = 115;

struct Event {
  bool done = true;  // an event that was never recorded is
  std::size_t pending = 0;
  bool destroyed = false;
};

struct Operation {
  std::function<bool()> may_run;
  std::function<void()> run;
};

struct Stream {
  std::deque<Operation> queue;
  bool stalled = false;
};

struct Machine {
  std::mutex mutex;
  std::size_t limit = SIZE_MAX;
  bool pools = true;
  std::size_t malloced = 0, pool_used = 0, pool_reserved = 0;
  std::map<std::uintptr_t, std::size_t> blocks;  // of cudaMalloc
  std::map<std::uintptr_t, std::size_t> pooled;
  std::map<void*, Stream> streams;
  std::set<void*> destroyed;
  std::set<Event*> events;
  std::map<std::string, std::int64_t> calls;
  std::int64_t damaged = 0;
  std::int64_t misuses = 0;  // frees of what was not allocated, events used after their end
  int device = 0;
  int error = kSuccess;
  std::uintptr_t next_stream = 0x1000;
};

Machine& machine() {
  static Machine* const only = new Machine;
  return *only;
}

int fail(int code) {
  machine().error = code;
  return code;
}

void* map_pages(std::size_t nbytes) {
  const std::size_t inner = (nbytes + kPage - 1) / kPage * kPage;
  void* all = mmap(nullptr, inner + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  char* at = static_cast<char*>(all) + kPage;
  mprotect(at, inner, PROT_READ | PROT_WRITE);
  return at;
}

void unmap_pages(std::uintptr_t at, std::size_t nbytes) {
  const std::size_t inner = (nbytes + kPage - 1) / kPage * kPage;
  munmap(reinterpret_cast<void*>(at - kPage), inner + 2 * kPage);
}

// Runs every stream as far as it can go; `all` waits for stalled ones, too.
void progress(bool all) {
  Machine& m = machine();
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [handle, stream] : m.streams) {
      while (!stream.queue.empty() && (all || !stream.stalled) && stream.queue.front().may_run()) {
        stream.queue.front().run();
        stream.queue.pop_front();
        moved = true;
      }
    }
  }
}

int enqueue(void* handle, std::function<void()> run, std::function<bool()> may_run = [] { return true; }) {
  Machine& m = machine();
  if (m.destroyed.count(handle) != 0) return fail(kInvalidHandle);
  m.streams[handle].queue.push_back({std::move(may_run), std::move(run)});
  progress(false);
  return kSuccess;
}

int count(const char* name) { return static_cast<int>(++machine().calls[name]); }

void release_event(Event* event) {
  if (event->destroyed && event->pending == 0) delete event;
}

}  // namespace

extern "C" {

// The machine, for tests.

void standin_reset(std::size_t limit, int pools) {
  Machine& m = machine();
  std::lock_guard lock(m.mutex);
  progress(true);
  m.limit = limit;
  m.pools = pools != 0;
  m.calls.clear();
  m.damaged = m.misuses = 0;
  m.streams.clear();
  m.destroyed.clear();
  m.pool_reserved = m.pool_used;
}

void standin_limit(std::size_t limit) {
  std::lock_guard lock(machine().mutex);
  machine().limit = limit;
}

void standin_stall(void* stream, int stalled) {
  std::lock_guard lock(machine().mutex);
  machine().streams[stream].stalled = stalled != 0;
  progress(false);
}

void standin_destroy(void* stream) {
  std::lock_guard lock(machine().mutex);
  machine().destroyed.insert(stream);
}

std::int64_t standin_calls(const char* name) {
  std::lock_guard lock(machine().mutex);
  return machine().calls[name];
}

// What is still held, and what went wrong.
std::int64_t standin_held() {
  std::lock_guard lock(machine().mutex);
  progress(true);
  return static_cast<std::int64_t>(machine().malloced + machine().pool_used);
}
std::int64_t standin_live_events() {
  std::lock_guard lock(machine().mutex);
  return static_cast<std::int64_t>(machine().events.size());
}
std::int64_t standin_damaged() {
  std::lock_guard lock(machine().mutex);
  progress(true);
  return machine().damaged;
}
std::int64_t standin_misuses() {
  std::lock_guard lock(machine().mutex);
  return machine().misuses;
}

void standin_write(void* stream, void* at, std::size_t nbytes, int tag) {
  std::lock_guard lock(machine().mutex);
  enqueue(stream, [=] { std::memset(at, tag, nbytes); });
}

void standin_verify(void* stream, void* at, std::size_t nbytes, int tag) {
  std::lock_guard lock(machine().mutex);
  enqueue(stream, [=] {
    const unsigned char* bytes = static_cast<const unsigned char*>(at);
    for (std::size_t i = 0; i < nbytes; ++i) {
      if (bytes[i] == static_cast<unsigned char>(tag)) continue;
      ++machine().damaged;
      return;
    }
  });
}

// The runtime.

int cudaMalloc(void** at, std::size_t nbytes) {
  Machine& m = machine();
  std::lock_guard lock(m.mutex);
  count("cudaMalloc");
  if (m.malloced + m.pool_reserved > m.limit || nbytes > m.limit - m.malloced - m.pool_reserved)
    return fail(kOutOfMemory);
  *at = map_pages(nbytes);
  if (*at == nullptr) return fail(kOutOfMemory);
  m.malloced += nbytes;
  m.blocks[reinterpret_cast<std::uintptr_t>(*at)] = nbytes;
  return kSuccess;
}

int cudaFree(void* at) {
  Machine& m = machine();
  std::lock_guard lock(m.mutex);
  count("cudaFree");
  progress(true);
  const auto block = m.blocks.find(reinterpret_cast<std::uintptr_t>(at));
  if (block == m.blocks.end()) {
    ++m.misuses;
    return fail(kInvalidValue);
  }
  m.malloced -= block->second;
  unmap_pages(block->first, block->second);
  m.blocks.erase(block);
  return kSuccess;
}

int cudaMallocAsync(void** at, std::size_t nbytes, void* stream) {
  Machine& m = machine();
  std::lock_guard lock(m.mutex);
  count("cudaMallocAsync");
  if (m.destroyed.count(stream) != 0) return fail(kInvalidHandle);
  const std::size_t reserved = std::max(m.pool_reserved, m.pool_used + nbytes);
  if (reserved > m.limit || m.malloced > m.limit - reserved) return fail(kOutOfMemory);
  *at = map_pages(nbytes);
  if (*at == nullptr) return fail(kOutOfMemory);
  m.pool_used += nbytes;
  m.pool_reserved = reserved;
  m.pooled[reinterpret_cast<std::uintptr_t>(*at)] = nbytes;
  return kSuccess;
}

int cudaFreeAsync(void* at, void* stream) {
  Machine& m = machine();
  std::lock_guard lock(m.mutex);
  count("cudaFreeAsync");
  if (m.destroyed.count(stream) != 0) return fail(kInvalidHandle);
  const auto block = m.pooled.find(reinterpret_cast<std::uintptr_t>(at));
  if (block == m.pooled.end()) {
    ++m.misuses;
    return fail(kInvalidValue);
  }
  const auto [address, nbytes] = *block;
  m.pooled.erase(block);
  return enqueue(stream, [address = address, nbytes = nbytes] {
    machine().pool_used -= nbytes;
    unmap_pages(address, nbytes);
  });
}

int cudaGetDevice(int* device) {
  std::lock_guard lock(machine().mutex);
  *device = machine().device;
  return kSuccess;
}
int cudaSetDevice(int device) {
  std::lock_guard lock(machine().mutex);
  machine().device = device;
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  std::lock_guard lock(machine().mutex);
  *value = attribute == kMemoryPoolsSupported && machine().pools;
  return kSuccess;
}
int cudaDeviceSynchronize() {
  std::lock_guard lock(machine().mutex);
  count("cudaDeviceSynchronize");
  progress(true);
  return kSuccess;
}
int cudaDeviceGetDefaultMemPool(void** pool, int) {
  std::lock_guard lock(machine().mutex);
  if (!machine().pools) return fail(kInvalidValue);
  *pool = &machine();
  return kSuccess;
}
int cudaMemPoolSetAttribute(void*, int, void*) { return kSuccess; }
int cudaMemPoolGetAttribute(void*, int attribute, void* value) {
  std::lock_guard lock(machine().mutex);
  if (attribute != kPoolReserved) return fail(kInvalidValue);
  *static_cast<std::uint64_t*>(value) = machine().pool_reserved;
  return kSuccess;
}
int cudaMemPoolTrimTo(void*, std::size_t) {
  std::lock_guard lock(machine().mutex);
  count("cudaMemPoolTrimTo");
  machine().pool_reserved = machine().pool_used;
  return kSuccess;
}

int cudaStreamCreateWithFlags(void** stream, unsigned) {
  std::lock_guard lock(machine().mutex);
  *stream = reinterpret_cast<void*>(machine().next_stream += 0x10);
  return kSuccess;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  std::lock_guard lock(machine().mutex);
  count("cudaStreamWaitEvent");
  Event* awaited = static_cast<Event*>(event);
  if (machine().events.count(awaited) == 0) {
    ++machine().misuses;
    return fail(kInvalidHandle);
  }
  ++awaited->pending;
  const int code = enqueue(
      stream, [=] { --awaited->pending, release_event(awaited); }, [=] { return awaited->done; });
  if (code != kSuccess) --awaited->pending;
  return code;
}
int cudaEventCreateWithFlags(void** event, unsigned) {
  std::lock_guard lock(machine().mutex);
  Event* made = new Event;
  machine().events.insert(made);
  *event = made;
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  std::lock_guard lock(machine().mutex);
  count("cudaEventRecord");
  Event* recorded = static_cast<Event*>(event);
  if (machine().events.count(recorded) == 0) {
    ++machine().misuses;
    return fail(kInvalidHandle);
  }
  if (machine().destroyed.count(stream) != 0) return fail(kInvalidHandle);
  recorded->done = false;
  ++recorded->pending;
  return enqueue(stream, [=] { recorded->done = true, --recorded->pending, release_event(recorded); });
}
int cudaEventQuery(void* event) {
  std::lock_guard lock(machine().mutex);
  Event* asked = static_cast<Event*>(event);
  if (machine().events.count(asked) == 0) {
    ++machine().misuses;
    return fail(kInvalidHandle);
  }
  progress(false);
  return asked->done ? kSuccess : fail(kNotReady);
}
int cudaEventDestroy(void* event) {
  std::lock_guard lock(machine().mutex);
  Event* gone = static_cast<Event*>(event);
  if (machine().events.erase(gone) == 0) {
    ++machine().misuses;
    return fail(kInvalidHandle);
  }
  gone->destroyed = true;
  release_event(gone);
  return kSuccess;
}
int cudaGetLastError() {
  std::lock_guard lock(machine().mutex);
  const int code = machine().error;
  machine().error = kSuccess;
  return code;
}

// What a program does that uses a block on a second stream: `stream` goes on when `before` has come so far.
void standin_follow(void* stream, void* before) {
  void* event = nullptr;
  cudaEventCreateWithFlags(&event, 0);
  if (cudaEventRecord(event, before) == kSuccess) cudaStreamWaitEvent(stream, event, 0);
  cudaEventDestroy(event);
}

}  // extern "C"
