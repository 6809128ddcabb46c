// What is counted and told of the allocator, and of one step: the structs and numbers that allocator/native.py reads.

#pragma once

#include <cstdint>

#include "cuda_runtime.h"

namespace memo {

enum class Reason : std::int64_t {
  kNone = 0,
  kOtherSize = 1,
  kOtherStream = 2,
  kExtra = 3,          // after the plan's last request
  kMissing = 4,        // planned requests did not come
  kTaken = 5,          // the planned place is still held by a block that was to be freed by now
  kUsedElsewhere = 6,  // a planned block was used by another stream
  kUnknownFree = 7     // freed twice, or never allocated
};

struct Divergence {
  Reason reason;
  std::int64_t request;  // the step's, from 0
  std::int64_t slot;     // the plan's
  std::int64_t expected_nbytes;
  Stream expected_stream;
  std::int64_t got_nbytes;
  Stream got_stream;
};

struct StepSummary {
  std::int64_t requests;
  std::int64_t planned;  // served at their planned place
  std::int64_t outside;  // by plan served from the pool
  std::int64_t fallbacks;
  std::int64_t fallback_nbytes;
  std::int64_t divergences;
  Divergence first;
};

struct Stats {
  std::int64_t allocated, allocated_peak;
  std::int64_t reserved, reserved_peak;
  std::int64_t arena, arena_used, arena_used_peak;
  std::int64_t requests, frees, planned, outside, fallbacks, fallback_nbytes;
  std::int64_t divergences, divergent_steps, unknown_frees, rescues, out_of_memory;
  std::int64_t arena_mallocs, device_mallocs, pool_mallocs;
};

enum Begin : int { kWatching = 0, kReplaying = 1, kBusy = 2, kNoRoom = 3, kAlreadyOpen = -1 };

}  // namespace memo
