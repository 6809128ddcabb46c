// What native_search.py calls: tree search, greedy fit and refill on one instance.
//
// `order` lists buffer indices; offsets go in and out by index.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "instance.h"
#include "layout.h"
#include "tree.h"

namespace {

using namespace memo;

std::vector<int> by_first_section(const Given& given) {
    std::vector<int> order(given.n);
    std::iota(order.begin(), order.end(), 0);
    auto first = [&](int i) { return given.ranges[i].first; };
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return first(a) < first(b); });
    return order;
}

void by_index(const std::vector<int>& order, const std::vector<int64_t>& by_rank, int64_t* out) {
    for (size_t rank = 0; rank < order.size(); rank++) out[order[rank]] = by_rank[rank];
}

}  // namespace

extern "C" {

int32_t memo_search(const Given* given, const Clock* clock, const int32_t* order, int64_t capacity, int64_t node_limit,
                    int32_t small_part, int64_t* conflicts, int64_t* nodes, int64_t* out) {
    auto search = [&]<class Unit>(Unit narrow) {
        Instance<Unit> in(*given, order);
        std::vector<int64_t> offsets(in.n);
        Tree<Unit> tree(in, narrow, node_limit, small_part, *clock, conflicts, offsets.data());
        int32_t answer = tree.run();
        *nodes = tree.nodes;
        by_index(std::vector<int>(order, order + in.n), offsets, out);
        return answer;
    };
    int64_t largest = capacity;
    for (int i = 0; i < given->n; i++)
        largest = std::max({largest, given->sizes[i], given->alignments[i]});
    // Sums of three such numbers occur.
    return largest < Instance<int32_t>::kNever / 4 ? search(int32_t(capacity)) : search(capacity);
}

int32_t memo_sweep(const Given* given, const Clock* clock, int64_t* out) {
    std::vector<int> sorted = by_first_section(*given);
    Instance<int64_t> in(*given, sorted.data());
    Layout layout(in, *clock);
    layout.sweep();
    by_index(sorted, layout.offsets(), out);
    return 1;
}

int32_t memo_fit(const Given* given, const Clock* clock, const int32_t* order, int32_t best, int64_t* out) {
    std::vector<int> sorted = by_first_section(*given), rank(given->n), ranks;
    for (int i = 0; i < given->n; i++) rank[sorted[i]] = i;
    for (int i = 0; i < given->n; i++) ranks.push_back(rank[order[i]]);
    Instance<int64_t> in(*given, sorted.data());
    Layout layout(in, *clock);
    bool done = layout.fit(ranks, best != 0);
    by_index(sorted, layout.offsets(), out);
    return done;
}

int32_t memo_refill(const Given* given, const Clock* clock, int64_t target, int64_t steps, uint64_t seed, double by_size,
                    double by_width, int64_t* offsets) {
    std::vector<int> sorted = by_first_section(*given);
    Instance<int64_t> in(*given, sorted.data());
    std::vector<int64_t> start;
    for (int i : sorted) start.push_back(offsets[i]);
    Layout layout(in, *clock);
    bool done = layout.refill(start.data(), target, steps, seed, by_size, by_width);
    by_index(sorted, layout.offsets(), offsets);
    return done;
}
}
