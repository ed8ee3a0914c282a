// The arena as one process sees it; see arena_flight_test, arena_crash_test, arena_file_test.
#include "stoker/arena.h"

#include <map>

#include "kit.h"

using kit::geometry;
using kit::there;
using stoker::Arena;
using stoker::ConfigError;
using stoker::RegionSpec;
using stoker::SegmentError;

namespace {

void bytes_come_back() {
  Arena arena(geometry(100, 100'000), "");
  for (std::uint32_t id = 0; id < 100; ++id) CHECK(kit::put(arena, id, id * 19));
  CHECK(kit::count_there(arena) == 100);
  kit::check_sound(arena);
  CHECK(arena.counters().payload == 19 * 99 * 50 && arena.counters().entries == 100);
  kit::discard(arena, 7);
  CHECK(!there(arena, 7));
  CHECK(arena.counters().hits == 100 && arena.counters().misses == 1);
}

void ids_out_of_range_are_refused() {
  Arena arena(geometry(10, 10'000), "");
  const std::uint32_t ids[2] = {3, 10};
  const stoker::Sample samples[2] = {{"", 0}, {"", 0}};
  const double keys[2] = {0, 0};
  double got[2];
  bool flags[2];
  Arena::Snapshot snapshots[2];
  CHECK_THROWS(ConfigError, arena.put(ids, samples, {0}, flags));
  CHECK_THROWS(ConfigError, arena.measure(ids, snapshots));
  CHECK_THROWS(ConfigError, arena.contains(ids, flags));
  const std::vector<std::uint32_t> marks(10, 0);
  std::int64_t places[2];
  CHECK_THROWS(ConfigError, arena.find_lacking(ids, marks, 1, places));
  CHECK_THROWS(ConfigError, arena.find_lacking({ids, 1}, {marks.data(), 9}, 1, places));
  CHECK_THROWS(ConfigError, arena.claim(ids, flags));
  CHECK_THROWS(ConfigError, arena.abandon(ids));
  CHECK_THROWS(ConfigError, arena.wait(ids, 0, flags));
  CHECK_THROWS(ConfigError, arena.discard(ids));
  CHECK_THROWS(ConfigError, arena.set_keys(ids, keys));
  CHECK_THROWS(ConfigError, arena.keys(ids, got));
  CHECK_THROWS(ConfigError, arena.lease(ids, 0));
  CHECK_THROWS(ConfigError, Arena(geometry(0, 1), ""));
  CHECK_THROWS(ConfigError, Arena(geometry(1, 1, 0), ""));
  CHECK(arena.counters().entries == 0);
  kit::check_sound(arena);
}

void a_sample_that_cannot_fit_is_refused() {
  Arena arena(geometry(10, 10'000), "");
  CHECK(kit::put(arena, 0, 10'000) && !kit::put(arena, 1, 10'001));
  const unsigned char byte = 0;
  for (const std::uint64_t size : {1ull << 32, ~0ull}) {
    const std::uint32_t id = 2;
    const stoker::Sample sample{&byte, size};
    bool admitted = true;
    arena.put({&id, 1}, &sample, {0}, &admitted);
    CHECK(!admitted);
  }
  CHECK(there(arena, 0) && arena.counters().rejected == 3);
  Arena none(geometry(3, 0), "");
  CHECK(!kit::put(none, 0, 1) && kit::put(none, 1, 0) && there(none, 1));
  kit::check_sound(none);
}

// Free space in single blocks only: samples lie in many extents, then in a spilled list of them.
void fragments_are_filled() {
  for (const bool on_disk : {false, true}) {
    const kit::Path path;
    Arena arena(geometry(3000, 1'000'000, 4096, on_disk), on_disk ? path : std::string());
    const std::uint64_t block = arena.header().block_size;
    const std::uint32_t small = arena.header().num_blocks;
    CHECK(block == 512 && small < 3000);
    // Fills every block, then frees every second one.
    std::uint32_t filled = 0;
    while (filled < 3000 && arena.counters().free_blocks > 0) kit::put(arena, filled++, 300);
    for (std::uint32_t id = 0; id < filled; id += 2) kit::discard(arena, id);
    kit::check_sound(arena);
    CHECK(kit::put(arena, 2990, 2 * 512));   // two extents, inline
    CHECK(kit::put(arena, 2991, 3 * 512));   // a spilled list
    CHECK(kit::put(arena, 2992, 60 * 512));  // a long one
    CHECK(arena.counters().evictions == 0);
    kit::check_sound(arena);
    CHECK(there(arena, 2990) && there(arena, 2991) && there(arena, 2992));
    kit::put(arena, 2993, 400 * 512);  // more pieces than a list holds: evicts until it fits
    CHECK(there(arena, 2993) && arena.counters().evictions > 0);
    for (std::uint32_t id = 2990; id < 2994; ++id) kit::discard(arena, id);
    kit::count_there(arena);
    kit::check_sound(arena);
  }
}

void a_cached_sample_keeps_its_bytes_and_takes_the_new_key() {
  Arena arena(geometry(10, 3000), "");
  for (std::uint32_t id = 0; id < 3; ++id) CHECK(kit::put(arena, id, 1000, id));
  CHECK(kit::put(arena, 0, 500, 9));
  CHECK(kit::get(arena, 0) == kit::payload(0, 1000));
  CHECK(kit::put(arena, 3, 1000, 5) && !there(arena, 1) && there(arena, 0));
  const std::uint32_t ids[4] = {0, 1, 2, 3};
  const double keys[4] = {-1, 0, 100, 100};
  arena.set_keys(ids, keys);
  double got[4];
  arena.keys(ids, got);
  CHECK(got[0] == -1 && got[1] != got[1] && got[2] == 100);
  CHECK(kit::put(arena, 4, 1000, 50) && !there(arena, 0));
  kit::check_sound(arena);
}

void one_id_twice_in_a_batch() {
  Arena arena(geometry(10, 3000), "");
  const std::uint32_t ids[3] = {5, 5, 5};
  const kit::Bytes bytes = kit::payload(5, 700);
  const stoker::Sample sample{bytes.data(), bytes.size()};
  const stoker::Sample samples[3] = {sample, sample, sample};
  bool flags[3];
  arena.put(ids, samples, {0}, flags);
  CHECK(flags[0] && flags[1] && flags[2] && there(arena, 5));
  arena.claim(ids, flags);
  CHECK(!flags[0] && !flags[1]);
  kit::discard(arena, 5);
  arena.claim(ids, flags);
  CHECK(flags[0] && !flags[1] && !flags[2]);
  kit::check_sound(arena);
}

void leased_samples_stay() {
  Arena arena(geometry(100, 10'000), "");
  std::vector<std::uint32_t> leased;
  for (std::uint32_t id = 0; id < 10; ++id) CHECK(kit::put(arena, id, 1000, id));
  for (std::uint32_t id = 0; id < 9; ++id) CHECK(arena.lease({&id, 1}, id));
  for (std::uint32_t id = 10; id < 20; ++id) CHECK(kit::put(arena, id, 1000, id));
  for (std::uint32_t id = 0; id < 9; ++id) CHECK(there(arena, id));
  CHECK(!kit::put(arena, 50, 2000, 99));
  arena.release(3);
  kit::check_sound(arena);
  CHECK(kit::put(arena, 51, 2000, 99) && kit::count_there(arena) == 9);
  CHECK(!there(arena, 0) && there(arena, 4));
  arena.release(INT64_MAX);
  kit::check_sound(arena);
  // Until the pool of leases is used up.
  std::vector<std::uint32_t> many(arena.header().num_leases + 1, 4);
  CHECK(!arena.lease(many, 7));
  kit::check_sound(arena);
  arena.release(7);
  kit::check_sound(arena);
  many.pop_back();
  CHECK(arena.lease(many, 8));
}

// Random operations against a map from id to length.
void same_as_a_model() {
  Arena arena(geometry(64, 20'000, 400), "");
  std::map<std::uint32_t, std::uint64_t> model;
  std::mt19937 random(11);
  for (int step = 0; step < 20000; ++step) {
    const std::uint32_t id = random() % 64;
    if (random() % 5 == 0) {
      kit::discard(arena, id);
      model.erase(id);
      continue;
    }
    const std::uint64_t length = random() % 1500;
    const bool known = model.contains(id);
    CHECK(kit::put(arena, id, length, static_cast<double>(random() % 50)));
    if (!known) model[id] = length;
    std::uint64_t payload = 0;
    for (auto each = model.begin(); each != model.end();) {
      bool found = false;
      arena.contains({&each->first, 1}, &found);
      payload += found ? each->second : 0;
      each = found ? std::next(each) : model.erase(each);
    }
    CHECK(model.contains(id) && payload == arena.counters().payload);
    if (step % 100 == 0) kit::check_sound(arena);
  }
  for (const auto& [id, length] : model) CHECK(kit::get(arena, id) == kit::payload(id, length));
}

void another_holder_sees_the_same() {
  Arena arena(geometry(10, 10'000), "");
  kit::put(arena, 1, 100);
  {
    Arena other(dup(arena.memory_descriptor()), -1);
    CHECK(there(other, 1) && kit::put(other, 2, 200));
    const std::uint32_t id = 2;
    CHECK(other.lease({&id, 1}, 5));
  }
  CHECK(there(arena, 2));
  kit::check_sound(arena);  // the leases went with their holder
  CHECK_THROWS(SegmentError, Arena(dup(arena.memory_descriptor()), dup(0)));
}

}  // namespace

int main() {
  bytes_come_back();
  ids_out_of_range_are_refused();
  a_sample_that_cannot_fit_is_refused();
  fragments_are_filled();
  a_cached_sample_keeps_its_bytes_and_takes_the_new_key();
  one_id_twice_in_a_batch();
  leased_samples_stay();
  same_as_a_model();
  another_holder_sees_the_same();
  return check::failures();
}
