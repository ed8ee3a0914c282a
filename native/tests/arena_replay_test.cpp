// A blank arena counts what a full one holds, and a run of accesses ends as they would one by one.
#include <algorithm>
#include <memory>

#include "kit.h"

using stoker::Admission;
using stoker::Arena;
using stoker::ConfigError;
using stoker::Order;
using stoker::Pop;
using stoker::RegionSpec;

namespace {

constexpr std::uint32_t kIds = 60;
constexpr std::uint64_t kCapacity = 4'000;

stoker::Geometry blank() {
  stoker::Geometry geometry = kit::geometry(kIds, kCapacity, 100);
  geometry.blank = true;
  return geometry;
}

RegionSpec region(const std::string& name, std::uint64_t budget, Order order) {
  RegionSpec spec;
  spec.name = name;
  spec.budget = budget;
  spec.order = order;
  return spec;
}

// Every order, admission and pop rule, and several regions.
std::vector<std::vector<RegionSpec>> rules() {
  std::vector<std::vector<RegionSpec>> all;
  for (const Order order : {Order::kKey, Order::kRecency, Order::kFrequency, Order::kInsertion}) {
    all.push_back({region("main", kCapacity, order)});
  }
  for (const Pop pop : {Pop::kRandom, Pop::kSieve, Pop::kSecondChance}) {
    all.push_back({region("main", kCapacity, Order::kInsertion)});
    all.back()[0].pop = pop;
  }
  for (const Admission admission : {Admission::kBeatsVictims, Admission::kWhileRoom}) {
    all.push_back({region("main", kCapacity, Order::kKey)});
    all.back()[0].admission = admission;
  }
  RegionSpec small = region("small", kCapacity / 10, Order::kInsertion);
  RegionSpec main = region("main", kCapacity - kCapacity / 10, Order::kInsertion);
  RegionSpec ghost = region("ghost", kCapacity, Order::kInsertion);
  small.pop = Pop::kPromote;
  small.visits = 2;
  small.promote_to = "main";
  small.ghost = "ghost";
  small.strict = main.strict = false;
  main.pop = Pop::kSecondChance;
  ghost.holds_bytes = false;
  all.push_back({small, main, ghost});
  RegionSpec high = region("high", kCapacity / 2, Order::kKey);
  high.admission = Admission::kBeatsVictims;
  all.push_back({high, region("low", kCapacity / 2, Order::kInsertion)});
  return all;
}

struct Accesses {
  std::vector<std::uint32_t> ids;
  std::vector<std::int64_t> lengths;
  std::vector<double> keys;
  std::vector<std::uint8_t> regions;

  explicit Accesses(unsigned seed, std::uint8_t num_regions) {
    std::mt19937 random(seed);
    for (std::uint32_t id = 0; id < kIds; ++id) lengths.push_back(random() % 200);
    for (int i = 0; i < 2'000; ++i) {
      ids.push_back(std::min<std::uint32_t>(static_cast<std::uint32_t>(random()) % kIds,
                                            static_cast<std::uint32_t>(random()) % kIds));
      keys.push_back(static_cast<double>(random() % 1'000));
      regions.push_back(static_cast<std::uint8_t>(random() % num_regions));
    }
  }
};

// What a store does with a batch, in single steps, over an arena that has bytes.
std::vector<bool> step(Arena& arena, const Accesses& all, std::size_t begin, std::size_t end,
                       bool after, bool placed) {
  std::vector<bool> hits;
  std::vector<std::size_t> missed;
  for (std::size_t i = begin; i < end; ++i) hits.push_back(kit::there(arena, all.ids[i]));
  for (std::size_t i = begin; i < end; ++i) {
    if (hits[i - begin] && !after) arena.set_keys({&all.ids[i], 1}, &all.keys[i]);
  }
  for (std::size_t i = begin; i < end; ++i) {
    if (hits[i - begin]) continue;
    if (kit::claim(arena, all.ids[i])) {
      missed.push_back(i);
    } else {
      hits[i - begin] = true;
    }
  }
  for (std::uint8_t target = 0; target < (placed ? 2 : 1); ++target) {
    std::vector<kit::Bytes> bytes;
    std::vector<stoker::Sample> samples;
    std::vector<std::uint32_t> ids;
    std::vector<double> keys;
    for (const std::size_t i : missed) {
      if (placed && all.regions[i] != target) continue;
      const auto length = static_cast<std::uint64_t>(all.lengths[all.ids[i]]);
      bytes.push_back(kit::payload(all.ids[i], length));
      samples.push_back({bytes.back().data(), length});
      ids.push_back(all.ids[i]);
      keys.push_back(all.keys[i]);
    }
    Arena::Placing placing{target};
    placing.keys = keys.data();
    const std::unique_ptr<bool[]> admitted(new bool[ids.size() + 1]);
    arena.put(ids, samples.data(), placing, admitted.get());
  }
  if (after) {
    arena.set_keys({all.ids.data() + begin, end - begin}, all.keys.data() + begin);
  }
  return hits;
}

void a_run_is_its_steps() {
  unsigned seed = 0;
  for (const auto& specs : rules()) {
    for (const std::size_t at_once : {1, 7, 100}) {
      for (const bool after : {false, true}) {
        const bool placed = specs.size() == 2;
        const Accesses all(++seed, 2);
        Arena full(kit::geometry(kIds, kCapacity, 100), "");
        Arena counting(blank(), "");
        full.configure(specs);
        counting.configure(specs);
        const std::unique_ptr<bool[]> hits(new bool[all.ids.size()]);
        Arena::Run run;
        run.lengths = all.lengths;
        run.keys = all.keys.data();
        run.after = after ? all.keys.data() : nullptr;
        run.regions = placed ? all.regions.data() : nullptr;
        run.entrance = 0;
        run.at_once = at_once;
        counting.replay(all.ids, run, hits.get());
        for (std::size_t begin = 0; begin < all.ids.size(); begin += at_once) {
          const std::size_t end = std::min(begin + at_once, all.ids.size());
          const std::vector<bool> expected = step(full, all, begin, end, after, placed);
          CHECK(std::equal(expected.begin(), expected.end(), hits.get() + begin));
        }
        const auto one = full.counters();
        const auto other = counting.counters();
        CHECK(one.hits == other.hits && one.misses == other.misses);
        CHECK(one.inserts == other.inserts && one.evictions == other.evictions);
        CHECK(one.payload == other.payload && one.entries == other.entries);
        CHECK(one.rejected == other.rejected);
        for (std::uint32_t r = 0; r < specs.size(); ++r) CHECK(full.list(r) == counting.list(r));
        kit::check_sound(counting);
      }
    }
  }
}

void lengths_count_and_bytes_do_not() {
  Arena arena(blank(), "");
  const std::uint32_t id = 3;
  const stoker::Sample sample{nullptr, 1'000};
  bool admitted = false;
  arena.put({&id, 1}, &sample, {0}, &admitted);
  CHECK(admitted && arena.counters().payload == 1'000);
  CHECK(kit::get(arena, id)->empty());
  CHECK(arena.header().num_blocks == 0);
  arena.discard({&id, 1});
  CHECK(arena.counters().payload == 0);
  kit::check_sound(arena);
}

void what_cannot_be_replayed_is_refused() {
  const std::uint32_t ids[] = {1, kIds};
  const std::vector<std::int64_t> lengths(kIds, 1);
  bool hits[2];
  Arena::Run run;
  run.lengths = lengths;
  run.entrance = 0;
  run.at_once = 1;
  Arena full(kit::geometry(kIds, kCapacity), "");
  CHECK_THROWS(ConfigError, full.replay({ids, 1}, run, hits));
  Arena counting(blank(), "");
  CHECK_THROWS(ConfigError, counting.replay(ids, run, hits));
  run.at_once = 0;
  CHECK_THROWS(ConfigError, counting.replay({ids, 1}, run, hits));
}

// The steps are compared with a store's in tests/sim/test_replay.py; here is what it says in brief.
void others_stand_in_once() {
  Arena arena(blank(), "");
  arena.configure({region("main", 3, Order::kInsertion)});
  const std::vector<std::int64_t> lengths(kIds, 1);
  const std::uint32_t cached[] = {10, 11, 12};
  const std::vector<stoker::Sample> samples(3, {nullptr, 1});
  bool admitted[3];
  arena.put(cached, samples.data(), {0}, admitted);
  std::vector<std::uint32_t> served(kIds, 0);
  std::vector<std::uint32_t> turns(kIds, 0);
  Arena::Run run;
  run.lengths = lengths;
  run.entrance = 0;
  run.at_once = 2;
  Arena::OnceEach once;
  once.served = served;
  once.turns = turns;
  once.stamp = 1;
  const std::vector<std::uint32_t> candidates{11, 12, 50};
  bool given = false;
  once.search = [&](std::size_t) -> Arena::Ids {
    if (given) return {};
    given = true;
    return candidates;
  };
  using How = Arena::How;
  // 11 and 12 stand in for 1 and 2; 50 is not there; then they get the turns of those: 2 and 1.
  const std::vector<std::uint32_t> asked{1, 2, 10, 3, 12, 11};
  std::vector<std::uint32_t> got(asked.size());
  std::vector<How> how(asked.size());
  arena.replay_once_each(asked, run, once, got.data(), how.data());
  CHECK((got == std::vector<std::uint32_t>{11, 12, 10, 3, 2, 1}));
  CHECK((how == std::vector<How>{How::kSubstituted, How::kSubstituted, How::kHit, How::kFetched,
                                 How::kFetched, How::kFetched}));
  CHECK(once.candidates.empty());
  kit::check_sound(arena);
  const std::vector<std::uint32_t> beyond{kIds};
  given = false;
  once.search = [&](std::size_t) -> Arena::Ids { return beyond; };
  CHECK_THROWS(ConfigError,
               arena.replay_once_each({asked.data(), 1}, run, once, got.data(), how.data()));
  once.candidates = {};
  once.search = [](std::size_t) -> Arena::Ids { return {}; };
  const std::vector<double> keys(asked.size(), 1.0);
  run.keys = keys.data();
  CHECK_THROWS(ConfigError, arena.replay_once_each(asked, run, once, got.data(), how.data()));
  run.after = keys.data();
  arena.replay_once_each({asked.data(), 1}, run, once, got.data(), how.data());
  Arena by_key(blank(), "");  // "main" is ordered by keys: what stands in would need one
  CHECK_THROWS(ConfigError, by_key.replay_once_each(asked, run, once, got.data(), how.data()));
  run.keys = run.after = nullptr;
  Arena full(kit::geometry(kIds, kCapacity), "");
  CHECK_THROWS(ConfigError, full.replay_once_each(asked, run, once, got.data(), how.data()));
  run.at_once = 0;
  CHECK_THROWS(ConfigError, arena.replay_once_each(asked, run, once, got.data(), how.data()));
}

}  // namespace

int main() {
  a_run_is_its_steps();
  lengths_count_and_bytes_do_not();
  what_cannot_be_replayed_is_refused();
  others_stand_in_once();
  return check::failures();
}
