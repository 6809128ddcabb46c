// Device memory of the arena, allocated once, and the ordering of the streams that use it.
//
// Owns the memory and the waiting spans: blocks that were freed while a stream other than the plan's may still use
// them. A waiting span is free once its events are done. The caller tracks the live blocks in the arena.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "device_pool.h"

namespace memo {

class ArenaMemory {
 public:
  using Span = std::pair<std::int64_t, std::int64_t>;

  enum class Hold { kHeld, kBusy, kNoRoom };

  ArenaMemory(const CudaRuntime& cuda, DevicePool& pool) : cuda_(cuda), pool_(pool) {}

  std::size_t nbytes() const { return nbytes_; }
  int device() const { return device_; }
  std::size_t n_taken() const { return n_taken_; }
  std::uintptr_t address(std::int64_t offset) const { return base_ + static_cast<std::uintptr_t>(offset); }
  std::int64_t offset(std::uintptr_t address) const { return static_cast<std::int64_t>(address - base_); }

  // Makes the arena at least `nbytes` large. It grows only while it is empty: blocks never move.
  Hold hold(std::size_t nbytes, int device, std::size_t n_blocks) {
    if (nbytes_ >= nbytes && device_ == device) return Hold::kHeld;
    sweep();
    if (n_blocks != 0 || !waiting_.empty()) return Hold::kBusy;
    give_back();
    OnDevice guard(cuda_, device);
    pool_.trim(device);
    void* at = nullptr;
    if (!cuda_.ok(cuda_.malloc(&at, nbytes))) return Hold::kNoRoom;
    ++n_taken_;
    base_ = reinterpret_cast<std::uintptr_t>(at);
    nbytes_ = nbytes;
    device_ = device;
    return Hold::kHeld;
  }

  // Frees the device memory; the arena must be empty.
  void give_back() {
    if (nbytes_ == 0) return;
    OnDevice guard(cuda_, device_);
    cuda_.ok(cuda_.device_synchronize());
    sweep();
    cuda_.ok(cuda_.free(reinterpret_cast<void*>(base_)));
    base_ = 0;
    nbytes_ = 0;
    streams_.clear();
  }

  // Resets to the initial state; the arena must be empty.
  void restart() {
    give_back();
    n_taken_ = 0;
  }

  // Declares the streams that get memory from here on, and orders them after all earlier ones. Within a plan bytes are
  // reused on one stream only, in its own order; they pass from stream to stream only between plans.
  void admit(const std::vector<Stream>& streams) {
    for (Stream stream : streams)
      if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
    if (streams_.size() < 2) return;
    OnDevice guard(cuda_, device_);
    for (std::size_t i = 0; i < streams_.size();) {
      const Event end = cuda_.mark(streams_[i]);
      if (end == nullptr) {  // the stream was destroyed; its work may still run
        cuda_.ok(cuda_.device_synchronize());
        streams_.erase(streams_.begin() + static_cast<std::ptrdiff_t>(i));
        continue;
      }
      for (Stream other : streams_)
        if (other != streams_[i]) cuda_.ok(cuda_.stream_wait(other, end, 0));
      cuda_.ok(cuda_.event_destroy(end));  // the runtime keeps it until it has fired
      ++i;
    }
  }

  // Makes the span wait for all work issued on `streams` so far.
  void wait_for(Span span, const std::vector<Stream>& streams) {
    OnDevice guard(cuda_, device_);
    Waiting waiting{span, {}};
    for (Stream stream : streams) {
      const Event end = cuda_.mark(stream);
      if (end == nullptr) cuda_.ok(cuda_.device_synchronize());
      else waiting.ends.push_back(end);
    }
    waiting_.push_back(std::move(waiting));
  }

  // Drops the spans whose events are done.
  void sweep() {
    auto over = [&](Waiting& waiting) {
      auto done = [&](Event end) {
        if (!cuda_.ok(cuda_.event_query(end))) return false;
        cuda_.ok(cuda_.event_destroy(end));
        return true;
      };
      auto& ends = waiting.ends;
      ends.erase(std::remove_if(ends.begin(), ends.end(), done), ends.end());
      return ends.empty();
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), over), waiting_.end());
  }

  template <typename Visit>
  void for_each_waiting(Visit visit) const {
    for (const Waiting& waiting : waiting_) visit(waiting.span);
  }

  // Offset of the smallest hole of at least `nbytes` between the `taken` and waiting spans, or -1.
  std::int64_t find_hole(std::size_t nbytes, std::vector<Span> taken) const {
    for_each_waiting([&](Span span) { taken.push_back(span); });
    std::sort(taken.begin(), taken.end());
    taken.emplace_back(nbytes_, nbytes_);
    const std::int64_t wanted = static_cast<std::int64_t>(nbytes);
    std::int64_t end = 0, best = -1, best_room = INT64_MAX;
    for (const auto& [begin, upto] : taken) {
      const std::int64_t room = begin - end;
      if (room >= wanted && room < best_room) best = end, best_room = room;
      end = std::max(end, upto);
    }
    return best;
  }

 private:
  struct Waiting {
    Span span;
    std::vector<Event> ends;
  };

  const CudaRuntime& cuda_;
  DevicePool& pool_;
  std::uintptr_t base_ = 0;
  std::size_t nbytes_ = 0;
  int device_ = -1;
  std::size_t n_taken_ = 0;       // cudaMalloc calls
  std::vector<Stream> streams_;   // that got memory since the arena was allocated
  std::vector<Waiting> waiting_;
};

}  // namespace memo
