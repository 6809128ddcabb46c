// Hash table of live blocks by address.
//
// Open addressing with linear probing; a removal moves later entries of the probe sequence forward, so there are no
// tombstones and a look-up ends at the first empty place. At most half full. Allocates only to grow.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

namespace memo {

constexpr std::uint32_t kNoSlot = UINT32_MAX;

enum class Home : std::uint8_t {
  kPool,   // the driver's pool
  kArena,  // the arena, at the planned address
  kRescue  // the arena, at an unplanned address, because the device was full
};

struct Block {
  std::uintptr_t address = 0;  // 0 marks an empty place of the table
  std::size_t nbytes = 0;      // as served: never 0, a multiple of the alignment
  Stream stream = nullptr;
  std::uint64_t step = 0;      // step that allocated it; 0: between steps
  std::uint32_t request = 0;   // its number among that step's requests
  std::uint32_t slot = kNoSlot;
  std::int32_t device = 0;
  Home home = Home::kPool;
  bool used_elsewhere = false;  // by a stream other than its own
};

class LiveBlocks {
 public:
  LiveBlocks() : places_(1024) {}

  std::size_t size() const { return size_; }

  // Copied field by field, here and in the log: copying a struct whole right after its fields were written stalls on
  // store forwarding, which took half of the time of a planned malloc.
  void insert(const Block& block) {
    if (2 * (size_ + 1) > places_.size()) grow();
    Block& place = empty_place(block.address);
    place.address = block.address;
    place.nbytes = block.nbytes;
    place.stream = block.stream;
    place.step = block.step;
    place.request = block.request;
    place.slot = block.slot;
    place.device = block.device;
    place.home = block.home;
    place.used_elsewhere = block.used_elsewhere;
    ++size_;
  }

  Block* find(std::uintptr_t address) {
    for (std::size_t at = home(address); places_[at].address != 0; at = next(at))
      if (places_[at].address == address) return &places_[at];
    return nullptr;
  }

  // Removes the block at `address` and copies it to `out`; false if there is none.
  bool take(std::uintptr_t address, Block& out) {
    Block* found = address == 0 ? nullptr : find(address);
    if (found == nullptr) return false;
    out = *found;
    close_gap(static_cast<std::size_t>(found - places_.data()));
    --size_;
    return true;
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Block& block : places_)
      if (block.address != 0) visit(block);
  }

 private:
  // Addresses differ in their middle bits; the multiplication carries those to the top bits, which are used.
  std::size_t home(std::uintptr_t address) const {
    const std::uint64_t mixed = (address >> 9) * 0x9E3779B97F4A7C15ull;
    return static_cast<std::size_t>(mixed >> 32) & (places_.size() - 1);
  }
  std::size_t next(std::size_t at) const { return (at + 1) & (places_.size() - 1); }

  Block& empty_place(std::uintptr_t address) {
    std::size_t at = home(address);
    while (places_[at].address != 0) at = next(at);
    return places_[at];
  }

  void close_gap(std::size_t gap) {
    for (std::size_t at = next(gap); places_[at].address != 0; at = next(at)) {
      // An entry may move to the gap unless its home lies between the gap and the entry.
      const std::size_t mask = places_.size() - 1;
      if (((at - home(places_[at].address)) & mask) < ((at - gap) & mask)) continue;
      places_[gap] = places_[at];
      gap = at;
    }
    places_[gap].address = 0;
  }

  void grow() {
    std::vector<Block> before(2 * places_.size());
    std::swap(before, places_);
    for (const Block& block : before)
      if (block.address != 0) empty_place(block.address) = block;
  }

  std::vector<Block> places_;
  std::size_t size_ = 0;
};

}  // namespace memo
