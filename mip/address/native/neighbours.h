// Which buffers are live together, without a list for each buffer: 62,000 buffers can have 360 million such pairs.
//
// Buffers are numbered by their first section. Those that begin while buffer i lives are then a range of numbers; those
// that were live already are found from the last list of live buffers that was kept before i begins. A list is kept
// whenever as many buffers have begun as the last one holds, so all lists together are no longer than a few times n.

#pragma once

#include <algorithm>
#include <vector>

#include "instance.h"

namespace memo {

class Neighbours {
  public:
    // The ranks of `in` must ascend by first section.
    explicit Neighbours(const Instance<int64_t>& in) : in(in), begin(in.sections + 1, 0), kept_at(in.sections, 0) {
        for (int i = 0; i < in.n; i++) begin[in.lo[i] + 1]++;
        for (int s = 0; s < in.sections; s++) begin[s + 1] += begin[s];
        std::vector<int> now;
        size_t begun = 0, held = 0;
        for (int s = 0; s < in.sections; s++) {
            if (s == 0 || begun > held) {
                now.erase(std::remove_if(now.begin(), now.end(), [&](int i) { return in.hi[i] <= s; }), now.end());
                kept.push_back({s, int(live.size()), int(live.size() + now.size())});
                live.insert(live.end(), now.begin(), now.end());
                begun = 0;
                held = now.size();
            }
            kept_at[s] = int(kept.size()) - 1;
            for (int i = begin[s]; i < begin[s + 1]; i++, begun++) now.push_back(i);
        }
    }

    template <class F>
    void each(int i, F f) const {
        int s = in.lo[i];
        auto [section, first, last] = kept[kept_at[s]];
        auto visit = [&](int k) {
            if (in.hi[k] > s && k != i) f(k);
        };
        for (int x = first; x < last; x++) visit(live[x]);
        for (int k = begin[section]; k < begin[in.hi[i]]; k++) visit(k);
    }

  private:
    struct Kept {
        int section, first, last;
    };
    const Instance<int64_t>& in;
    std::vector<int> begin;  // buffers [begin[s], begin[s + 1]) begin in section s
    std::vector<int> kept_at, live;
    std::vector<Kept> kept;
};

}  // namespace memo
