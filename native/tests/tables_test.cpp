// Batches of rows are read and written as by a plain loop, and bad arguments change nothing.
#include "stoker/tables.h"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "kit.h"

using stoker::ConfigError;

namespace {

std::vector<std::uint32_t> drawn(std::uint32_t below, std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint32_t> ids(size);
  for (std::uint32_t& id : ids) id = random() % below;
  return ids;
}

void every_access_counts() {
  std::vector<std::int32_t> counts(50, 0);
  std::vector<std::int32_t> expected(50, 0);
  const auto ids = drawn(50, 300, 1);
  stoker::count(counts, ids);
  for (const std::uint32_t id : ids) ++expected[id];
  CHECK(counts == expected);
  CHECK_THROWS(ConfigError, stoker::count(counts, std::vector<std::uint32_t>{1, 50}));
  CHECK(counts == expected);
}

void the_later_score_of_an_id_stays() {
  std::vector<double> values(40, 0.0);
  std::vector<std::int32_t> last(40, -1);
  std::vector<std::int32_t> seen(40, 0);
  const stoker::ScoreTable table{values, last, seen};
  const auto ids = drawn(20, 100, 2);
  std::vector<double> given(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) given[i] = static_cast<double>(i);
  stoker::write_scores(table, ids, given, 7);
  std::vector<double> keys(40);
  std::vector<std::uint32_t> all(40);
  for (std::uint32_t id = 0; id < 40; ++id) all[id] = id;
  stoker::score_keys(values, seen, all, keys.data());
  for (std::uint32_t id = 0; id < 40; ++id) {
    const auto times = std::count(ids.begin(), ids.end(), id);
    CHECK(seen[id] == times && last[id] == (times > 0 ? 7 : -1));
    const auto at = std::find(ids.rbegin(), ids.rend(), id);
    const double latest = times > 0 ? given[static_cast<std::size_t>(ids.rend() - at - 1)]
                                    : -std::numeric_limits<double>::infinity();
    CHECK(keys[id] == latest);
  }
  const std::vector<double> before = values;
  const std::vector<std::uint32_t> wrong{0, 40};
  CHECK_THROWS(ConfigError, stoker::write_scores(table, wrong, given, 8));
  CHECK_THROWS(ConfigError, stoker::score_keys(values, seen, wrong, keys.data()));
  CHECK(values == before);
}

void the_next_use_is_the_nearest() {
  for (const std::uint32_t below : {3u, 40u, 1000u}) {
    const auto own = drawn(below, 120, below);
    const auto later = drawn(below, below == 3 ? 0 : 150, below + 1);
    std::vector<std::uint32_t> all = own;
    all.insert(all.end(), later.begin(), later.end());
    std::vector<std::int64_t> next(own.size());
    stoker::next_use(own, later, next.data());
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      CHECK(next[i] == std::find(from, all.end(), own[i]) - all.begin());
    }
  }
}

void visits_lie_at_equal_distances() {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> phase(0.0, 1.0);
  for (const std::uint32_t samples : {1u, 2u, 300u}) {
    std::vector<std::uint32_t> counts(samples);
    std::vector<double> phases;
    std::vector<std::pair<double, std::uint32_t>> expected;
    for (std::uint32_t id = 0; id < samples; ++id) {
      counts[id] = samples == 1 ? 4 : random() % 4;
      if (counts[id] == 0) continue;
      phases.push_back(id % 5 == 0 ? 0.0 : phase(random));
      for (std::uint32_t turn = 0; turn < counts[id]; ++turn) {
        expected.emplace_back((turn + phases.back()) / counts[id], id);
      }
    }
    std::stable_sort(expected.begin(), expected.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::uint32_t> ids(expected.size());
    stoker::spread(counts, phases, ids);
    for (std::size_t i = 0; i < ids.size(); ++i) CHECK(ids[i] == expected[i].second);
    ids.push_back(0);
    CHECK_THROWS(ConfigError, stoker::spread(counts, phases, ids));
    ids.pop_back();
    phases.push_back(0.5);
    CHECK_THROWS(ConfigError, stoker::spread(counts, phases, ids));
  }
  stoker::spread({}, {}, {});
}

}  // namespace

int main() {
  every_access_counts();
  the_later_score_of_an_id_stays();
  the_next_use_is_the_nearest();
  visits_lie_at_equal_distances();
  return check::failures();
}
