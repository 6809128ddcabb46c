// Spin lock that yields, for critical sections of a few dozen nanoseconds, as nearly all of the allocator's are.
//
// Locking is one atomic exchange and unlocking one store: half the cost of a std::mutex, which took half of the time of
// a planned malloc. Waiters yield after a few spins: a section that calls the driver, or grows the arena, may take
// milliseconds.

#pragma once

#include <atomic>
#include <thread>

namespace memo {

class SpinLock {
 public:
  void lock() {
    for (int tries = 0; taken_.exchange(true, std::memory_order_acquire); ++tries)
      while (taken_.load(std::memory_order_relaxed))
        if (++tries > kSpins) std::this_thread::yield();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kSpins = 64;  // before the first yield
  std::atomic<bool> taken_{false};
};

}  // namespace memo
