// Log of the allocator events of one step, which Python reads afterwards to make a plan.
//
// Owns the events of the current or last step. Not thread-safe; callers hold a lock. A step of more than kMaxEvents
// counts as not logged: a plan from part of a step would be wrong.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_runtime.h"
#include "live_blocks.h"

namespace memo {

// Mirrored by allocator/native.py.
enum class Kind : std::int32_t { kMalloc = 0, kFree = 1, kUsedElsewhere = 2 };

struct LoggedEvent {
  std::int64_t request;  // number of the malloc among the step's, from 0
  std::int64_t nbytes;
  Stream stream;  // of the block; for kUsedElsewhere the other stream
  Kind kind;
  std::int32_t thread;  // numbered by first appearance
};

class StepLog {
 public:
  static constexpr std::size_t kMaxEvents = 1u << 22;

  void start() {
    n_ = 0;
    whole_ = true;
  }

  void write(Kind kind, const Block& block, Stream stream) {
    if (n_ == events_.size()) {
      if (n_ >= kMaxEvents) {
        whole_ = false;
        return;
      }
      events_.resize(std::max<std::size_t>(1024, 2 * n_));
    }
    LoggedEvent& event = events_[n_++];
    event.request = block.request;
    event.nbytes = static_cast<std::int64_t>(block.nbytes);
    event.stream = stream;
    event.kind = kind;
    event.thread = this_thread();
  }

  // Copies the first `capacity` events to `out` and returns their total number; -1: more than kMaxEvents.
  std::int64_t read(LoggedEvent* out, std::int64_t capacity) const {
    if (!whole_) return -1;
    const std::size_t n = std::min(static_cast<std::size_t>(std::max<std::int64_t>(capacity, 0)), n_);
    if (n != 0) std::memcpy(out, events_.data(), n * sizeof(LoggedEvent));
    return static_cast<std::int64_t>(n_);
  }

 private:
  static std::int32_t this_thread() {
    static std::atomic<std::int32_t> count{0};
    constinit thread_local std::int32_t number = -1;  // constinit: avoids an initialisation check at each call
    if (number < 0) number = count++;
    return number;
  }

  std::vector<LoggedEvent> events_;  // the first n_ are valid
  std::size_t n_ = 0;
  bool whole_ = true;
};

}  // namespace memo
