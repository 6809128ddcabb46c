// Canonical branch and bound for dynamic storage allocation; tests/support/tree_search.py is its second opinion.
//
// Any placement can be pushed down until every buffer rests on the ground or on another, and its buffers can be listed in
// ascending order of (offset, rank). So it is enough to build placements in that order, each buffer at the lowest place
// above all it overlaps in time: a canonical placement. The tree has no other nodes. Pruning:
//
// Order        A buffer that could have come before the last placed one but did not must wait until something below it
//              lifts it; with it in its place the branch was, or will be, explored elsewhere.
// Dominance    A buffer is not a choice while another one fits entirely below it: in any solution that takes it first, the
//              other can be moved down there, which is another branch.
// Sections     In each section the unplaced buffers must fit above the lowest offset that any of them can have there.
// Parts        Where no unplaced buffer crosses an instant, both sides of it are solved separately.
// Memory       A state (waiting flags and offsets of the unplaced buffers) that failed once fails again. States are
//              identified by a 64-bit hash.
//
// `floor` of a section is the least offset any buffer still to be placed there can have. Between a node and its first
// child only the sections whose lowest buffer moved can change, and only those are recomputed; after a failed child all
// of them are.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "instance.h"

namespace memo {

inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// The offset of the last placed buffer and its rank: later ones come after it in this order.
template <class Unit>
struct After {
    Unit offset;
    int rank;
};

template <class Unit>
class Tree {
    using Low = After<Unit>;
    static constexpr Unit kNever = Instance<Unit>::kNever;

  public:
    int64_t nodes = 0;

    // A part of more than `small_part` buffers is met once, on the way down: its state is not remembered, and its floors
    // are kept from node to node. In a smaller one so many nodes fail that straight loops over all of it are quicker.
    Tree(const Instance<Unit>& in, Unit capacity, int64_t node_limit, int32_t small_part, const Clock& clock,
         int64_t* conflicts, int64_t* out)
        : in(in), capacity(capacity), node_limit(node_limit), small_part(small_part), clock(clock),
          conflicts(conflicts), out(out),
          offset(in.n, 0), least(in.n, 0), placed(in.n, 0), rest(in.sections, 0), floor(in.sections, 0),
          crossing(in.sections + 1, 0), witness(in.sections, 0),
          witnessed(in.n, 0) {
        list_sections();
        size_t slots = 1 << 12;
        while (slots < size_t(node_limit) * 2 && slots < (1u << 21)) slots *= 2;
        failed.assign(slots, 0);
        for (int i = 0; i < in.n; i++) carry(i, +1);
    }

    // 1 found, 0 proven impossible, 2 stopped.
    int run() {
        std::vector<int> all(in.n);
        for (int i = 0; i < in.n; i++) {
            all[i] = i;
            if (offset[i] + in.sizes[i] > capacity) return 0;
        }
        bool found = descend(all, in.n, 0, in.sections, Low{0, -1}, 0, in.sections, false);
        return found ? 1 : stopped ? 2 : 0;
    }

  private:
    const Instance<Unit>& in;
    const Unit capacity;
    const int64_t node_limit;
    const size_t small_part;
    const Clock& clock;
    int64_t* conflicts;
    int64_t* out;
    bool stopped = false;
    std::vector<Unit> offset;  // lowest place above everything placed that it meets
    std::vector<Unit> least;   // the same, but for a buffer that must wait, the least it can get by waiting
    std::vector<char> placed;
    std::vector<Unit> rest, floor;
    std::vector<int> crossing;  // unplaced buffers over each section boundary
    std::vector<std::pair<int, Unit>> trail;
    std::vector<uint64_t> failed;
    std::vector<int> inside_row, inside;  // for each section the buffers that live in it
    std::vector<int> moved;               // sections whose floor is to be recomputed
    std::vector<int> witness, witnessed;  // the buffer a section's floor comes from; how many sections a buffer is it of

    void list_sections() {
        inside_row.assign(in.sections + 1, 0);
        for (int i = 0; i < in.n; i++) in.each_section(i, [&](int s) { inside_row[s + 1]++; });
        for (int s = 0; s < in.sections; s++) inside_row[s + 1] += inside_row[s];
        inside.resize(inside_row[in.sections]);
        std::vector<int> next(inside_row.begin(), inside_row.end() - 1);
        for (int i = 0; i < in.n; i++) in.each_section(i, [&](int s) { inside[next[s]++] = i; });
    }

    void carry(int i, int sign) {
        in.each_section(i, [&](int s) { rest[s] += sign * in.sizes[i]; });
        for (int s = in.lo[i] + 1; s < in.hi[i]; s++) crossing[s] += sign;
    }

    bool waits(int i, Low low) const { return offset[i] < low.offset || (offset[i] == low.offset && i < low.rank); }

    bool room(int s) {
        if (rest[s] == 0 || floor[s] <= capacity - rest[s]) return true;
        conflicts[s]++;
        return false;
    }

    bool floors(const std::vector<int>& part, int first, int last, Low low, Unit smallest) {
        std::fill(floor.begin() + first, floor.begin() + last, kNever);
        Unit* at_section = floor.data();
        for (int i : part) {
            if (placed[i]) continue;
            Unit at = waits(i, low) ? low.offset + smallest : offset[i];
            in.each_section(i, [&](int s) { at_section[s] = std::min(at_section[s], at); });
        }
        bool ok = true;
        for (int s = first; s < last; s++) ok &= (rest[s] == 0) | (at_section[s] <= capacity - rest[s]);
        for (int s = first; s < last && !ok; s++) room(s);
        return ok;
    }

    // The same, and remembers which buffer each floor comes from.
    bool floors_and_witnesses(const std::vector<int>& part, int first, int last, Low low, Unit smallest) {
        std::fill(floor.begin() + first, floor.begin() + last, kNever);
        for (int i : part) {
            if (placed[i]) continue;
            witnessed[i] = 0;
            Unit at = least[i] = waits(i, low) ? low.offset + smallest : offset[i];
            in.each_section(i, [&](int s) {
                witness[s] = at < floor[s] ? i : witness[s];
                floor[s] = std::min(floor[s], at);
            });
        }
        bool ok = true;
        for (int s = first; s < last; s++) {
            ok &= room(s);
            if (floor[s] < kNever) witnessed[witness[s]]++;
        }
        return ok;
    }

    // Raises the least offset of a buffer and notes the sections whose floor it was.
    void raise(int i, Unit at) {
        least[i] = at;
        if (!witnessed[i]) return;
        in.each_section(i, [&](int s) {
            if (witness[s] == i) moved.push_back(s);
        });
    }

    bool refresh(bool ok) {
        for (int s : moved) {
            if (!ok) break;
            witnessed[witness[s]]--;
            Unit at = kNever;
            for (int x = inside_row[s]; x < inside_row[s + 1]; x++)
                if (least[inside[x]] < at) at = least[witness[s] = inside[x]];
            floor[s] = at;
            if (at < kNever) witnessed[witness[s]]++;
            ok = room(s);
        }
        moved.clear();
        return ok;
    }

    // `part` may still list placed buffers; `live` of it are not. `fresh`: floors are those of this very state.
    bool solve(const std::vector<int>& part, size_t live, int first, int last, Low low, bool fresh) {
        if (!live) return true;
        if (++nodes > node_limit || clock.over()) {
            stopped = true;
            return false;
        }
        Unit smallest = kNever, ceiling = kNever;
        for (int i : part)
            if (!placed[i]) smallest = std::min(smallest, in.sizes[i]);
        bool small = live <= small_part, waiting = false;
        uint64_t key = 0;
        std::vector<std::pair<Unit, int>> choices;
        for (int i : part) {
            if (placed[i]) continue;
            bool waits_ = waits(i, low);
            Unit at = waits_ ? low.offset + smallest : offset[i];
            waiting |= waits_;
            if (small) key ^= mix(uint64_t(i) * 0x9e3779b97f4a7c15ull + mix(waits_ ? ~0ull : uint64_t(at)));
            ceiling = std::min(ceiling, at + in.sizes[i]);
            if (!waits_ && at < ceiling) choices.emplace_back(at, i);
        }
        if (waiting) key ^= mix(~uint64_t(low.offset));
        uint64_t* slot = small ? &failed[key & (failed.size() - 1)] : nullptr;
        if (slot && *slot == key) return false;
        choices.erase(std::remove_if(choices.begin(), choices.end(), [&](auto& c) { return c.first >= ceiling; }),
                      choices.end());
        std::sort(choices.begin(), choices.end());
        for (auto [at, i] : choices) {
            Low low_ = {at, i};
            if (small && !floors(part, first, last, low_, smallest)) break;
            if (!small && !fresh && !floors_and_witnesses(part, first, last, low_, smallest)) break;
            fresh = false;
            if (place(part, live, first, last, at, i, small)) return true;
            if (stopped) return false;
        }
        if (slot) *slot = key;
        return false;
    }

    bool place(const std::vector<int>& part, size_t live, int first, int last, Unit at, int i, bool small) {
        bool ok = true;
        in.each_section(i, [&](int s) { ok &= at + rest[s] <= capacity; });
        if (!ok) return false;
        size_t mark = trail.size();
        Unit top = at + in.sizes[i];
        placed[i] = 1;
        carry(i, -1);
        if (!small) raise(i, kNever);
        for (int k : part) {
            if (in.lo[k] >= in.hi[i] || in.lo[i] >= in.hi[k] || offset[k] >= top || placed[k]) continue;
            trail.emplace_back(k, offset[k]);
            offset[k] = in.align(k, top);
            if (offset[k] + in.sizes[k] > capacity) {
                ok = false;
                break;
            }
            if (!small && least[k] < offset[k]) raise(k, offset[k]);
        }
        ok = (small ? ok : refresh(ok)) && descend(part, live - 1, first, last, Low{at, i}, in.lo[i], in.hi[i], true);
        carry(i, +1);
        placed[i] = 0;
        for (; trail.size() > mark; trail.pop_back()) offset[trail.back().first] = trail.back().second;
        if (ok) out[i] = at;
        return ok;
    }

    // Where no unplaced buffer crosses a boundary the part falls into parts that are solved one by one. Only the
    // boundaries inside [from, to), which the last buffer crossed, can be new.
    bool descend(const std::vector<int>& part, size_t live, int first, int last, Low low, int from, int to, bool fresh) {
        bool whole = true;
        for (int s = from + 1; s < to; s++) whole &= crossing[s] != 0;
        if (whole) {
            if (live * 2 > part.size()) return solve(part, live, first, last, low, fresh);
            std::vector<int> alive;
            alive.reserve(live);
            for (int k : part)
                if (!placed[k]) alive.push_back(k);
            return solve(alive, live, first, last, low, fresh);
        }
        std::vector<std::pair<int, int>> cuts;
        int begin = first;
        for (int s = first + 1; s <= last; s++)
            if (s == last || !crossing[s]) {
                cuts.emplace_back(begin, s);
                begin = s;
            }
        std::vector<std::vector<int>> parts(cuts.size());
        std::vector<int> owner(last - first);
        for (size_t c = 0; c < cuts.size(); c++)
            for (int s = cuts[c].first; s < cuts[c].second; s++) owner[s - first] = int(c);
        for (int k : part)
            if (!placed[k]) parts[owner[in.lo[k] - first]].push_back(k);
        std::vector<int> order(cuts.size());
        for (size_t c = 0; c < cuts.size(); c++) order[c] = int(c);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return parts[a].size() < parts[b].size(); });
        for (int c : order)
            if (!solve(parts[c], parts[c].size(), cuts[c].first, cuts[c].second, low, fresh)) return false;
        return true;
    }
};

}  // namespace memo
