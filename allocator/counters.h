// Counters of the allocator and summary of a step: structs and constants that allocator/native.py mirrors.

#pragma once

#include <cstdint>

#include "cuda_runtime.h"

namespace memo {

enum class Reason : std::int64_t {
  kNone = 0,
  kOtherSize = 1,
  kOtherStream = 2,
  kExtra = 3,          // request after the plan's last one
  kMissing = 4,        // planned requests were not made
  kTaken = 5,          // the planned address is still in use by a block that should be freed by now
  kUsedElsewhere = 6,  // a planned block was used by another stream
  kUnknownFree = 7     // free of a block that is not allocated
};

struct Divergence {
  Reason reason;
  std::int64_t request;  // number among the step's, from 0
  std::int64_t slot;     // number among the plan's, from 0
  std::int64_t expected_nbytes;
  Stream expected_stream;
  std::int64_t got_nbytes;
  Stream got_stream;
};

struct StepSummary {
  std::int64_t requests;
  std::int64_t planned;    // served at their planned address
  std::int64_t outside;    // served by the pool by plan
  std::int64_t fallbacks;  // served by the pool against the plan
  std::int64_t fallback_nbytes;
  std::int64_t divergences;
  Divergence first;
};

struct Stats {
  std::int64_t allocated, allocated_peak;
  std::int64_t reserved, reserved_peak;
  std::int64_t device, device_peak;  // the arena, and the blocks outside it; the peak is never restarted
  std::int64_t arena, arena_used, arena_used_peak;
  std::int64_t requests, frees, planned, outside, fallbacks, fallback_nbytes;
  std::int64_t divergences, divergent_steps, unknown_frees, rescues, out_of_memory;
  std::int64_t arena_mallocs, device_mallocs, pool_mallocs;
};

enum Begin : int { kWatching = 0, kReplaying = 1, kBusy = 2, kNoRoom = 3, kAlreadyOpen = -1 };

}  // namespace memo
