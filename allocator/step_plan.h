// Plan of a step: address of each request, occupancy of the arena, and matching of requests while the step runs.
//
//   StepPlan    slots, one per request, in order; immutable, checked when it is made
//   Occupancy   bytes of the arena in use: one bit for each segment between two neighbouring slot borders
//   Cursor      slot of the next request, also after the step has diverged from the plan
//
// The plan has no lifetimes that could be wrong. A slot is handed out only while all its segments are free, so a late
// free, on whatever thread, costs a fallback and never the same address twice.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

namespace memo {

constexpr std::size_t kAlignment = 512;  // that of torch's own allocator, which kernels rely on

struct Slot {
  std::int64_t offset = 0;  // -1: served by the pool by plan
  std::size_t nbytes = 0;
  Stream stream = nullptr;
  std::uint32_t first = 0;  // segments [first, last)
  std::uint32_t last = 0;

  bool outside() const { return offset < 0; }
  bool matches(std::size_t size, Stream on) const { return nbytes == size && stream == on; }
};

class StepPlan {
 public:
  // Returns an empty string on success, else the rule that the plan breaks.
  std::string make(std::size_t n, const std::int64_t* sizes, const std::int64_t* offsets, const Stream* streams,
                   std::size_t arena_nbytes) {
    nbytes_ = arena_nbytes;
    slots_.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      const std::string which = "slot " + std::to_string(i);
      if (sizes[i] <= 0 || sizes[i] % kAlignment != 0) return which + ": its size is not a positive multiple of 512";
      slots_[i] = Slot{offsets[i], static_cast<std::size_t>(sizes[i]), streams[i]};
      if (slots_[i].outside()) continue;
      const std::size_t offset = static_cast<std::size_t>(offsets[i]);
      if (offset % kAlignment != 0) return which + ": its offset is not a multiple of 512";
      if (offset > arena_nbytes || slots_[i].nbytes > arena_nbytes - offset) return which + ": ends outside the arena";
    }
    cut_segments();
    return one_stream_for_each_byte();
  }

  std::size_t nbytes() const { return nbytes_; }
  std::size_t size() const { return slots_.size(); }
  const Slot& operator[](std::size_t i) const { return slots_[i]; }
  std::size_t n_segments() const { return borders_.empty() ? 0 : borders_.size() - 1; }

  // Segments that overlap the bytes [begin, end).
  std::pair<std::uint32_t, std::uint32_t> segments(std::int64_t begin, std::int64_t end) const {
    const auto after = std::upper_bound(borders_.begin(), borders_.end(), begin);
    const auto upto = std::lower_bound(borders_.begin(), borders_.end(), end);
    const auto first = after == borders_.begin() ? 0 : after - borders_.begin() - 1;
    const auto last = std::min<std::ptrdiff_t>(upto - borders_.begin(), static_cast<std::ptrdiff_t>(n_segments()));
    return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(std::max<std::ptrdiff_t>(first, last))};
  }

 private:
  void cut_segments() {
    borders_.clear();
    for (const Slot& slot : slots_) {
      if (slot.outside()) continue;
      borders_.push_back(slot.offset);
      borders_.push_back(slot.offset + static_cast<std::int64_t>(slot.nbytes));
    }
    std::sort(borders_.begin(), borders_.end());
    borders_.erase(std::unique(borders_.begin(), borders_.end()), borders_.end());
    for (Slot& slot : slots_) {
      if (slot.outside()) continue;
      std::tie(slot.first, slot.last) = segments(slot.offset, slot.offset + static_cast<std::int64_t>(slot.nbytes));
    }
  }

  // Slots that share a byte must belong to one stream, whose order puts the second slot's work after the first one's.
  std::string one_stream_for_each_byte() const {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (!slots_[i].outside()) order.push_back(i);
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return slots_[a].offset < slots_[b].offset; });
    std::int64_t end = 0;
    Stream stream = nullptr;
    for (std::size_t i : order) {
      const Slot& slot = slots_[i];
      if (slot.offset < end && slot.stream != stream) return "slot " + std::to_string(i) + ": shares bytes across streams";
      end = slot.offset < end ? std::max(end, slot.offset + static_cast<std::int64_t>(slot.nbytes))
                              : slot.offset + static_cast<std::int64_t>(slot.nbytes);
      stream = slot.stream;
    }
    return "";
  }

  std::size_t nbytes_ = 0;
  std::vector<Slot> slots_;
  std::vector<std::int64_t> borders_;  // sorted; segment i is [borders_[i], borders_[i + 1])
};

class Occupancy {
 public:
  void clear(std::size_t n_segments) { words_.assign(n_segments / 64 + 1, 0); }

  bool is_free(std::uint32_t first, std::uint32_t last) const {
    std::uint64_t taken = 0;
    over(first, last, [&](std::size_t word, std::uint64_t mask) { taken |= words_[word] & mask; });
    return taken == 0;
  }
  void take(std::uint32_t first, std::uint32_t last) {
    over(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] |= mask; });
  }
  void give_back(std::uint32_t first, std::uint32_t last) {
    over(first, last, [&](std::size_t word, std::uint64_t mask) { words_[word] &= ~mask; });
  }

 private:
  template <typename Do>
  static void over(std::uint32_t first, std::uint32_t last, Do act) {
    if (first >= last) return;
    const std::size_t low = first / 64, high = (last - 1) / 64;
    const std::uint64_t head = ~0ull << (first % 64), tail = ~0ull >> (63 - (last - 1) % 64);
    if (low == high) return act(low, head & tail);
    act(low, head);
    for (std::size_t word = low + 1; word < high; ++word) act(word, ~0ull);
    act(high, tail);
  }

  std::vector<std::uint64_t> words_;
};

// Matches requests with the slots of a plan. After a mismatch the step is off the plan; it is on the plan again when a
// request matches the next slot, or two consecutive requests match two consecutive slots within kReach. One match
// further ahead could be chance.
class Cursor {
 public:
  static constexpr std::size_t kReach = 64;  // slots; about the requests of two layers

  enum class Match { kOn, kAhead, kOff };

  void start(const StepPlan* plan) { *this = Cursor(), plan_ = plan; }

  std::size_t next() const { return next_; }
  bool at_end() const { return next_ >= plan_->size(); }

  // Sets `slot` to the request's slot, unless the result is kOff. kAhead: slots were skipped.
  Match match(std::size_t nbytes, Stream stream, std::uint32_t& slot) {
    Match found = Match::kOff;
    if (!at_end() && (*plan_)[next_].matches(nbytes, stream)) {
      found = Match::kOn;
    } else if (off_) {
      const std::size_t end = std::min(plan_->size(), next_ + kReach);
      for (std::size_t i = next_ + 1; i < end && found == Match::kOff; ++i) {
        if ((*plan_)[i].matches(nbytes, stream) && (*plan_)[i - 1].matches(last_nbytes_, last_stream_)) {
          next_ = i;
          found = Match::kAhead;
        }
      }
    }
    off_ = found == Match::kOff;
    last_nbytes_ = nbytes;
    last_stream_ = stream;
    if (!off_) slot = static_cast<std::uint32_t>(next_++);
    return found;
  }

 private:
  const StepPlan* plan_ = nullptr;
  std::size_t next_ = 0;
  bool off_ = false;  // the last request matched nothing
  std::size_t last_nbytes_ = 0;
  Stream last_stream_ = nullptr;
};

}  // namespace memo
