#include "stoker/tables.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;  // rows looked up before they are needed

void check(SampleIds ids, std::size_t rows) {
  for (const std::uint32_t id : ids) {
    if (id >= rows) {
      throw ConfigError("id " + std::to_string(id) + " is out of range: give ids from 0 to " +
                        std::to_string(rows - 1));
    }
  }
}

}  // namespace

void count(std::span<std::int32_t> counts, SampleIds ids) {
  check(ids, counts.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&counts[ids[i + kAhead]], 1);
    ++counts[ids[i]];
  }
}

void write_scores(const ScoreTable& table, SampleIds ids, std::span<const double> values,
                  std::int32_t step) {
  check(ids, table.values.size());
  // Processors look ahead far enough by themselves: to prefetch three tables takes longer.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    table.values[ids[i]] = values[i];
    table.last[ids[i]] = step;
    ++table.seen[ids[i]];
  }
}

void score_keys(std::span<const double> values, std::span<const std::int32_t> seen, SampleIds ids,
                double* keys) {
  check(ids, values.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) {
      __builtin_prefetch(&values[ids[i + kAhead]]);
      __builtin_prefetch(&seen[ids[i + kAhead]]);
    }
    const double value = values[ids[i]];  // read in any case: what is seen cannot be predicted
    keys[i] = seen[ids[i]] > 0 ? value : -std::numeric_limits<double>::infinity();
  }
}

void count_below(std::span<const double> values, std::int64_t* below) {
  // A radix sort by bytes, from the lowest on, but for those that all have in common: of losses in
  // single precision three are.
  struct Item {
    std::uint64_t bits;  // ordered as the values are
    std::uint32_t at;
  };
  if (values.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw ConfigError(std::to_string(values.size()) + " values are too many: give less than 2^32");
  }
  constexpr std::size_t kBytes = sizeof(std::uint64_t);
  std::vector<std::array<std::uint32_t, 256>> counts(kBytes);
  std::vector<Item> items(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint64_t>(values[i] + 0.0);  // which leaves no -0
    const std::uint64_t sign = std::uint64_t{1} << 63;
    items[i] = {(bits & sign) != 0 ? ~bits : bits | sign, static_cast<std::uint32_t>(i)};
    for (std::size_t b = 0; b < kBytes; ++b) ++counts[b][(items[i].bits >> 8 * b) & 255];
  }
  std::vector<Item> sorted(values.size());
  for (std::size_t b = 0; b < kBytes && !items.empty(); ++b) {
    auto& ends = counts[b];
    if (ends[(items[0].bits >> 8 * b) & 255] == items.size()) continue;
    std::uint32_t end = 0;
    for (std::uint32_t& count : ends) end += std::exchange(count, end);
    for (const Item& item : items) sorted[ends[(item.bits >> 8 * b) & 255]++] = item;
    items.swap(sorted);
  }
  std::int64_t less = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && items[i].bits != items[i - 1].bits) less = static_cast<std::int64_t>(i);
    below[items[i].at] = less;
  }
}

void next_use(SampleIds own, SampleIds later, std::int64_t* next) {
  const std::uint64_t length = own.size() + later.size();
  if (length > std::numeric_limits<std::uint32_t>::max()) {
    throw ConfigError(std::to_string(length) + " accesses are too many: give less than 2^32");
  }
  std::uint32_t largest = 0;
  for (const SampleIds part : {own, later}) {
    for (const std::uint32_t id : part) largest = std::max(largest, id);
  }
  std::vector<std::uint32_t> first(std::size_t{largest} + 1, static_cast<std::uint32_t>(length));
  for (std::size_t i = later.size(); i-- > 0;) {
    if (i >= kAhead) __builtin_prefetch(&first[later[i - kAhead]], 1);
    first[later[i]] = static_cast<std::uint32_t>(own.size() + i);
  }
  for (std::size_t i = own.size(); i-- > 0;) {
    if (i >= kAhead) __builtin_prefetch(&first[own[i - kAhead]], 1);
    next[i] = first[own[i]];
    first[own[i]] = static_cast<std::uint32_t>(i);
  }
}

void first_use(SampleIds ids, std::span<std::int64_t> first) {
  check(ids, first.size());
  for (std::size_t i = ids.size(); i-- > 0;) {
    if (i >= kAhead) __builtin_prefetch(&first[ids[i - kAhead]], 1);
    first[ids[i]] = static_cast<std::int64_t>(i);
  }
}

}  // namespace stoker
