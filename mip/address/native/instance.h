// The buffers of one arena as the loops of this folder see them, and the clock that ends those loops.
//
// Buffers are numbered by rank: their place in an order that the caller gives. Sizes are in units.

#pragma once

#include <cstdint>
#include <ctime>
#include <limits>
#include <vector>

namespace memo {

struct Range {
    int first, last;
};

// One deadline, in seconds of CLOCK_MONOTONIC, and a flag that the caller may raise before it. Every loop whose length
// depends on the instance asks it, so that no other thread has to be scheduled in time.
struct Clock {
    const volatile int32_t* stop;
    double deadline;

    bool over() const {
        if (*stop) return true;
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return double(now.tv_sec) + 1e-9 * double(now.tv_nsec) >= deadline;
    }
};

// As the caller passes them: by index, in the order of its own arrays.
struct Given {
    int32_t n, sections;
    const Range* ranges;
    const int64_t *sizes, *alignments;
};

// Unit is 32 bits wide where the numbers allow, for twice the lanes of a vector.
template <class Unit>
struct Instance {
    static constexpr Unit kNever = std::numeric_limits<Unit>::max() / 4;
    int n, sections;
    std::vector<Unit> sizes, alignments;
    std::vector<int> lo, hi;  // sections [lo, hi) in which each buffer lives, one array each so that scans are contiguous

    Instance(const Given& given, const int32_t* order) : n(given.n), sections(given.sections) {
        for (int rank = 0; rank < n; rank++) {
            int i = order[rank];
            sizes.push_back(Unit(given.sizes[i]));
            alignments.push_back(Unit(given.alignments[i]));
            lo.push_back(given.ranges[i].first);
            hi.push_back(given.ranges[i].last);
        }
    }

    Unit align(int i, Unit offset) const {
        Unit a = alignments[i];
        return a == 1 ? offset : (offset + a - 1) / a * a;
    }

    template <class F>
    void each_section(int i, F f) const {
        for (int s = lo[i]; s < hi[i]; s++) f(s);
    }
};

}  // namespace memo
