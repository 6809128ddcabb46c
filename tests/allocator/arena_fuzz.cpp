// Random steps against the arena, each wrong in some way, on the stand-in runtime; built with a sanitizer by the test.
//
//   arena_fuzz RUNTIME SEED ROUNDS [threads]
//
// A round makes a random step, plans it by first fit, and replays it whole and mutated: another size, order or stream, extra
// and missing requests, frees that come late, twice, or never, blocks used by other streams, streams that stand still, and
// a device that is full. Oracles: a block meets no other live block; every block still holds the tag its stream wrote when
// it is freed (the stand-in's kernels check, in stream order); a step that follows its plan has no divergence and no
// fallback; one that does not is noticed. Exits 0, or says what broke and with which seed.

#include "../../allocator/arena.cpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

namespace {

struct Standin {
  void* library;
  void (*reset)(std::size_t, int);
  void (*limit)(std::size_t);
  void (*stall)(void*, int);
  void (*follow)(void*, void*);
  void (*write)(void*, void*, std::size_t, int);
  void (*verify)(void*, void*, std::size_t, int);
  std::int64_t (*held)();
  std::int64_t (*damaged)();
  std::int64_t (*misuses)();
  std::int64_t (*live_events)();

  explicit Standin(const char* path) : library(dlopen(path, RTLD_NOW)) {
    if (library == nullptr) std::puts(dlerror()), std::exit(2);
    find(reset, "standin_reset"), find(limit, "standin_limit"), find(stall, "standin_stall");
    find(follow, "standin_follow");
    find(write, "standin_write"), find(verify, "standin_verify"), find(held, "standin_held");
    find(damaged, "standin_damaged"), find(misuses, "standin_misuses"), find(live_events, "standin_live_events");
  }
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) std::puts(name), std::exit(2);
  }
};

struct Call {
  bool is_free = false;
  int block = 0;
  std::size_t nbytes = 0;
  Stream stream = nullptr;
  Stream other = nullptr;  // uses the block right after it is made
};

using Step = std::vector<Call>;

unsigned long seed_now;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("seed %lu: %s\n", seed_now, what);
  std::exit(1);
}

std::mt19937_64 dice;

std::size_t up_to(std::size_t n) { return dice() % n; }

Stream stream_at(std::size_t i) { return reinterpret_cast<Stream>(i * 0x100); }

std::size_t some_size() { return up_to(12) == 0 ? 0 : 1 + up_to(std::size_t{1} << (4 + up_to(10))); }

Step random_step() {
  Step step;
  std::vector<int> live;
  const int n = 5 + static_cast<int>(up_to(60));
  for (int block = 0; block < n;) {
    if (!live.empty() && up_to(5) < 2) {
      const std::size_t i = up_to(live.size());
      step.push_back({true, live[i]});
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    Call call{false, block, some_size(), stream_at(up_to(6) == 0)};
    if (up_to(12) == 0) call.other = stream_at(2);
    step.push_back(call);
    live.push_back(block++);
  }
  for (int block : live)
    if (up_to(10) != 0) step.push_back({true, block});  // the rest outlives the step
  return step;
}

struct Requests {
  std::vector<std::int64_t> sizes, offsets;
  std::vector<Stream> streams;
  std::int64_t arena = 0;
};

// First fit, each stream in a region of its own; what is shared or outlives the step is outside.
Requests plan_of(const Step& step) {
  Requests plan;
  std::map<int, std::size_t> number;
  std::vector<std::size_t> begin, end;
  std::vector<bool> outside;
  for (const Call& call : step) {
    if (call.is_free) {
      end[number[call.block]] = begin.size();
      continue;
    }
    number[call.block] = begin.size();
    begin.push_back(begin.size());
    end.push_back(SIZE_MAX);
    outside.push_back(call.other != nullptr);
    plan.sizes.push_back(static_cast<std::int64_t>((std::max<std::size_t>(call.nbytes, 1) + 511) / 512 * 512));
    plan.streams.push_back(call.stream);
  }
  plan.offsets.assign(begin.size(), -1);
  for (Stream stream : {stream_at(0), stream_at(1)}) {
    std::int64_t top = plan.arena;
    for (std::size_t i = 0; i < begin.size(); ++i) {
      if (plan.streams[i] != stream || outside[i] || end[i] == SIZE_MAX) continue;
      std::int64_t at = plan.arena;
      for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t j = 0; j < i; ++j) {
          const bool alive = plan.offsets[j] >= plan.arena && end[j] > i;
          if (alive && at < plan.offsets[j] + plan.sizes[j] && plan.offsets[j] < at + plan.sizes[i])
            at = plan.offsets[j] + plan.sizes[j], moved = true;
        }
      }
      plan.offsets[i] = at;
      top = std::max(top, at + plan.sizes[i]);
    }
    plan.arena = top;
  }
  return plan;
}

struct Live {
  void* at;
  Call call;
  int tag;
};

class Player {
 public:
  explicit Player(const Standin& standin) : standin_(standin) {}

  std::map<int, Live> live;

  void make(const Call& call, bool may_fail) {
    void* at = memo_arena_try_malloc(call.nbytes, 0, call.stream);
    if (at == nullptr) return require(may_fail, "no memory, although there was some");
    const auto begin = reinterpret_cast<std::uintptr_t>(at), size = std::max<std::uintptr_t>(call.nbytes, 1);
    require(begin % 512 == 0, "not aligned");
    for (const auto& [other, held] : live) {
      const auto start = reinterpret_cast<std::uintptr_t>(held.at);
      require(begin + size <= start || start + std::max<std::uintptr_t>(held.call.nbytes, 1) <= begin, "met a live block");
    }
    const int tag = ++tag_ % 251;
    standin_.write(call.stream, at, call.nbytes, tag);
    if (call.other != nullptr) {
      memo_arena_record_stream(at, call.other);
      standin_.follow(call.other, call.stream);
    }
    require(live.emplace(call.block, Live{at, call, tag}).second, "the harness used a number twice");
  }

  void drop(int block) {
    const auto found = live.find(block);
    if (found == live.end()) return;
    const Live held = found->second;
    live.erase(found);
    standin_.verify(held.call.stream, held.at, held.call.nbytes, held.tag);
    if (held.call.other != nullptr) standin_.verify(held.call.other, held.at, held.call.nbytes, held.tag);
    memo_arena_free(held.at, held.call.nbytes, 0, held.call.stream);
  }

  void drop_all() {
    while (!live.empty()) drop(live.begin()->first);
  }

  memo::StepSummary play(const Step& step, std::int64_t plan, bool may_fail = false) {
    const int begun = memo_arena_begin_step(0, plan);
    require(begun >= 0, "a step was open");
    for (const Call& call : step) {
      call.is_free ? drop(call.block) : make(call, may_fail);
      if (!live.empty() && live.begin()->first < 0 && up_to(20) == 0) drop(live.begin()->first);  // put aside earlier
    }
    memo::StepSummary summary{};
    require(memo_arena_end_step(&summary) == 1, "no step was open");
    return summary;
  }

  // What outlived the step under numbers that no step uses.
  void put_aside() {
    std::map<int, Live> aside;
    for (auto& [block, held] : live) aside.emplace(--aside_, held);
    live = std::move(aside);
  }

 private:
  const Standin& standin_;
  int tag_ = 0;
  int aside_ = -1;
};

// A step that asks for something else, and whether that must be noticed at the very step.
std::pair<Step, bool> mutate(Step step) {
  std::vector<std::size_t> makes, frees;
  for (std::size_t i = 0; i < step.size(); ++i) (step[i].is_free ? frees : makes).push_back(i);
  const std::size_t at = makes[up_to(makes.size())];
  Call& call = step[at];
  switch (up_to(8)) {
    case 0: call.nbytes = call.nbytes + 512 + up_to(4096); return {step, true};
    case 1: call.stream = call.stream == stream_at(0) ? stream_at(1) : stream_at(0); return {step, true};
    case 2: {
      const Call extra{false, 100000, 100 * 512 + up_to(5000), stream_at(up_to(3))};
      step.insert(step.begin() + static_cast<std::ptrdiff_t>(at), {extra, Call{true, 100000}});
      return {step, true};
    }
    case 3: step.erase(step.begin() + static_cast<std::ptrdiff_t>(at)); return {step, true};
    case 4: {
      const std::size_t other = makes[up_to(makes.size())];
      std::swap(step[at], step[other]);  // a free may now come before its malloc: then it is late by a step
      return {step, false};
    }
    case 5:
      if (!frees.empty()) step.erase(step.begin() + static_cast<std::ptrdiff_t>(frees[up_to(frees.size())]));
      return {step, false};
    case 6: call.other = stream_at(3); return {step, false};
    default: {
      for (std::size_t i : frees)
        if (i + 1 < step.size() && up_to(2) == 0) std::swap(step[i], step[i + 1]);
      return {step, false};
    }
  }
}

void play_round(const Standin& standin) {
  standin.reset(SIZE_MAX / 4, up_to(8) != 0);
  Player player(standin);
  std::vector<std::pair<Step, std::int64_t>> planned;
  for (int i = 0; i < 2; ++i) {
    const Step step = random_step();
    const Requests plan = plan_of(step);
    const char* why = nullptr;
    const std::int64_t id = memo_arena_add_plan(static_cast<std::int64_t>(plan.sizes.size()), plan.sizes.data(),
                                                plan.offsets.data(), plan.streams.data(), plan.arena, &why);
    require(id > 0, why);
    planned.emplace_back(step, id);
  }
  for (int repeat = 0; repeat < 12; ++repeat) {
    const auto& [step, plan] = planned[up_to(planned.size())];
    for (std::size_t i = 0; i < 4; ++i) standin.stall(stream_at(i), up_to(3) == 0);
    if (up_to(3) != 0) player.drop_all();
    player.put_aside();
    if (up_to(2) == 0) {
      const bool clean = player.live.empty();
      const memo::StepSummary summary = player.play(step, plan);
      // A span that another stream may still use is in the way as a live block is.
      if (clean && summary.divergences != 0) require(summary.first.reason == memo::Reason::kTaken, "left its plan");
      continue;
    }
    const auto [other, must_see] = mutate(step);
    const bool full = up_to(6) == 0;
    if (full) standin.limit(static_cast<std::size_t>(standin.held()) + up_to(20000));
    const memo::StepSummary summary = player.play(other, plan, full);
    standin.limit(SIZE_MAX / 4);
    const bool replayed = summary.planned + summary.outside + summary.fallbacks == summary.requests;
    require(!must_see || !replayed || summary.divergences != 0, "a divergence was not noticed");
    if (!player.live.empty() && up_to(4) == 0) {
      void* at = player.live.begin()->second.at;
      player.drop(player.live.begin()->first);
      memo_arena_free(at, 0, 0, nullptr);
    }
  }
  player.drop_all();
  require(standin.damaged() == 0, "a block was overwritten while it was in use");
  require(memo_arena_close() == 0, "blocks are left");
  require(standin.held() == 0, "memory is left");
  require(standin.live_events() == 0, "events are left");
  require(standin.misuses() == 0, "the runtime was misused");
}

// A clean machine: steps as planned have no divergence at all, with every stream running and nothing left over.
void play_clean(const Standin& standin) {
  standin.reset(SIZE_MAX / 4, 1);
  Player player(standin);
  const Step step = random_step();
  const Requests plan = plan_of(step);
  const char* why = nullptr;
  const std::int64_t id = memo_arena_add_plan(static_cast<std::int64_t>(plan.sizes.size()), plan.sizes.data(),
                                              plan.offsets.data(), plan.streams.data(), plan.arena, &why);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const memo::StepSummary summary = player.play(step, id);
    require(summary.divergences == 0 && summary.fallbacks == 0, "a step as planned left its plan");
    require(summary.planned + summary.outside == summary.requests, "requests are not accounted for");
    player.drop_all();
  }
  require(standin.damaged() == 0, "a block was overwritten while it was in use");
  require(memo_arena_close() == 0, "blocks are left");
}

// Several threads at once, as torch frees: each with blocks of its own, one of them opening and closing steps.
void play_threads(const Standin& standin) {
  standin.reset(SIZE_MAX / 4, 1);
  auto work = [&](std::size_t number) {
    std::mt19937_64 own(seed_now * 31 + number);
    std::vector<std::pair<void*, std::size_t>> held;
    for (int i = 0; i < 2000; ++i) {
      if (number == 0 && i % 100 == 0) memo_arena_begin_step(0, 0);
      if (number == 0 && i % 100 == 99) {
        memo::StepSummary summary{};
        memo_arena_end_step(&summary);
        memo::Stats stats{};
        memo_arena_stats(0, &stats);
      }
      if (held.size() < 20 && own() % 2 == 0) {
        const std::size_t nbytes = own() % 5000;
        void* at = memo_arena_try_malloc(nbytes, 0, stream_at(number));
        std::memset(at, static_cast<int>(number), nbytes);
        if (own() % 8 == 0) memo_arena_record_stream(at, stream_at(9));
        held.emplace_back(at, nbytes);
      } else if (!held.empty()) {
        memo_arena_free(held.back().first, held.back().second, 0, stream_at(number));
        held.pop_back();
      }
    }
    for (auto [at, nbytes] : held) memo_arena_free(at, nbytes, 0, stream_at(number));
  };
  std::vector<std::thread> threads;
  for (std::size_t number = 0; number < 4; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
  require(memo_arena_close() == 0, "blocks are left");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const Standin standin(argv[1]);
  if (const char* error = memo_arena_open(argv[1])) return std::puts(error), 2;
  const unsigned long first = std::strtoul(argv[2], nullptr, 10), rounds = std::strtoul(argv[3], nullptr, 10);
  for (seed_now = first; seed_now < first + rounds; ++seed_now) {
    dice.seed(seed_now);
    if (argc > 4) {
      play_threads(standin);
      continue;
    }
    play_clean(standin);
    play_round(standin);
  }
  std::printf("%lu rounds\n", rounds);
  return 0;
}
