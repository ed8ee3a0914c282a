// Batches of rows are read and written as by a plain loop, and bad arguments change nothing.
#include "stoker/tables.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
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

void kinds_are_those_of_the_ids() {
  const auto ids = drawn(50, 30, 3);
  std::vector<std::uint8_t> kinds(50);
  for (std::uint32_t id = 0; id < 50; ++id) kinds[id] = id % 7 == 0 ? 255 : id % 3;
  stoker::Kinds counts{}, expected{};
  stoker::count_kinds(kinds, ids, counts);
  for (const std::uint32_t id : ids) ++expected[kinds[id]];
  CHECK(counts == expected);
  const std::vector<std::uint32_t> wrong{0, 50};
  CHECK_THROWS(ConfigError, stoker::count_kinds(kinds, wrong, counts));
}

void rows_are_written() {
  std::vector<std::uint32_t> table(50, 0);
  std::vector<std::uint8_t> flags(50, 0);
  const auto ids = drawn(50, 40, 1);
  stoker::write(table, ids, 70'000);
  stoker::write(flags, ids, 1);
  for (std::uint32_t id = 0; id < 50; ++id) {
    const bool is_meant = std::find(ids.begin(), ids.end(), id) != ids.end();
    CHECK(table[id] == (is_meant ? 70'000u : 0u));
    CHECK(flags[id] == (is_meant ? 1u : 0u));
  }
  const std::vector<std::uint32_t> wrong{1, 50};
  const auto before = table;
  CHECK_THROWS(ConfigError, stoker::write(table, wrong, 7));
  CHECK(table == before);
}

void the_first_row_of_a_value_is_found() {
  const std::vector<std::uint32_t> table{5, 7, 7, 5, 7};
  const bool wanted[] = {true, false, true, true, true};
  const std::vector<std::uint32_t> ids{3, 1, 4, 2};
  CHECK(stoker::find_first(table, 7, wanted, ids) == 2);  // 1 is not wanted
  CHECK(stoker::find_first(table, 5, wanted, ids) == 0);
  CHECK(stoker::find_first(table, 6, wanted, ids) == ids.size());
  const std::vector<std::uint32_t> wrong{3, 5};
  CHECK_THROWS(ConfigError, stoker::find_first(table, 5, wanted, wrong));
  const std::vector<std::uint32_t> last{4};
  CHECK_THROWS(ConfigError, stoker::find_first(table, 5, {wanted, 4}, last));
}

void rows_are_looked_up() {
  const auto table = drawn(1'000, 50, 1);
  const auto ids = drawn(50, 300, 2);
  std::vector<std::uint32_t> found(300), expected;
  stoker::look_up(table, ids, found.data());
  for (const std::uint32_t id : ids) expected.push_back(table[id]);
  CHECK(found == expected);
  const std::vector<std::uint32_t> wrong{50};
  CHECK_THROWS(ConfigError, stoker::look_up(table, wrong, found.data()));
}

void the_later_score_of_an_id_stays() {
  std::vector<double> values(40, 0.0);
  std::vector<std::int32_t> last(40, -1);
  std::vector<std::int32_t> seen(40, 0);
  const stoker::ScoreTable table{values, last, seen};
  const auto ids = drawn(20, 100, 2);
  std::vector<double> given(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) given[i] = static_cast<double>(i);
  const std::vector<std::int32_t> step{7};
  stoker::write_scores(table, ids, given, step);
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
  std::vector<std::int32_t> steps(ids.size());
  std::iota(steps.begin(), steps.end(), 20);
  stoker::write_scores(table, ids, given, steps);
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(last[ids[i]] == 20 + values[ids[i]]);
  const std::vector<double> before = values;
  const std::vector<std::uint32_t> wrong{0, 40};
  CHECK_THROWS(ConfigError, stoker::write_scores(table, wrong, given, step));
  CHECK_THROWS(ConfigError, stoker::score_keys(values, seen, wrong, keys.data()));
  given.back() = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS(ConfigError, stoker::write_scores(table, ids, given, step));
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

void counts_are_those_of_smaller_and_of_equal_ones() {
  std::mt19937 random(11);
  std::normal_distribution<double> normal(0.0, 1.0);
  for (const std::size_t size : {0u, 1u, 2u, 31u, 300u, 3000u}) {
    for (int kind = 0; kind < 4; ++kind) {
      std::vector<double> values(size);
      for (double& value : values) {
        value = normal(random);
        if (kind == 1) value = static_cast<double>(static_cast<float>(value));
        if (kind == 2) value = std::round(value);  // ties, and zeros of both signs
        if (kind == 3) value = 1.0;
      }
      if (size > 2) values[0] = std::numeric_limits<double>::infinity();
      if (size > 2) values[1] = -std::numeric_limits<double>::infinity();
      std::vector<std::int64_t> below(size);
      stoker::count_below(values, below.data());
      for (std::size_t i = 0; i < size; ++i) {
        const auto less = [&](double other) { return other < values[i]; };
        CHECK(below[i] == std::count_if(values.begin(), values.end(), less));
      }
      std::vector<std::uint32_t> order(size), counts(size);
      stoker::count_up_to(values, order, counts);
      std::vector<std::uint32_t> alone(size);
      stoker::count_up_to(values, alone, {});
      CHECK(alone == order);
      for (std::size_t i = 1; i < size; ++i) CHECK(values[order[i - 1]] <= values[order[i]]);
      CHECK(std::set<std::uint32_t>(order.begin(), order.end()).size() == size);
      for (std::size_t i = 0; i < size; ++i) {
        const auto at_most = [&](double other) { return other <= values[i]; };
        CHECK(counts[i] == std::count_if(values.begin(), values.end(), at_most));
      }
    }
  }
}

void many_values_are_counted_as_few() {
  std::mt19937 random(12);
  for (const unsigned different : {1u, 1'000u, 0xffffffffu}) {
    std::vector<double> values(300'000);  // which two threads sort
    for (double& value : values) value = static_cast<double>(random() % different);
    std::vector<std::uint32_t> order(values.size()), counts(values.size());
    stoker::count_up_to(values, order, counts);
    std::vector<double> sorted = values;
    std::sort(sorted.begin(), sorted.end());
    std::vector<bool> comes(values.size());
    bool are_right = true;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto end = std::upper_bound(sorted.begin(), sorted.end(), values[i]);
      are_right &= counts[i] == end - sorted.begin() && values[order[i]] == sorted[i];
      comes[order[i]] = true;
    }
    CHECK(are_right);
    CHECK(std::find(comes.begin(), comes.end(), false) == comes.end());
  }
}

void the_first_use_is_the_first() {
  for (const std::uint32_t below : {3u, 40u, 1000u}) {
    const auto ids = drawn(below, 120, below);
    std::vector<std::int64_t> first(below, -1);
    stoker::first_use(ids, first);
    for (std::uint32_t id = 0; id < below; ++id) {
      const auto at = std::find(ids.begin(), ids.end(), id);
      CHECK(first[id] == (at == ids.end() ? -1 : at - ids.begin()));
    }
    const std::vector<std::uint32_t> wrong{0, below};
    CHECK_THROWS(ConfigError, stoker::first_use(wrong, first));
  }
}

void the_median_is_that_of_what_was_seen() {
  std::mt19937 random(7);
  for (const std::size_t size : {1u, 2u, 3u, 10u, 999u, 50'000u}) {
    for (const unsigned different : {1u, 2u, 1'000'000u}) {
      for (const bool is_sorted : {false, true}) {
        std::vector<double> values(size);
        std::vector<std::int32_t> seen(size);
        for (double& value : values) value = static_cast<double>(random() % different) - 3.5;
        for (std::int32_t& times : seen) times = static_cast<std::int32_t>(random() % 3);
        seen[0] = 1;
        if (is_sorted) {  // the first half alone: no sample of all says where it lies
          std::sort(values.begin(), values.end());
          std::fill(seen.begin() + static_cast<std::ptrdiff_t>(size / 2) + 1, seen.end(), 0);
        }
        std::vector<double> known;
        for (std::size_t i = 0; i < size; ++i) {
          if (seen[i] > 0) known.push_back(values[i]);
        }
        std::sort(known.begin(), known.end());
        const double expected = (known[(known.size() - 1) / 2] + known[known.size() / 2]) / 2;
        CHECK(stoker::median(values, seen) == expected);
      }
    }
  }
  // What is looked at to begin with is all above the median.
  std::vector<double> values(9'000, 0.0);
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = 1.0 + static_cast<double>(i);
  CHECK(stoker::median(values, std::vector<std::int32_t>(values.size(), 1)) == 0.0);
  CHECK(std::isnan(stoker::median(values, std::vector<std::int32_t>(values.size(), 0))));
  CHECK(std::isnan(stoker::median({}, {})));
}

void the_least_of_the_largest_is_that_of_a_sort() {
  std::mt19937 random(8);
  for (const std::size_t size : {1u, 2u, 10u, 999u, 50'000u}) {
    for (const unsigned different : {1u, 3u, 1'000'000u}) {
      std::vector<double> values(size);
      const auto chosen = std::make_unique<bool[]>(size);
      const std::span<const bool> are_chosen(chosen.get(), size);
      std::vector<double> known;
      for (std::size_t i = 0; i < size; ++i) {
        values[i] = static_cast<double>(random() % different) - 3.5;
        chosen[i] = random() % 3 > 0;
        if (chosen[i]) known.push_back(values[i]);
      }
      if (!known.empty() && size > 500) {  // what is looked at to begin with misleads
        std::sort(values.begin(), values.end());
        for (std::size_t i = 0; i < size; ++i) chosen[i] = i >= size - known.size();
        std::copy(values.end() - static_cast<std::ptrdiff_t>(known.size()), values.end(),
                  known.begin());
      }
      std::sort(known.rbegin(), known.rend());
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, known.size() / 3,
                                      known.size() * 7 / 10, known.size()}) {
        if (count > known.size()) continue;
        const auto floor = stoker::least_of_largest(values, are_chosen, count);
        const double least = count > 0 ? known[count - 1] : std::numeric_limits<double>::infinity();
        CHECK(floor.least == least);
        const auto is_above = [&](double value) { return value > least; };
        CHECK(floor.above ==
              static_cast<std::size_t>(std::count_if(known.begin(), known.end(), is_above)));
      }
      CHECK_THROWS(ConfigError, stoker::least_of_largest(values, are_chosen, known.size() + 1));
    }
  }
}

void distinct_ids_ascend() {
  for (const std::uint32_t below : {1u, 2u, 50u, 5'000u, 5'000'000u, 0xffffffffu}) {
    for (const std::size_t size : {0u, 1u, 300u, 4'000u}) {
      const auto ids = drawn(below, size, below);
      const std::set<std::uint32_t> expected(ids.begin(), ids.end());
      std::vector<std::uint32_t> found(size);
      found.resize(stoker::distinct(ids, found));
      CHECK(std::equal(found.begin(), found.end(), expected.begin(), expected.end()));
    }
  }
}

}  // namespace

int main() {
  every_access_counts();
  kinds_are_those_of_the_ids();
  rows_are_written();
  the_first_row_of_a_value_is_found();
  rows_are_looked_up();
  the_later_score_of_an_id_stays();
  the_next_use_is_the_nearest();
  counts_are_those_of_smaller_and_of_equal_ones();
  many_values_are_counted_as_few();
  the_first_use_is_the_first();
  the_median_is_that_of_what_was_seen();
  the_least_of_the_largest_is_that_of_a_sort();
  distinct_ids_ascend();
  return check::failures();
}
