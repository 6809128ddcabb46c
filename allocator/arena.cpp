// Planned allocator: the functions that torch calls for every device tensor, and those that Python calls around steps.
//
//   between steps      requests are served by the device's pool
//   in a step          every malloc, free and use by another stream is logged
//   in a planned step  each request is matched with the plan and placed at its planned address if that is free; other
//                      requests are served by the pool and counted, and the first one of a step is described
//
// Invariants. Only bytes of the arena and of the pool's blocks are handed out. No byte is handed out while a live block
// holds it, whatever the plan says and in whatever order frees arrive: occupancy is checked (step_plan.h). A byte
// passes from one stream to another only behind an event or a synchronisation (arena_memory.h).
//
// One lock, held during every call: torch frees from several threads. One instance, never destroyed: torch frees
// tensors until the process ends, after static objects are destroyed.

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena_memory.h"
#include "counters.h"
#include "cuda_runtime.h"
#include "device_pool.h"
#include "live_blocks.h"
#include "spin_lock.h"
#include "step_log.h"
#include "step_plan.h"

namespace memo {
namespace {

class Allocator {
 public:
  std::string open(const char* library) {
    std::lock_guard lock(lock_);
    if (live_.size() != 0) return "memory is in use";
    return cuda_.open(library);
  }

  void* allocate(std::size_t size, int device, Stream stream) {
    std::lock_guard lock(lock_);
    if (!cuda_.is_open()) return nullptr;
    Block block;
    block.nbytes = (std::max<std::size_t>(size, 1) + kAlignment - 1) / kAlignment * kAlignment;
    if (block.nbytes < size) return nullptr;  // wrapped around
    block.device = device;
    block.stream = stream;
    ++stats_.requests;
    if (step_open_ && device == step_device_) {
      block.step = step_;
      block.request = static_cast<std::uint32_t>(summary_.requests++);
      log_.write(Kind::kMalloc, block, stream);
      if (plan_ != nullptr) place_by_plan(block);
    }
    if (block.address == 0 && !place_in_pool(block) && !place_in_hole(block)) {
      ++stats_.out_of_memory;
      return nullptr;
    }
    live_.insert(block);
    stats_.allocated += static_cast<std::int64_t>(block.nbytes);
    stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
    note_device();
    return reinterpret_cast<void*>(block.address);
  }

  void release(void* at) {
    std::lock_guard lock(lock_);
    Block block;
    if (!live_.take(reinterpret_cast<std::uintptr_t>(at), block)) {
      ++stats_.unknown_frees;
      if (plan_ != nullptr) diverge(Reason::kUnknownFree, cursor_.next(), next_request());
      return;
    }
    ++stats_.frees;
    stats_.allocated -= static_cast<std::int64_t>(block.nbytes);
    if (in_this_step(block)) log_.write(Kind::kFree, block, block.stream);
    const std::vector<Stream> elsewhere = forget_elsewhere(block);
    if (block.home == Home::kPool) pool_.release(at, block.nbytes, block.device, block.stream, elsewhere);
    else leave_arena(block, elsewhere);
  }

  void use_elsewhere(void* at, Stream stream) {
    std::lock_guard lock(lock_);
    Block* block = live_.find(reinterpret_cast<std::uintptr_t>(at));
    if (at == nullptr || block == nullptr || block->stream == stream) return;
    std::vector<Stream>& streams = elsewhere_[block->address];
    if (std::find(streams.begin(), streams.end(), stream) != streams.end()) return;
    streams.push_back(stream);
    block->used_elsewhere = true;
    if (!in_this_step(*block)) return;
    log_.write(Kind::kUsedElsewhere, *block, stream);
    if (block->home == Home::kArena) {
      Block seen = *block;
      seen.stream = stream;
      diverge(Reason::kUsedElsewhere, block->slot, seen);
    }
  }

  Begin begin_step(int device, std::int64_t plan_id) {
    std::lock_guard lock(lock_);
    if (step_open_) return kAlreadyOpen;
    ++step_;
    step_open_ = true;
    step_device_ = device;
    summary_ = {};
    log_.start();
    const auto found = plans_.find(plan_id);
    if (found == plans_.end()) return kWatching;
    note_reserved(device);
    switch (arena_.hold(found->second->nbytes(), device, n_in_arena_)) {
      case ArenaMemory::Hold::kBusy: return kBusy;
      case ArenaMemory::Hold::kNoRoom: return kNoRoom;
      case ArenaMemory::Hold::kHeld: break;
    }
    note_device();
    plan_ = found->second;
    cursor_.start(plan_.get());
    arena_.admit(streams_[plan_id]);
    mark_leftovers();
    return kReplaying;
  }

  bool end_step(StepSummary& out) {
    std::lock_guard lock(lock_);
    if (!step_open_) return false;
    if (plan_ != nullptr && !cursor_.at_end()) diverge(Reason::kMissing, cursor_.next(), next_request());
    step_open_ = false;
    plan_ = nullptr;
    note_reserved(step_device_);
    stats_.planned += summary_.planned;
    stats_.outside += summary_.outside;
    stats_.fallbacks += summary_.fallbacks;
    stats_.fallback_nbytes += summary_.fallback_nbytes;
    stats_.divergences += summary_.divergences;
    stats_.divergent_steps += summary_.divergences != 0;
    out = summary_;
    return true;
  }

  std::int64_t add_plan(std::int64_t n, const std::int64_t* sizes, const std::int64_t* offsets, const Stream* streams,
                        std::int64_t arena_nbytes, std::string& error) {
    auto plan = std::make_shared<StepPlan>();
    error = n < 0 || arena_nbytes < 0
                ? "a negative size"
                : plan->make(static_cast<std::size_t>(n), sizes, offsets, streams, static_cast<std::size_t>(arena_nbytes));
    if (!error.empty()) return 0;
    std::vector<Stream> distinct;
    for (std::int64_t i = 0; i < n; ++i)
      if (offsets[i] >= 0 && std::find(distinct.begin(), distinct.end(), streams[i]) == distinct.end())
        distinct.push_back(streams[i]);
    std::lock_guard lock(lock_);
    const std::int64_t id = ++last_plan_;
    plans_[id] = std::move(plan);
    streams_[id] = std::move(distinct);
    return id;
  }

  void forget_plan(std::int64_t id) {  // a step that runs by the plan keeps it until its end
    std::lock_guard lock(lock_);
    plans_.erase(id);
    streams_.erase(id);
  }

  // Copies the first `capacity` events of the current or last step and returns their total number; -1: too many to log.
  std::int64_t events(LoggedEvent* out, std::int64_t capacity) {
    std::lock_guard lock(lock_);
    return log_.read(out, capacity);
  }

  Stats stats(int device) {
    std::lock_guard lock(lock_);
    if (cuda_.is_open()) note_reserved(device);
    note_device();
    stats_.arena = static_cast<std::int64_t>(arena_.nbytes());
    stats_.arena_mallocs = static_cast<std::int64_t>(arena_.n_taken());
    stats_.device_mallocs = stats_.arena_mallocs + static_cast<std::int64_t>(pool_.n_plain_mallocs());
    return stats_;
  }

  void reset_peaks() {
    std::lock_guard lock(lock_);
    stats_.allocated_peak = stats_.allocated;
    stats_.reserved_peak = stats_.reserved;
    stats_.arena_used_peak = stats_.arena_used;
  }

  // Resets to the state before `open` and returns 0; with live blocks does nothing and returns their number.
  std::int64_t close() {
    std::lock_guard lock(lock_);
    if (live_.size() != 0) return static_cast<std::int64_t>(live_.size());
    step_open_ = false;
    plan_ = nullptr;
    plans_.clear();
    streams_.clear();
    arena_.restart();
    pool_.forget();
    stats_ = {};
    return 0;
  }

 private:
  bool in_this_step(const Block& block) const { return step_open_ && block.step == step_; }

  // Placeholder for a request that was not made.
  Block next_request() const {
    Block none;
    none.request = static_cast<std::uint32_t>(summary_.requests);
    return none;
  }

  void diverge(Reason reason, std::size_t slot, const Block& got) {
    if (summary_.divergences++ != 0) return;
    Divergence& first = summary_.first;
    first = {reason, got.request, static_cast<std::int64_t>(slot), 0, nullptr, static_cast<std::int64_t>(got.nbytes),
             got.stream};
    if (slot >= plan_->size()) return;
    first.expected_nbytes = static_cast<std::int64_t>((*plan_)[slot].nbytes);
    first.expected_stream = (*plan_)[slot].stream;
  }

  // Sets the block's address, or leaves it 0 for a request that the pool serves.
  void place_by_plan(Block& block) {
    const std::size_t expected = cursor_.next();
    std::uint32_t at = kNoSlot;
    switch (cursor_.match(block.nbytes, block.stream, at)) {
      case Cursor::Match::kOn: break;
      case Cursor::Match::kAhead: diverge(Reason::kMissing, expected, block); break;
      case Cursor::Match::kOff: return fall_back(reason_at(expected, block), expected, block);
    }
    const Slot& slot = (*plan_)[at];
    if (slot.outside()) {
      ++summary_.outside;
      return;
    }
    if (!occupancy_.is_free(slot.first, slot.last)) return fall_back(Reason::kTaken, at, block);
    occupancy_.take(slot.first, slot.last);
    block.address = arena_.address(slot.offset);
    block.slot = at;
    block.home = Home::kArena;
    ++summary_.planned;
    enter_arena(block);
  }

  Reason reason_at(std::size_t slot, const Block& block) const {
    if (slot >= plan_->size()) return Reason::kExtra;
    return (*plan_)[slot].nbytes != block.nbytes ? Reason::kOtherSize : Reason::kOtherStream;
  }

  void fall_back(Reason reason, std::size_t slot, const Block& block) {
    diverge(reason, slot, block);
    ++summary_.fallbacks;
    summary_.fallback_nbytes += static_cast<std::int64_t>(block.nbytes);
  }

  bool place_in_pool(Block& block) {
    ++stats_.pool_mallocs;
    block.address = reinterpret_cast<std::uintptr_t>(pool_.allocate(block.nbytes, block.device, block.stream));
    return block.address != 0;
  }

  // Serves a request from free space of the arena when the device is full. The pool waited for the device before it
  // gave up, so free bytes are free on every stream.
  bool place_in_hole(Block& block) {
    if (arena_.nbytes() == 0 || arena_.device() != block.device) return false;
    arena_.sweep();
    const std::int64_t offset = arena_.find_hole(block.nbytes, spans_in_arena());
    if (offset < 0) return false;
    block.address = arena_.address(offset);
    block.home = Home::kRescue;
    if (plan_ != nullptr) take_span({offset, offset + static_cast<std::int64_t>(block.nbytes)});
    ++stats_.rescues;
    enter_arena(block);
    return true;
  }

  void enter_arena(const Block& block) {
    ++n_in_arena_;
    stats_.arena_used += static_cast<std::int64_t>(block.nbytes);
    stats_.arena_used_peak = std::max(stats_.arena_used_peak, stats_.arena_used);
  }

  void leave_arena(const Block& block, std::vector<Stream> used_by) {
    --n_in_arena_;
    stats_.arena_used -= static_cast<std::int64_t>(block.nbytes);
    if (block.home == Home::kArena && used_by.empty()) {
      // A block of an earlier step keeps its bits until the next step begins: slots of this plan may share them.
      if (in_this_step(block)) occupancy_.give_back((*plan_)[block.slot].first, (*plan_)[block.slot].last);
      return;
    }
    used_by.push_back(block.stream);
    arena_.wait_for(span_of(block), used_by);
  }

  std::vector<Stream> forget_elsewhere(const Block& block) {
    if (!block.used_elsewhere) return {};
    auto entry = elsewhere_.extract(block.address);
    return std::move(entry.mapped());
  }

  ArenaMemory::Span span_of(const Block& block) const {
    const std::int64_t offset = arena_.offset(block.address);
    return {offset, offset + static_cast<std::int64_t>(block.nbytes)};
  }

  std::vector<ArenaMemory::Span> spans_in_arena() const {
    std::vector<ArenaMemory::Span> spans;
    live_.for_each([&](const Block& block) {
      if (block.home != Home::kPool) spans.push_back(span_of(block));
    });
    return spans;
  }

  void take_span(ArenaMemory::Span span) {
    const auto [first, last] = plan_->segments(span.first, span.second);
    occupancy_.take(first, last);
  }

  // At the start of a planned step: marks the bytes of earlier steps' blocks and of waiting spans as in use.
  void mark_leftovers() {
    occupancy_.clear(plan_->n_segments());
    arena_.sweep();
    arena_.for_each_waiting([&](ArenaMemory::Span span) { take_span(span); });
    if (n_in_arena_ == 0) return;
    for (ArenaMemory::Span span : spans_in_arena()) take_span(span);
  }

  void note_reserved(int device) {
    stats_.reserved = static_cast<std::int64_t>(arena_.nbytes() + pool_.reserved(device));
    stats_.reserved_peak = std::max(stats_.reserved_peak, stats_.reserved);
  }

  void note_device() {
    stats_.device = static_cast<std::int64_t>(arena_.nbytes()) + stats_.allocated - stats_.arena_used;
    stats_.device_peak = std::max(stats_.device_peak, stats_.device);
  }

  SpinLock lock_;
  CudaRuntime cuda_;
  DevicePool pool_{cuda_};
  ArenaMemory arena_{cuda_, pool_};
  LiveBlocks live_;
  std::size_t n_in_arena_ = 0;
  std::unordered_map<std::uintptr_t, std::vector<Stream>> elsewhere_;  // other streams that used a live block

  std::int64_t last_plan_ = 0;
  std::unordered_map<std::int64_t, std::shared_ptr<const StepPlan>> plans_;
  std::unordered_map<std::int64_t, std::vector<Stream>> streams_;  // that get arena memory by a plan

  bool step_open_ = false;
  std::uint64_t step_ = 0;
  int step_device_ = -1;
  std::shared_ptr<const StepPlan> plan_;  // of the current step; null when it is only logged
  Cursor cursor_;
  Occupancy occupancy_;
  StepSummary summary_{};
  StepLog log_;
  Stats stats_{};
};

Allocator& allocator() {
  static Allocator* const only = new Allocator;
  return *only;
}

}  // namespace
}  // namespace memo

extern "C" {

using memo::Stream;

// Called by torch.

// Throws when out of memory: torch does not check the pointer, and a kernel would fault on it much later.
void* memo_arena_malloc(std::size_t nbytes, int device, Stream stream) {
  void* at = memo::allocator().allocate(nbytes, device, stream);
  if (at != nullptr) return at;
  const memo::Stats stats = memo::allocator().stats(device);
  throw std::runtime_error("CUDA out of memory: tried to allocate " + std::to_string(nbytes) + " bytes; " +
                           std::to_string(stats.allocated) + " are allocated, " + std::to_string(stats.reserved) +
                           " reserved, of which the arena " + std::to_string(stats.arena));
}

void memo_arena_free(void* at, std::size_t, int, Stream) { memo::allocator().release(at); }

void memo_arena_record_stream(void* at, Stream stream) { memo::allocator().use_elsewhere(at, stream); }

// Called by Python. Returned strings stay valid until the same thread's next call.

void* memo_arena_try_malloc(std::size_t nbytes, int device, Stream stream) {
  return memo::allocator().allocate(nbytes, device, stream);
}

const char* memo_arena_open(const char* library) {
  thread_local std::string error;
  error = memo::allocator().open(library);
  return error.empty() ? nullptr : error.c_str();
}

std::int64_t memo_arena_close() { return memo::allocator().close(); }

int memo_arena_begin_step(int device, std::int64_t plan) { return memo::allocator().begin_step(device, plan); }

int memo_arena_end_step(memo::StepSummary* out) { return memo::allocator().end_step(*out) ? 1 : 0; }

std::int64_t memo_arena_add_plan(std::int64_t n, const std::int64_t* sizes, const std::int64_t* offsets,
                                 const Stream* streams, std::int64_t arena_nbytes, const char** why) {
  thread_local std::string error;
  const std::int64_t id = memo::allocator().add_plan(n, sizes, offsets, streams, arena_nbytes, error);
  *why = error.c_str();
  return id;
}

void memo_arena_forget_plan(std::int64_t plan) { memo::allocator().forget_plan(plan); }

std::int64_t memo_arena_events(memo::LoggedEvent* out, std::int64_t capacity) {
  return memo::allocator().events(out, capacity);
}

void memo_arena_stats(int device, memo::Stats* out) { *out = memo::allocator().stats(device); }

void memo_arena_reset_peaks() { memo::allocator().reset_peaks(); }

}  // extern "C"
