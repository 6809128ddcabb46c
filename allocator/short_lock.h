// A lock for sections of a few dozen nanoseconds, which is what nearly all of the allocator's are.
//
// Taking it is one atomic exchange and giving it back a store: half of what a std::mutex costs here, and half of the time
// of a planned malloc was the mutex. Who waits gives its core away after a moment: a section that talks to the driver, or
// grows the arena, may take milliseconds.

#pragma once

#include <atomic>
#include <thread>

namespace memo {

class ShortLock {
 public:
  void lock() {
    for (int tries = 0; taken_.exchange(true, std::memory_order_acquire); ++tries)
      while (taken_.load(std::memory_order_relaxed))
        if (++tries > kPatience) std::this_thread::yield();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kPatience = 64;
  std::atomic<bool> taken_{false};
};

}  // namespace memo
