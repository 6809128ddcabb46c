// The loop of benchmarks/arena_cost.py: a step's mallocs and frees, again and again, with nothing else in between.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

using Malloc = void* (*)(std::size_t, int, void*);
using Free = void (*)(void*, std::size_t, int, void*);
using Begin = int (*)(int, std::int64_t);
using End = int (*)(void*);

// Plays `steps` steps of `n` calls, call i being a malloc of `nbytes[i]` for block `block[i]`, or its free where that is
// negative. `plan` -1 opens no steps. Returns nanoseconds; `summary` receives the last step's.
extern "C" std::int64_t memo_arena_cost(Malloc malloc, Free free, Begin begin, End end, std::int64_t plan,
                                        std::int64_t steps, std::int64_t n, const std::int64_t* block,
                                        const std::int64_t* nbytes, void* summary) {
  std::int64_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) most = block[i] > most ? block[i] : most;
  std::vector<void*> at(static_cast<std::size_t>(most) + 1);
  const auto start = std::chrono::steady_clock::now();
  for (std::int64_t step = 0; step < steps; ++step) {
    if (plan >= 0) begin(0, plan);
    for (std::int64_t i = 0; i < n; ++i) {
      void*& place = at[static_cast<std::size_t>(block[i])];
      if (nbytes[i] >= 0) place = malloc(static_cast<std::size_t>(nbytes[i]), 0, nullptr);
      else free(place, 0, 0, nullptr);
    }
    if (plan >= 0) end(summary);
  }
  const auto took = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
}

extern "C" void* plain_malloc(std::size_t, int, void*) { return std::malloc(64); }  // of any size: large ones are mapped

extern "C" void plain_free(void* at, std::size_t, int, void*) { std::free(at); }
