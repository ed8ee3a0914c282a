// Where memory runs out, nothing is lost: every allocation of every kind of write fails once.
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>

#include "kit.h"

namespace {
long allocations_left = std::numeric_limits<long>::max();
}

void* operator new(std::size_t bytes) {
  if (allocations_left > 0) {
    --allocations_left;
    if (void* memory = std::malloc(bytes)) return memory;
  }
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

using kit::geometry;
using kit::there;
using stoker::Arena;
using stoker::Order;
using stoker::RegionSpec;

namespace {

constexpr std::uint32_t kIds = 120;

RegionSpec region(const char* name, std::uint64_t budget, stoker::Admission admission) {
  RegionSpec spec;
  spec.name = name;
  spec.budget = budget;
  spec.admission = admission;
  return spec;
}

// Those with the smallest keys are leased, so that eviction puts many of them aside.
std::unique_ptr<Arena> filled(stoker::Admission admission) {
  auto arena = std::make_unique<Arena>(geometry(kIds, 30'000, 64), "");
  arena->configure(
      {region("main", 20'000, admission), region("other", 10'000, stoker::Admission::kAlways)});
  for (std::uint32_t id = 0; id < 100; ++id) CHECK(kit::put(*arena, id, 300, id, id >= 66));
  std::vector<std::uint32_t> leased;
  for (std::uint32_t id = 0; id < 30; ++id) leased.push_back(id);
  CHECK(arena->lease(leased, 1));
  return arena;
}

// Lets the n-th allocation of a write fail, and those after it, for each n until none fails.
void every_allocation_fails(stoker::Admission admission,
                            const std::function<void(Arena&)>& change) {
  bool failed = true;
  for (long n = 0; failed; ++n) {
    const auto arena = filled(admission);
    const auto before = arena->counters();
    failed = false;
    allocations_left = n;
    try {
      change(*arena);
    } catch (const std::bad_alloc&) {
    }
    failed = allocations_left == 0;
    allocations_left = std::numeric_limits<long>::max();
    kit::check_sound(*arena);
    CHECK(arena->counters().repairs == before.repairs);
    for (std::uint32_t id = 0; id < 30; ++id) CHECK(there(*arena, id));  // leased
    kit::count_there(*arena);
    arena->release(1);
    for (std::uint32_t id = 0; id < kIds; ++id) kit::discard(*arena, id);
    CHECK(arena->counters().payload == 0);  // nothing is reserved for ever
    CHECK(arena->counters().free_blocks == arena->header().num_blocks);
  }
}

void n4_nothing_is_lost_where_memory_runs_out() {
  const kit::Bytes large = kit::payload(110, 6'000);
  const auto put_large = [&](Arena& arena) {
    const stoker::Sample sample{large.data(), large.size()};
    const std::uint32_t id = 110;
    const double key = 1e9;
    stoker::Arena::Placing placing{0};
    placing.keys = &key;
    bool admitted = false;
    arena.put({&id, 1}, &sample, placing, &admitted);
  };
  const auto put_and_keep = [&](Arena& arena) {
    const stoker::Sample sample{large.data(), large.size()};
    const std::uint32_t id = 110;
    const double key = 1e9;
    stoker::Evicted evicted;
    bool admitted = false;
    arena.put({&id, 1}, &sample, {0, stoker::kNone, &key, &evicted}, &admitted);
    CHECK(evicted.ids.size() == evicted.keys.size());
    CHECK(evicted.offsets.size() == evicted.ids.size() + 1);
    CHECK(static_cast<std::size_t>(evicted.offsets.back()) == evicted.data.size());
  };
  const auto move = [](Arena& arena) {
    std::vector<std::uint32_t> ids;
    for (std::uint32_t id = 70; id < 90; ++id) ids.push_back(id);
    bool moved[20];
    const std::vector<double> keys(20, 1e9);
    arena.move(0, ids, keys.data(), moved);
  };
  for (const auto admission : {stoker::Admission::kAlways, stoker::Admission::kBeatsVictims}) {
    every_allocation_fails(admission, put_large);
    every_allocation_fails(admission, put_and_keep);
    every_allocation_fails(admission, move);
    every_allocation_fails(admission, [](Arena& arena) { arena.resize_region("main", 12'000); });
    every_allocation_fails(admission,
                           [](Arena& arena) { arena.divide({"main", "other"}, {1, 1}); });
  }
}

// What a file held is moved to regions that are new.
void n4_nothing_recovered_is_lost_where_memory_runs_out() {
  const kit::Path path;
  {
    Arena arena(geometry(kIds, 60'000, 1000, true), path);
    for (std::uint32_t id = 0; id < 60; ++id) CHECK(kit::put(arena, id, 1000, id));
  }
  bool failed = true;
  for (long n = 0; failed; ++n) {
    Arena arena(geometry(kIds, 60'000, 1000, true), path);
    const std::vector<RegionSpec> specs = {region("kept", 50'000, stoker::Admission::kAlways)};
    allocations_left = n;
    try {
      arena.configure(specs);
    } catch (const std::bad_alloc&) {
    }
    failed = allocations_left == 0;
    allocations_left = std::numeric_limits<long>::max();
    kit::check_sound(arena);
    CHECK(kit::count_there(arena) == (failed && arena.regions()[0].budget == 60'000 ? 60u : 50u));
  }
}

}  // namespace

int main() {
  n4_nothing_is_lost_where_memory_runs_out();
  n4_nothing_recovered_is_lost_where_memory_runs_out();
  return check::failures();
}
