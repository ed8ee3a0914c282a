// Draws are those of NumPy's generators and of plain loops.
#include "stoker/draws.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kit.h"

using stoker::ConfigError;

namespace {

std::uint32_t next32(void* state) {
  return static_cast<std::uint32_t>((*static_cast<std::mt19937*>(state))());
}
std::uint64_t next64(void* state) {
  const std::uint64_t high = next32(state);
  return (high << 32) | next32(state);
}

// As NumPy has it: each item, from the last on, trades places with one before it or stays.
template <typename Item>
void shuffled_plainly(std::vector<Item>& items, const stoker::Bits& bits) {
  for (std::uint32_t i = static_cast<std::uint32_t>(items.size()); i-- > 1;) {
    std::uint32_t mask = 1;
    while (mask < i) mask = 2 * mask + 1;
    std::uint32_t other = bits.next32(bits.state) & mask;
    while (other > i) other = bits.next32(bits.state) & mask;
    std::swap(items[i], items[other]);
  }
}

template <typename Item>
void a_shuffle_is_that_of_a_plain_loop() {
  for (const std::size_t size : {0u, 1u, 2u, 3u, 64u, 65u, 66u, 129u, 1000u}) {
    std::vector<Item> items(size);
    std::iota(items.begin(), items.end(), Item{0});
    std::vector<Item> expected = items;
    std::mt19937 random(7);
    std::mt19937 same(7);
    stoker::shuffle(std::span(items), {&random, next64, next32});
    shuffled_plainly(expected, {&same, next64, next32});
    CHECK(items == expected);
    CHECK(random == same);
  }
}

void a_shuffle_may_end_early() {
  for (const std::size_t since : {0u, 1u, 2u, 63u, 64u, 65u, 199u, 200u, 300u}) {
    std::vector<std::uint32_t> items(200);
    std::iota(items.begin(), items.end(), 0u);
    std::vector<std::uint32_t> whole = items;
    std::mt19937 random(7);
    std::mt19937 same(7);
    stoker::shuffle(std::span(items), {&random, next64, next32}, since);
    stoker::shuffle(std::span(whole), {&same, next64, next32});
    for (std::size_t i = since; i < items.size(); ++i) CHECK(items[i] == whole[i]);
    std::sort(items.begin(), items.end());
    for (std::uint32_t i = 0; i < items.size(); ++i) CHECK(items[i] == i);
    if (since >= items.size()) CHECK(random == std::mt19937(7));
  }
}

double next_double(void* state) {
  return static_cast<double>(next64(state) >> 11) / 9007199254740992.0;
}

void counts_sum_up_and_follow_their_probabilities() {
  std::mt19937 random(5);
  const stoker::Bits bits{&random, next64, next32, next_double};
  std::vector<double> p(1'000, 0.5 / 500);
  std::fill(p.begin(), p.begin() + 500, 0.0);
  p[0] = 0.5;  // drawn often: not by inversion
  std::vector<std::uint32_t> counts(p.size());
  CHECK(!stoker::multinomial(10'000, p, bits, counts));
  p[0] = 0.0;
  for (double& each : p) each *= 2;
  CHECK(stoker::multinomial(10'000, p, bits, counts));
  CHECK(std::accumulate(counts.begin(), counts.end(), 0u) == 10'000);
  CHECK(std::accumulate(counts.begin(), counts.begin() + 500, 0u) == 0);
  CHECK(std::accumulate(counts.begin() + 500, counts.begin() + 750, 0u) > 4'700);
  CHECK(std::accumulate(counts.begin() + 500, counts.begin() + 750, 0u) < 5'300);
  CHECK_THROWS(ConfigError, stoker::multinomial(1, p, bits, {counts.data(), 1}));
}

void points_fall_where_a_search_finds_them() {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (const std::size_t size : {1u, 2u, 17u, 500u}) {
    std::vector<std::uint32_t> order(size);
    std::vector<double> parts(size);
    for (std::size_t i = 0; i < size; ++i) {
      order[i] = static_cast<std::uint32_t>(random());
      parts[i] = i % 3 == 1 ? 0.0 : uniform(random);
    }
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, size / 2, size}) {
      const double start = uniform(random);
      std::vector<std::uint32_t> drawn(count);
      stoker::draw_along(order, parts, start, drawn);
      std::vector<double> line(size);
      std::partial_sum(parts.begin(), parts.end(), line.begin());
      const double scale = static_cast<double>(count) / line.back();
      for (double& end : line) end *= scale;
      for (std::size_t k = 0; k < count; ++k) {
        const auto at = std::upper_bound(line.begin(), line.end(), static_cast<double>(k) + start);
        CHECK(drawn[k] == (at == line.end() ? order.back()
                                            : order[static_cast<std::size_t>(at - line.begin())]));
      }
    }
  }
  std::vector<std::uint32_t> drawn(1);
  CHECK_THROWS(ConfigError, stoker::draw_along({}, {}, 0.5, drawn));
  const std::vector<std::uint32_t> order{1, 2};
  const std::vector<double> parts{0.5};
  CHECK_THROWS(ConfigError, stoker::draw_along(order, parts, 0.5, drawn));
}

void those_drawn_among_all_are_those_along_the_line() {
  std::mt19937 random(8);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (const std::size_t size : {1u, 2u, 17u, 5000u}) {
    std::vector<double> shares(2 * size);
    std::vector<std::uint32_t> order(size);
    std::vector<double> parts;
    double sum = 0;
    for (double& share : shares) share = uniform(random);
    for (std::size_t i = 0; i < size; ++i) {
      order[i] = static_cast<std::uint32_t>(2 * size - 1 - 2 * i);
      parts.push_back(shares[order[i]]);
      sum += parts.back();
    }
    std::vector<std::uint32_t> drawn(static_cast<std::size_t>(sum));
    const double start = uniform(random);
    stoker::draw_along(order, parts, start, drawn);
    stoker::draw_among(order, shares, start, drawn.size());
    CHECK(std::equal(drawn.begin(), drawn.end(), order.begin()));
    CHECK_THROWS(ConfigError, stoker::draw_among(order, shares, start, size + 1));
    order[0] = static_cast<std::uint32_t>(shares.size());
    CHECK_THROWS(ConfigError, stoker::draw_among(order, shares, start, 1));
  }
}

void what_the_last_point_misses_is_the_last_one() {
  const std::vector<double> none(3);
  std::vector<std::uint32_t> order{2, 0, 1};
  stoker::draw_among(order, none, 0.5, 2);
  CHECK((order == std::vector<std::uint32_t>{1, 1, 1}));
}

void each_comes_as_often_as_counted() {
  const std::vector<std::uint32_t> counts{0, 2, 1, 0, 3};
  std::vector<std::uint32_t> ids(6);
  stoker::repeat(counts, ids);
  CHECK((ids == std::vector<std::uint32_t>{1, 1, 2, 4, 4, 4}));
  stoker::repeat({}, {});
  for (const std::uint32_t most : {1u, 3u, 9u}) {
    std::mt19937 random(most);
    std::vector<std::uint32_t> many(500);
    std::vector<std::uint32_t> expected;
    for (std::uint32_t id = 0; id < many.size(); ++id) {
      many[id] = static_cast<std::uint32_t>(random() % (most + 1));
      expected.insert(expected.end(), many[id], id);
    }
    std::vector<std::uint32_t> found(expected.size());
    stoker::repeat(many, found);
    CHECK(found == expected);
  }
  for (const std::size_t wrong : {0u, 5u, 7u}) {
    std::vector<std::uint32_t> room(wrong);
    CHECK_THROWS(ConfigError, stoker::repeat(counts, room));
  }
}

void visits_lie_at_equal_distances() {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> phase(0.0, 1.0);
  for (const std::uint32_t samples : {1u, 2u, 300u, 20000u}) {
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
  a_shuffle_is_that_of_a_plain_loop<std::uint8_t>();
  a_shuffle_is_that_of_a_plain_loop<std::uint32_t>();
  a_shuffle_is_that_of_a_plain_loop<std::uint64_t>();
  a_shuffle_may_end_early();
  counts_sum_up_and_follow_their_probabilities();
  points_fall_where_a_search_finds_them();
  those_drawn_among_all_are_those_along_the_line();
  what_the_last_point_misses_is_the_last_one();
  each_comes_as_often_as_counted();
  visits_lie_at_equal_distances();
  return check::failures();
}
