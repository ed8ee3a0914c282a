// Who leaves: admission, pop rules, ghosts, and regions whose budgets move.
#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <utility>

#include "kit.h"

using kit::geometry;
using kit::there;
using stoker::Admission;
using stoker::Arena;
using stoker::ConfigError;
using stoker::Order;
using stoker::Pop;
using stoker::RegionSpec;

namespace {

RegionSpec region(const std::string& name, std::uint64_t budget, Order order = Order::kKey) {
  RegionSpec spec;
  spec.name = name;
  spec.budget = budget;
  spec.order = order;
  return spec;
}

void none_leaves_for_one_that_is_outranked() {
  Arena arena(geometry(20, 10'000), "");
  RegionSpec main = region("main", 10'000);
  main.admission = Admission::kBeatsVictims;
  main.ties = false;
  arena.configure({main});
  for (std::uint32_t id = 0; id < 10; ++id) CHECK(kit::put(arena, id, 1000, id));
  CHECK(!kit::put(arena, 10, 3000, 1.5));  // beats 0 and 1, not 2
  CHECK(!kit::put(arena, 10, 1000, 0));    // a tie
  CHECK(kit::count_there(arena) == 10 && arena.counters().evictions == 0);
  CHECK(kit::put(arena, 10, 3000, 2.5) && kit::count_there(arena) == 8);
  kit::check_sound(arena);
}

// Leased ones are passed over, and the others leave by their keys whatever was drawn first.
void victims_are_the_smallest_that_may_leave() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Arena arena(geometry(2'000, 500'000), "");
    RegionSpec main = region("main", 500'000);
    main.admission = Admission::kBeatsVictims;
    arena.configure({main});
    std::set<std::pair<double, std::uint32_t>> may_leave;
    std::vector<std::uint32_t> leased;
    for (std::uint32_t id = 0; id < 500; ++id) {
      const auto key = static_cast<double>(random() % 100'000);
      CHECK(kit::put(arena, id, 1000, key));
      if (random() % 4 == 0) {
        leased.push_back(id);
      } else {
        may_leave.insert({key, id});
      }
    }
    CHECK(arena.lease(leased, 1));
    for (std::uint32_t id = 500; id < 600; ++id) {
      const auto key = static_cast<double>(random() % 100'000);
      const std::size_t needed = 1 + random() % 3;
      const auto last = std::next(may_leave.begin(), static_cast<std::ptrdiff_t>(needed) - 1);
      const bool fits = last->first < key;
      CHECK(kit::put(arena, id, needed * 1000, key) == fits);
      for (std::size_t i = 0; i < needed; ++i) {
        CHECK(there(arena, may_leave.begin()->second) != fits);
        if (fits) may_leave.erase(may_leave.begin());
      }
      if (fits && needed == 1) may_leave.insert({key, id});
      if (fits && needed > 1) CHECK(arena.lease({&id, 1}, 2));  // its bytes are not one's
    }
    for (const std::uint32_t id : leased) CHECK(there(arena, id));
    kit::check_sound(arena);
  }
}

// Counts grow while nodes stay where they are: the smallest have to be put in order first.
void a_newcomer_beats_only_what_was_accessed_no_more_often() {
  Arena arena(geometry(20, 3'000), "");
  RegionSpec main = region("main", 3'000, Order::kFrequency);
  main.admission = Admission::kBeatsVictims;
  arena.configure({main});
  for (std::uint32_t id = 0; id < 3; ++id) CHECK(kit::put(arena, id, 1000));
  CHECK(there(arena, 0) && kit::get(arena, 0) && kit::get(arena, 1));
  CHECK(!kit::put(arena, 3, 2000) && arena.counters().evictions == 0);  // to look is to count
  CHECK(kit::put(arena, 3, 1000) && arena.counters().evictions == 1);
  kit::check_sound(arena);
}

void an_unknown_key_is_admitted_while_there_is_room() {
  constexpr double kUnknown = -std::numeric_limits<double>::infinity();
  Arena arena(geometry(20, 3'000), "");
  RegionSpec main = region("main", 3'000);
  main.admission = Admission::kBeatsVictims;
  arena.configure({main});
  for (std::uint32_t id = 0; id < 5; ++id) CHECK(kit::put(arena, id, 1000, kUnknown) == (id < 3));
  // All three are alike: those with the smallest turns leave.
  CHECK(stoker::turn_of(0) < stoker::turn_of(2) && stoker::turn_of(2) < stoker::turn_of(1));
  CHECK(kit::put(arena, 5, 1000, -1e300) && !there(arena, 0));
  CHECK(kit::put(arena, 6, 1000, -1e300) && !there(arena, 2) && there(arena, 1));
  kit::check_sound(arena);
}

// For a tier below: what was evicted, with its key.
void the_evicted_come_with_their_keys() {
  Arena arena(geometry(20, 3'000), "");
  for (std::uint32_t id = 0; id < 3; ++id) CHECK(kit::put(arena, id, 1000, 10.0 + id));
  const kit::Bytes bytes = kit::payload(9, 2000);
  const stoker::Sample sample{bytes.data(), bytes.size()};
  stoker::Evicted evicted;
  const double key = 50;
  const std::uint32_t id = 9;
  bool admitted = false;
  arena.put({&id, 1}, &sample, {0, stoker::kNone, &key, &evicted}, &admitted);
  CHECK(admitted && evicted.ids == (std::vector<std::uint32_t>{0, 1}));
  CHECK(evicted.keys == (std::vector<double>{10, 11}));
  CHECK(evicted.offsets == (std::vector<std::int64_t>{0, 1000, 2000}));
  const kit::Bytes first = kit::payload(0, 1000);
  CHECK(std::equal(first.begin(), first.end(), evicted.data.begin()));
}

void while_room_evicts_nothing() {
  Arena arena(geometry(20, 10'000), "");
  RegionSpec main = region("main", 10'000, Order::kInsertion);
  main.admission = Admission::kWhileRoom;
  arena.configure({main});
  for (std::uint32_t id = 0; id < 20; ++id) CHECK(kit::put(arena, id, 900) == (id < 11));
  CHECK(arena.counters().evictions == 0 && kit::put(arena, 19, 100));
}

void reads_count() {
  for (const Order order : {Order::kRecency, Order::kFrequency}) {
    Arena arena(geometry(20, 5'000), "");
    arena.configure({region("main", 5'000, order)});
    for (std::uint32_t id = 0; id < 5; ++id) kit::put(arena, id, 1000);
    for (const std::uint32_t id : {0u, 2u, 4u}) CHECK(there(arena, id));
    CHECK(kit::put(arena, 10, 1000) && !there(arena, 1));
    CHECK(kit::put(arena, 11, 1000));
    CHECK(!there(arena, 3) && there(arena, 0));
    kit::check_sound(arena);
  }
}

void random_victims_are_never_leased_ones() {
  Arena arena(geometry(300, 100'000), "");
  RegionSpec main = region("main", 100'000, Order::kInsertion);
  main.pop = Pop::kRandom;
  arena.configure({main});
  std::vector<std::uint32_t> leased;
  for (std::uint32_t id = 0; id < 100; ++id) {
    CHECK(kit::put(arena, id, 1000));
    if (id != 57) leased.push_back(id);
  }
  CHECK(arena.lease(leased, 1));
  CHECK(kit::put(arena, 200, 1000) && !there(arena, 57));
  CHECK(arena.lease(std::vector<std::uint32_t>{200}, 1) && !kit::put(arena, 201, 1000));
  kit::check_sound(arena);
}

void what_returns_from_the_ghost_is_promoted() {
  Arena arena(geometry(100, 10'000), "");
  RegionSpec small = region("main", 2'000, Order::kInsertion);
  RegionSpec big = region("big", 8'000, Order::kInsertion);
  RegionSpec ghost = region("ghost", 5'000, Order::kInsertion);
  small.strict = big.strict = ghost.strict = ghost.holds_bytes = false;
  small.pop = Pop::kPromote;
  small.visits = 2;
  small.promote_to = "big";
  small.ghost = "ghost";
  big.pop = Pop::kSecondChance;
  arena.configure({small, big, ghost});
  for (std::uint32_t id = 0; id < 30; ++id) kit::put(arena, id, 1000);
  const std::vector<stoker::Region> before = arena.regions();
  CHECK(before[2].size == 5 && before[2].bytes == 5'000);
  std::uint32_t remembered = 29;
  while (there(arena, remembered)) --remembered;
  CHECK(kit::put(arena, remembered, 600));
  const std::uint32_t id = remembered;
  CHECK(arena.regions()[1].bytes % 1000 == 600);  // at once in "big"
  there(arena, id);
  kit::check_sound(arena);
  // Ghosts of tiny samples must not use up the nodes that samples need.
  Arena tiny(geometry(50'000, 64'000, 64), "");
  small.budget = 6'400;
  big.budget = 57'600;
  ghost.budget = 64'000;
  tiny.configure({small, big, ghost});
  for (std::uint32_t each = 0; each < 50'000; ++each) CHECK(kit::put(tiny, each, 1));
  kit::check_sound(tiny);
}

void second_looks_end_when_all_were_visited() {
  for (const Pop pop : {Pop::kSieve, Pop::kSecondChance}) {
    Arena arena(geometry(300, 100'000), "");
    RegionSpec main = region("main", 100'000, Order::kInsertion);
    main.pop = pop;
    arena.configure({main});
    for (std::uint32_t id = 0; id < 100; ++id) kit::put(arena, id, 1000);
    for (int round = 0; round < 4; ++round) kit::count_there(arena);
    CHECK(kit::put(arena, 200, 1000) && !there(arena, 0));
    kit::check_sound(arena);
  }
}

void budgets_move() {
  Arena arena(geometry(100, 10'000), "");
  arena.add_region(region("high", 4'000));
  CHECK_THROWS(ConfigError, arena.add_region(region("high", 1)));
  CHECK_THROWS(ConfigError, arena.add_region(region("huge", 6'001)));
  for (std::uint32_t id = 0; id < 20; ++id) {
    CHECK(kit::put(arena, id, 1000, id, id % 2));
  }
  CHECK(arena.regions()[0].bytes == 6'000 && arena.regions()[1].bytes == 4'000);
  arena.resize_region("high", 1'500);
  CHECK(arena.regions()[1].bytes == 1'000 && arena.regions()[0].budget == 8'500);
  kit::check_sound(arena);
  arena.resize_region("high", 9'000);
  CHECK(arena.regions()[0].bytes == 1'000 && arena.regions()[0].budget == 1'000);
  for (std::uint32_t id = 20; id < 40; ++id) CHECK(kit::put(arena, id, 1000, id, 1));
  CHECK(arena.regions()[1].bytes == 9'000 && there(arena, 18));
  CHECK_THROWS(ConfigError, arena.resize_region("high", 10'001));
  CHECK_THROWS(ConfigError, arena.resize_region("low", 1));
  arena.resize_region("high", 0);
  CHECK(arena.regions()[1].size == 0 && !kit::put(arena, 50, 1, 0, 1));
  RegionSpec ghost = region("ghost", 9'000);
  ghost.holds_bytes = false;
  arena.add_region(ghost);
  arena.resize_region("ghost", 20'000);
  CHECK(arena.regions()[0].budget == 10'000);  // a ghost takes nothing from "main"
  kit::check_sound(arena);
}

void regions_that_cannot_work_are_refused() {
  Arena arena(geometry(10, 10'000), "");
  const RegionSpec main = region("main", 5'000);
  RegionSpec bad = region("bad", 1'000);
  bad.pop = Pop::kPromote;
  CHECK_THROWS(ConfigError, arena.configure({main, bad}));
  bad.promote_to = "missing";
  CHECK_THROWS(ConfigError, arena.configure({main, bad}));
  bad.promote_to = "main";
  bad.ghost = "main";
  CHECK_THROWS(ConfigError, arena.configure({main, bad}));
  CHECK_THROWS(ConfigError, arena.add_region(bad));
  CHECK_THROWS(ConfigError, arena.configure({}));
  CHECK_THROWS(ConfigError, arena.configure({main, main}));
  CHECK_THROWS(ConfigError, arena.configure({region("main", 10'001)}));
  CHECK_THROWS(ConfigError, arena.configure({region("", 1)}));
  CHECK_THROWS(ConfigError, arena.configure(std::vector<RegionSpec>(17, main)));
  RegionSpec ghost = region("ghost", 100);
  ghost.holds_bytes = false;
  CHECK_THROWS(ConfigError, arena.configure({ghost}));
  CHECK(arena.region("main") == 0 && arena.regions()[0].budget == 10'000);  // as it was
  kit::put(arena, 1, 0);
  CHECK_THROWS(ConfigError, arena.configure({main}));
  kit::check_sound(arena);
}

// Outside the exact mode: thousands of leased samples with the smallest keys do not end insertion,
// and a batch does not hold the lock for long.
void many_leases_in_the_way() {
  constexpr std::uint32_t kIds = 20'000;
  Arena arena({kIds, 640'000, 64, false, false, 1}, "");
  std::vector<std::uint32_t> leased;
  for (std::uint32_t id = 0; id < 10'000; ++id) CHECK(kit::put(arena, id, 64, id));
  for (std::uint32_t id = 0; id < 5'000; ++id) leased.push_back(id);
  CHECK(arena.lease(leased, 1));
  for (std::uint32_t id = 10'000; id < 10'500; ++id) CHECK(kit::put(arena, id, 64, id));
  for (const std::uint32_t id : leased) CHECK(there(arena, id));
  kit::check_sound(arena);
}

// Outside the exact mode too, with more samples served and leased than eviction looks at: those
// with the smallest keys leave of the others, and of these once their leases end.
void the_served_are_not_in_the_way_while_they_are_leased() {
  constexpr std::uint32_t kHeld = 1'000;
  constexpr std::uint32_t kServed = 600;
  Arena arena({2'000, kHeld * 64, 64, false, false, 1}, "");
  std::vector<std::uint32_t> served;
  std::vector<double> after;
  for (std::uint32_t id = 0; id < kHeld; ++id) {
    CHECK(kit::put(arena, id, 64, id < kServed ? 1e6 : 1e4 + id));
  }
  for (std::uint32_t id = 0; id < kServed; ++id) {
    served.push_back(id);
    after.push_back(id);
  }
  CHECK(arena.lease(served, 1));
  arena.set_keys(served, after.data());
  double key = -1;
  arena.keys(std::vector<std::uint32_t>{7}, &key);
  CHECK(key == 7);
  std::uint32_t next = kHeld;
  for (std::uint32_t id = kServed; id < kServed + 300; ++id) {
    CHECK(kit::put(arena, next++, 64, 1e6) && !there(arena, id));
  }
  kit::check_sound(arena);
  arena.release(1);
  for (std::uint32_t id = 0; id < 300; ++id) {
    CHECK(kit::put(arena, next++, 64, 1e6) && !there(arena, id));
  }
  kit::check_sound(arena);
}

}  // namespace

int main() {
  none_leaves_for_one_that_is_outranked();
  victims_are_the_smallest_that_may_leave();
  a_newcomer_beats_only_what_was_accessed_no_more_often();
  an_unknown_key_is_admitted_while_there_is_room();
  the_evicted_come_with_their_keys();
  while_room_evicts_nothing();
  reads_count();
  random_victims_are_never_leased_ones();
  what_returns_from_the_ghost_is_promoted();
  second_looks_end_when_all_were_visited();
  budgets_move();
  regions_that_cannot_work_are_refused();
  many_leases_in_the_way();
  the_served_are_not_in_the_way_while_they_are_leased();
  return check::failures();
}
