// Placed buffers sorted by a key, and any subset of them in that order without sorting it.
//
// The buffers lie in blocks of up to 64, each with a word of marks. A subset is marked bit by bit, in whatever order it
// is found, and read out block by block, bit by bit.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace memo {

class Shelf {
  public:
    explicit Shelf(int n) : place(n, -1), key(n, 0) {}

    bool has(int i) const { return place[i] >= 0; }
    int64_t at(int i) const { return key[i]; }

    void insert(int i, int64_t at) {
        key[i] = at;
        if (order.empty()) {
            order.push_back(make_block());
            least.push_back(at);
        }
        size_t d = find(at);
        if (blocks[order[d]].count == kBlock) {
            split(d);
            if (at >= least[d + 1]) d++;
        }
        int b = order[d];
        Block& block = blocks[b];
        int p = block.count++;
        for (; p > 0 && key[block.members[p - 1]] > at; p--) put(b, p, block.members[p - 1]);
        put(b, p, i);
        if (p == 0) least[d] = at;
    }

    void erase(int i) {
        int b = place[i] / kBlock, p = place[i] % kBlock;
        Block& block = blocks[b];
        place[i] = -1;
        for (block.count--; p < block.count; p++) put(b, p, block.members[p + 1]);
        if (block.count) return;
        size_t d = find(key[i]);
        while (order[d] != b) d--;  // several blocks may begin with one key
        order.erase(order.begin() + d);
        least.erase(least.begin() + d);
        spare.push_back(b);
    }

    void mark(int i) {
        int at = place[i];
        if (at >= 0) blocks[at / kBlock].marks |= uint64_t(1) << at % kBlock;
    }

    // Calls f(i) for the marked buffers in ascending order of their keys, and unmarks them.
    template <class F>
    void drain(F f) {
        for (int b : order) {
            uint64_t marks = blocks[b].marks;
            blocks[b].marks = 0;
            for (; marks; marks &= marks - 1) f(blocks[b].members[std::countr_zero(marks)]);
        }
    }

  private:
    static constexpr int kBlock = 64;
    struct Block {
        uint64_t marks = 0;
        int count = 0;
        std::array<int, kBlock> members;
    };
    std::vector<int> place;  // block * 64 + position, or -1
    std::vector<int64_t> key;
    std::vector<Block> blocks;
    std::vector<int> order;      // blocks in the order of their keys
    std::vector<int64_t> least;  // by place in that order, no more than the block's first key
    std::vector<int> spare;

    size_t find(int64_t at) const {
        size_t d = std::upper_bound(least.begin(), least.end(), at) - least.begin();
        return d ? d - 1 : 0;
    }

    void put(int b, int p, int i) {
        blocks[b].members[p] = i;
        place[i] = b * kBlock + p;
    }

    int make_block() {
        if (spare.empty()) {
            blocks.emplace_back();
            return int(blocks.size()) - 1;
        }
        int b = spare.back();
        spare.pop_back();
        return b;
    }

    void split(size_t d) {
        int upper = make_block(), b = order[d];
        for (int p = kBlock / 2; p < kBlock; p++) put(upper, p - kBlock / 2, blocks[b].members[p]);
        blocks[b].count = blocks[upper].count = kBlock / 2;
        order.insert(order.begin() + d + 1, upper);
        least.insert(least.begin() + d + 1, key[blocks[upper].members[0]]);
    }
};

}  // namespace memo
