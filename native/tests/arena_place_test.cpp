// Samples that move between regions, and budgets that move while everybody is at work.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "kit.h"

using kit::geometry;
using kit::there;
using stoker::Admission;
using stoker::Arena;
using stoker::ConfigError;
using stoker::Order;
using stoker::RegionSpec;

namespace {

constexpr std::uint32_t kHigh = 0;
constexpr std::uint32_t kLow = 1;

RegionSpec region(const std::string& name, std::uint64_t budget, Order order, Admission admission) {
  RegionSpec spec;
  spec.name = name;
  spec.budget = budget;
  spec.order = order;
  spec.admission = admission;
  return spec;
}

// 5,000 bytes where the higher key stays, and 5,000 of a queue.
void configure(Arena& arena) {
  arena.configure({region("high", 5'000, Order::kKey, Admission::kBeatsVictims),
                   region("low", 5'000, Order::kInsertion, Admission::kAlways)});
}

bool move(Arena& arena, std::uint32_t id, std::uint32_t to, const double* key = nullptr) {
  bool moved = false;
  arena.move(to, {&id, 1}, key, &moved);
  return moved;
}

std::uint8_t where(Arena& arena, std::uint32_t id) {
  std::uint8_t region = 0;
  arena.where({&id, 1}, &region);
  return region;
}

std::uint32_t copy_of(Arena& arena, std::uint32_t id, std::uint32_t region) {
  std::uint32_t number = 0;
  arena.copies({&id, 1}, region, &number);
  return number;
}

double key_of(Arena& arena, std::uint32_t id) {
  double key = 0;
  arena.keys({&id, 1}, &key);
  return key;
}

void the_target_admits_by_its_rules() {
  Arena arena(geometry(20, 10'000), "");
  configure(arena);
  for (std::uint32_t id = 0; id < 5; ++id) CHECK(kit::put(arena, id, 1000, 10 + id, kHigh));
  for (std::uint32_t id = 5; id < 10; ++id) CHECK(kit::put(arena, id, 1000, 0, kLow));
  const double small = 5;
  const double large = 50;
  const std::uint64_t inserts = arena.counters().inserts;
  CHECK(!move(arena, 7, kHigh, &small) && where(arena, 7) == kLow && there(arena, 7));
  CHECK(arena.list(kLow) == (std::vector<std::uint32_t>{5, 6, 7, 8, 9}));
  CHECK(move(arena, 7, kHigh, &large) && where(arena, 7) == kHigh && there(arena, 7));
  CHECK(!there(arena, 0) && where(arena, 0) == Arena::kNowhere && key_of(arena, 7) == 50);
  CHECK(arena.regions()[kHigh].bytes == 5'000 && arena.regions()[kLow].bytes == 4'000);
  CHECK(move(arena, 1, kLow) && where(arena, 1) == kLow);
  CHECK(move(arena, 2, kLow) && !there(arena, 5));  // the queue is full: its first leaves
  CHECK(arena.counters().inserts == inserts && arena.counters().payload == 8'000);
  kit::check_sound(arena);
}

// A cache that is full to the last block has room for a move: nothing new comes in.
void a_full_cache_moves() {
  Arena arena(geometry(64, 64'000), "");
  arena.configure({region("high", 40'000, Order::kKey, Admission::kWhileRoom),
                   region("low", 24'000, Order::kInsertion, Admission::kAlways)});
  for (std::uint32_t id = 0; id < 39; ++id) CHECK(kit::put(arena, id, 1000, id, kHigh));
  for (std::uint32_t id = 39; id < 63; ++id) CHECK(kit::put(arena, id, 1000, 0, kLow));
  CHECK(kit::put(arena, 63, 900, 0, kHigh) && kit::put(arena, 63, 900, 0, kLow));
  CHECK(!move(arena, 50, kHigh) && where(arena, 50) == kLow);
  CHECK(move(arena, 63, kLow) && !there(arena, 39) && where(arena, 63) == kLow);
  CHECK(move(arena, 50, kHigh) && kit::count_there(arena) == 63);
  kit::check_sound(arena);
}

void what_is_not_there_does_not_move() {
  Arena arena(geometry(20, 10'000), "");
  configure(arena);
  CHECK(!move(arena, 3, kLow));
  CHECK(kit::claim(arena, 3) && !move(arena, 3, kLow));
  CHECK(kit::put(arena, 3, 4000, 1, kHigh) && move(arena, 3, kHigh));  // it is there already
  const double key = 9;
  CHECK(move(arena, 3, kHigh, &key) && key_of(arena, 3) == 9);
  CHECK(kit::put(arena, 3, 4000, 2, kLow) && where(arena, 3) == kHigh);  // a put moves nothing
  CHECK(kit::put(arena, 4, 1000, 2, kLow));
  arena.resize_region("low", 2'000);
  CHECK(!move(arena, 3, kLow) && there(arena, 3));  // larger than the region
  CHECK_THROWS(ConfigError, move(arena, 20, kLow));
  CHECK_THROWS(ConfigError, move(arena, 3, 2));
  kit::check_sound(arena);
}

// The number of a copy goes with it from region to region, and is another once it comes in again.
void copies_have_numbers() {
  Arena arena(geometry(20, 10'000), "");
  configure(arena);
  CHECK(copy_of(arena, 3, kHigh) == 0 && kit::claim(arena, 3) && copy_of(arena, 3, kHigh) == 0);
  CHECK(kit::put(arena, 3, 1000, 1, kHigh));
  const std::uint32_t first = copy_of(arena, 3, kHigh);
  CHECK(first > 0 && copy_of(arena, 3, kLow) == 0);
  CHECK(move(arena, 3, kLow) && copy_of(arena, 3, kLow) == first && copy_of(arena, 3, kHigh) == 0);
  const std::uint32_t id = 3;
  arena.discard({&id, 1});
  CHECK(copy_of(arena, 3, kLow) == 0);
  CHECK(kit::put(arena, 3, 1000, 1, kLow) && copy_of(arena, 3, kLow) > first);
  CHECK_THROWS(ConfigError, copy_of(arena, 20, kLow));
}

void keys_come_along() {
  Arena arena(geometry(20, 10'000), "");
  arena.configure({region("high", 5'000, Order::kKey, Admission::kAlways),
                   region("low", 5'000, Order::kKey, Admission::kAlways)});
  CHECK(kit::put(arena, 1, 100, 42, kHigh) && move(arena, 1, kLow) && key_of(arena, 1) == 42);
}

// What is leased may move, but is not evicted for another that does.
void leases_hold() {
  Arena arena(geometry(20, 10'000), "");
  configure(arena);
  std::vector<std::uint32_t> leased;
  for (std::uint32_t id = 0; id < 5; ++id) {
    CHECK(kit::put(arena, id, 1000, id, kHigh));
    leased.push_back(id);
  }
  CHECK(kit::put(arena, 9, 1000, 0, kLow) && arena.lease(leased, 1));
  const double key = 100;
  CHECK(!move(arena, 9, kHigh, &key) && move(arena, 4, kLow) && move(arena, 9, kHigh, &key));
  arena.release(1);
  kit::check_sound(arena);
}

void budgets_are_divided_again() {
  Arena arena(geometry(20, 10'000), "");
  configure(arena);
  for (std::uint32_t id = 0; id < 10; ++id) CHECK(kit::put(arena, id, 1000, id, id % 2));
  arena.divide({"high", "low"}, {.75, .25});
  CHECK(arena.regions()[kHigh].budget == 7'500 && arena.regions()[kLow].budget == 2'500);
  CHECK(arena.regions()[kLow].bytes == 2'000);
  arena.divide({"high", "low"}, {1, 2});  // in proportion, to the last byte
  CHECK(arena.regions()[kHigh].budget + arena.regions()[kLow].budget == 10'000);
  arena.divide({"high", "low"}, {0, 1});
  CHECK(arena.regions()[kHigh].size == 0 && arena.regions()[kLow].budget == 10'000);
  CHECK_THROWS(ConfigError, arena.divide({"high", "low"}, {0, 0}));
  CHECK_THROWS(ConfigError, arena.divide({"high", "low"}, {1}));
  CHECK_THROWS(ConfigError, arena.divide({"high", "low"}, {1, -1}));
  CHECK_THROWS(ConfigError, arena.divide({"high", "high"}, {1, 1}));
  CHECK_THROWS(ConfigError, arena.divide({"high", "none"}, {1, 1}));
  kit::check_sound(arena);
}

// Small regions are listed under the lock, large ones by looking at all ids.
void lists_are_complete() {
  constexpr std::uint32_t kMany = 20'000;
  Arena arena(geometry(kMany, 128 * kMany, 64), "");
  arena.configure({region("high", kMany, Order::kKey, Admission::kAlways),
                   region("low", kMany, Order::kInsertion, Admission::kAlways)});
  for (const std::uint32_t count : {0u, 1u, 8'192u, 8'193u, kMany}) {
    std::vector<std::uint32_t> ids;
    for (std::uint32_t id = kMany - count; id < kMany; ++id) {
      CHECK(kit::put(arena, id, 1, 0, kLow));
      ids.push_back(id);
    }
    CHECK(arena.list(kLow) == ids && arena.list(kHigh).empty());
  }
}

constexpr std::uint32_t kIds = 120;

void churn(Arena& arena, unsigned seed, double seconds) {
  std::mt19937 random(seed);
  const std::int64_t start = stoker::monotonic_ns();
  while (kit::seconds_since(start) < seconds) {
    std::uint32_t ids[4];
    double keys[4];
    bool flags[4];
    for (int i = 0; i < 4; ++i) {
      ids[i] = random() % kIds;
      keys[i] = random() % 100;
      kit::put(arena, ids[i], random() % 3000, keys[i], random() % 2);
    }
    for (int i = 0; i < 10; ++i) there(arena, random() % kIds);
    arena.move(random() % 2, ids, random() % 2 == 0 ? keys : nullptr, flags);
    if (random() % 8 == 0) arena.discard({ids, 2});
    if (random() % 8 == 0) arena.set_keys({ids, 4}, keys);
    if (random() % 8 == 0) {
      const double share = 0.1 + 0.01 * (random() % 80);
      arena.divide({"high", "low"}, {share, 1 - share});
    }
    if (random() % 16 == 0) arena.limit(20'000 + random() % 100'000);
    for (const std::uint32_t id : arena.list(kLow)) CHECK(id < kIds);
    if (random() % 50 == 0) kit::check_sound(arena);
  }
}

void finish(Arena& arena) {
  kit::check_sound(arena);
  arena.limit(100'000);
  kit::count_there(arena);
  const std::vector<stoker::Region> regions = arena.regions();
  CHECK(regions[kHigh].budget + regions[kLow].budget == 100'000);
  CHECK(arena.counters().evictions > 100 && arena.counters().corrupt == 0);
}

void budgets_move_while_all_are_at_work() {
  Arena arena(geometry(kIds, 100'000), "");
  arena.configure({region("high", 50'000, Order::kKey, Admission::kBeatsVictims),
                   region("low", 50'000, Order::kInsertion, Admission::kAlways)});
  std::vector<pid_t> children;
  for (unsigned i = 0; i < 3; ++i) {
    children.push_back(kit::spawn([&] { churn(arena, i, 0.7); }));
  }
  for (const pid_t child : children) CHECK(kit::succeeded(child));
  finish(arena);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) threads.emplace_back([&, t] { churn(arena, 7 + t, 0.7); });
  for (std::thread& thread : threads) thread.join();
  finish(arena);
}

std::uint64_t pages_of(const Arena& arena) {
  struct stat status{};
  CHECK(fstat(arena.memory_descriptor(), &status) == 0);
  return 512ull * static_cast<std::uint64_t>(status.st_blocks);
}

// A cache of half the limit has half the memory and the samples of the highest keys.
void memory_is_given_back_and_taken_again() {
  constexpr std::uint32_t kMany = 2000;
  stoker::Geometry asked = geometry(kMany, 20'000'000, 10'000);
  asked.limit = 10'000'000;
  Arena arena(asked, "");
  const auto fill = [&] {
    for (std::uint32_t id = 0; id < kMany; ++id) kit::put(arena, id, 9'000 + id, id);
    kit::check_sound(arena);
    CHECK(arena.counters().payload <= arena.header().limit);
    CHECK(arena.counters().payload > arena.header().limit - 12'000);
    CHECK(arena.memory() == pages_of(arena));
  };
  fill();
  const std::uint64_t half = arena.memory();
  CHECK(half < arena.header().total_bytes - 9'000'000);
  CHECK(arena.limit(30'000'000) == arena.header().total_bytes);
  fill();
  const std::uint64_t whole = arena.memory();
  CHECK(whole > 20'000'000);
  CHECK(arena.limit(10'000'000) == half);
  kit::check_sound(arena);
  CHECK(arena.memory() == pages_of(arena));
  CHECK(arena.counters().payload > 10'000'000 - 24'000);
  std::uint32_t first = 0;
  while (!there(arena, first)) ++first;
  for (std::uint32_t id = first; id < kMany; ++id) CHECK(there(arena, id));
  CHECK(arena.regions()[0].budget == 10'000'000);
  CHECK(arena.limit(0) < 1'000'000);
  CHECK(arena.counters().entries == 0);
  CHECK(!kit::put(arena, 1, 100));
  arena.limit(20'000'000);
  fill();
}

void what_is_leased_stays() {
  Arena arena(geometry(100, 1'000'000, 10'000), "");
  for (std::uint32_t id = 0; id < 100; ++id) kit::put(arena, id, 9'900, id);
  const std::uint32_t ids[] = {1, 2, 3};
  CHECK(arena.lease(ids, 5));
  const std::uint64_t half = arena.limit(500'000);
  for (const std::uint32_t id : ids) CHECK(there(arena, id));
  kit::check_sound(arena);
  arena.release(5);
  CHECK(arena.limit(1'000'000) > half + 400'000);
  kit::check_sound(arena);
}

// The lock's owner dies in the middle of moves: nothing is lost for good.
void killed_movers_leave_it_sound() {
  Arena arena(geometry(kIds, 100'000), "");
  arena.configure({region("high", 50'000, Order::kKey, Admission::kBeatsVictims),
                   region("low", 50'000, Order::kInsertion, Admission::kAlways)});
  for (unsigned i = 0; i < 20; ++i) {
    const pid_t child = kit::spawn([&] { churn(arena, i, 60); });
    kit::sleep_ms(20 + static_cast<long>(i) % 7);
    kit::kill_and_wait(child);
    kit::check_sound(arena);
  }
  churn(arena, 99, 0.1);
  kit::check_sound(arena);
  CHECK(arena.limit(100'000) == pages_of(arena));
  CHECK(arena.limit(20'000) == pages_of(arena));
}

// A process that died between reserving pages and counting them, or a reader that was late.
void pages_that_nobody_counts_are_given_back() {
  Arena arena(geometry(100, 1'000'000, 10'000), "");
  const std::uint64_t half = arena.limit(500'000);
  const auto from = static_cast<off_t>(half) + 100'000;
  CHECK(fallocate(arena.memory_descriptor(), 0, from, 50'000) == 0);
  CHECK(pages_of(arena) > half);
  CHECK(arena.limit(400'000) == pages_of(arena));
}

}  // namespace

int main() {
  the_target_admits_by_its_rules();
  a_full_cache_moves();
  what_is_not_there_does_not_move();
  copies_have_numbers();
  keys_come_along();
  leases_hold();
  budgets_are_divided_again();
  lists_are_complete();
  killed_movers_leave_it_sound();
  budgets_move_while_all_are_at_work();
  memory_is_given_back_and_taken_again();
  what_is_leased_stays();
  pages_that_nobody_counts_are_given_back();
  return check::failures();
}
