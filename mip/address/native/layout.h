// Greedy fit, and the local search that refills a placement below a smaller height.
//
// Refill takes out what ends above the target and puts the buffers back one by one. One that fits into no gap goes where
// the buffers in its way weigh least; those are taken out in turn. A buffer weighs its size and its width, to powers that
// the caller gives, times the number of times it was put in by force: what is hard to place stops being taken out. (Guided
// ejection: Nagata and Braysy, 2009, for vehicle routing.)

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "instance.h"
#include "neighbours.h"
#include "shelf.h"

namespace memo {

class Layout {
  public:
    // The ranks of `in` must ascend by first section.
    Layout(const Instance<int64_t>& in, const Clock& clock)
        : in(in), clock(clock), neighbours(in), offset(in.n, -1), begins(in.n), ends(in.n) {}

    // First fit in the order of time: seldom good, but it takes milliseconds where another order takes a second, since what
    // is free at one moment is one list.
    void sweep() {
        std::vector<Gap> free{{0, kNoCeiling}};  // ascending; no two touch
        using Death = std::pair<int, int>;       // its section, and the buffer
        std::priority_queue<Death, std::vector<Death>, std::greater<>> living;
        for (int i = 0; i < in.n; i++) {
            for (; !living.empty() && living.top().first <= in.lo[i]; living.pop()) {
                int dead = living.top().second;
                give_back(free, {offset[dead], top(dead)});
            }
            auto gap = free.begin();
            while (in.align(i, gap->begin) + in.sizes[i] > gap->end) gap++;
            offset[i] = in.align(i, gap->begin);
            Gap below{gap->begin, offset[i]}, above{top(i), gap->end};
            gap = free.erase(gap);
            if (above.begin < above.end) gap = free.insert(gap, above);
            if (below.begin < below.end) free.insert(gap, below);
            living.emplace(in.hi[i], i);
        }
    }

    // One pass in the order given: each buffer goes into the first, or the tightest, gap. False: out of time.
    bool fit(const std::vector<int>& order, bool best) {
        for (int i : order) {
            if (clock.over()) return false;
            list_in_the_way(i);
            place(i, gap(i, kNoCeiling, best));
        }
        return true;
    }

    // Puts the buffers of a placement, -1 for those it leaves out, below the target. True when all are, which takes at most
    // `steps` buffers put in by force.
    bool refill(const int64_t* start, int64_t target, int64_t steps, uint64_t seed, double by_size, double by_width) {
        ejects = true;
        std::vector<int> out;
        for (int i = 0; i < in.n; i++) {
            if (start[i] >= 0 && start[i] + in.sizes[i] <= target)
                place(i, start[i]);
            else
                out.push_back(i);
        }
        weigh(by_size, by_width);
        std::stable_sort(out.begin(), out.end(), [&](int a, int b) { return in.sizes[a] > in.sizes[b]; });
        std::vector<int> waiting;
        for (int i : out) {
            if (clock.over()) return false;
            list_in_the_way(i);
            int64_t at = gap(i, target, true);
            if (at < 0)
                waiting.push_back(i);
            else
                place(i, at);
        }
        std::mt19937_64 draw(seed);
        while (!waiting.empty()) {
            if (clock.over()) return false;
            std::swap(waiting[draw() % waiting.size()], waiting.back());
            int i = waiting.back();
            waiting.pop_back();
            list_in_the_way(i);
            int64_t at = gap(i, target, true);
            if (at < 0) {
                if (!steps--) return false;
                weight[i] += base[i];
                at = lightest(i, target, draw);
                if (at < 0) return false;  // it is larger than the target
                for (int k : in_the_way)
                    if (offset[k] < at + in.sizes[i] && top(k) > at) {
                        take(k);
                        waiting.push_back(k);
                    }
            }
            place(i, at);
        }
        return true;
    }

    const std::vector<int64_t>& offsets() const { return offset; }

  private:
    static constexpr int64_t kNoCeiling = std::numeric_limits<int64_t>::max() / 4;
    const Instance<int64_t>& in;
    const Clock& clock;
    Neighbours neighbours;
    std::vector<int64_t> offset;
    Shelf begins, ends;  // placed buffers by offset and, where some may have to make way, by top
    bool ejects = false;
    std::vector<double> base, weight;  // whole numbers, so that sums are exact
    std::vector<int> in_the_way;       // the placed buffers that the one in hand meets, by offset

    struct Gap {
        int64_t begin, end;
    };

    static void give_back(std::vector<Gap>& free, Gap gap) {
        auto next = std::find_if(free.begin(), free.end(), [&](const Gap& g) { return g.begin >= gap.end; });
        if (next != free.end() && next->begin == gap.end) {
            gap.end = next->end;
            next = free.erase(next);
        }
        if (next != free.begin() && std::prev(next)->end == gap.begin)
            std::prev(next)->end = gap.end;
        else
            free.insert(next, gap);
    }

    int64_t top(int i) const { return offset[i] + in.sizes[i]; }

    void place(int i, int64_t at) {
        offset[i] = at;
        begins.insert(i, at);
        if (ejects) ends.insert(i, top(i));
    }

    void take(int i) {
        begins.erase(i);
        ends.erase(i);
        offset[i] = -1;
    }

    void list_in_the_way(int i) {
        in_the_way.clear();
        neighbours.each(i, [&](int k) { begins.mark(k); });
        begins.drain([&](int k) { in_the_way.push_back(k); });
    }

    // The lowest gap below the ceiling that the buffer fits into, or of the tightest ones the lowest; -1: there is none.
    int64_t gap(int i, int64_t ceiling, bool best) const {
        int64_t at = 0, chosen = -1, slack = kNoCeiling + 1;
        auto offer = [&](int64_t end) {
            int64_t free = end - at - in.sizes[i];
            if (free < 0 || free >= slack) return false;
            chosen = at;
            slack = free;
            return !best;
        };
        for (int k : in_the_way) {
            if (offer(offset[k])) return chosen;
            at = std::max(at, in.align(i, top(k)));
        }
        offer(ceiling);
        return chosen;
    }

    void weigh(double by_size, double by_width) {
        base.resize(in.n);
        for (int i = 0; i < in.n; i++)
            base[i] = std::round(100 * std::pow(double(in.sizes[i]), by_size) * std::pow(in.hi[i] - in.lo[i], by_width));
        weight = base;
    }

    // The place below the target where what must go weighs least; of equals one at random; -1: it does not fit below it.
    int64_t lightest(int i, int64_t target, std::mt19937_64& draw) {
        std::vector<int> by_end;
        for (int k : in_the_way) ends.mark(k);
        ends.drain([&](int k) { by_end.push_back(k); });
        size_t entered = 0, left = 0;
        int64_t chosen = -1;
        double load = 0, least = 0;
        uint64_t equals = 0;
        for (int64_t at = 0; at + in.sizes[i] <= target;) {
            for (; left < by_end.size() && top(by_end[left]) <= at; left++) load -= weight[by_end[left]];
            for (; entered < in_the_way.size() && offset[in_the_way[entered]] < at + in.sizes[i]; entered++)
                load += weight[in_the_way[entered]];
            if (chosen < 0 || load <= least) {
                equals = chosen >= 0 && load == least ? equals + 1 : 1;
                if (draw() % equals == 0) chosen = at;
                least = load;
            }
            if (left == by_end.size()) break;
            at = in.align(i, top(by_end[left]));
        }
        return chosen;
    }
};

}  // namespace memo
