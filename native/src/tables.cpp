#include "stoker/tables.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
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

void check_finite(SampleIds ids, std::span<const double> values) {
  bool are_finite = true;
  for (const double value : values) are_finite &= std::isfinite(value);
  if (are_finite) return;
  std::size_t wrong = 0;
  while (std::isfinite(values[wrong])) ++wrong;
  const char* const infinite = values[wrong] > 0 ? "inf" : "-inf";
  throw ConfigError("score " + std::string(std::isnan(values[wrong]) ? "nan" : infinite) +
                    " of id " + std::to_string(ids[wrong]) +
                    " is not finite: leave that sample out");
}

template <typename T>
void fill(std::span<T> table, SampleIds ids, T value) {
  check(ids, table.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&table[ids[i + kAhead]], 1);
    table[ids[i]] = value;
  }
}

// The bits of a number, which is not NaN, in the order of the numbers.
std::uint64_t ordered(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value + 0.0);  // which leaves no -0
  constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

struct Ordered {
  std::uint64_t bits;
  std::uint32_t at;
};

// Divides what lies between two numbers into up to 2^bits equal parts; what lies outside, as NaN
// does, is in the last one.
class Buckets {
 public:
  Buckets(std::uint64_t least, std::uint64_t greatest, int bits) : least_(least) {
    shift_ = std::max(0, static_cast<int>(std::bit_width(greatest - least)) - bits);
    count_ = static_cast<std::size_t>((greatest - least) >> shift_) + 1;
  }
  std::size_t size() const { return count_; }
  std::size_t of(std::uint64_t bits) const {
    return std::min(count_ - 1, static_cast<std::size_t>((bits - least_) >> shift_));
  }

 private:
  std::uint64_t least_;
  int shift_;
  std::size_t count_;
};

// log2 of as many buckets as have `each` items, in the mean.
int bits_for(std::size_t items, std::size_t each, int most) {
  return std::clamp(static_cast<int>(std::bit_width(items / each)), 1, most);
}

// Sorts items by dividing them once more, into buckets of one or a few.
class Sorter {
 public:
  std::vector<Ordered> items;  // given, and sorted by sort()

  void sort() {
    if (items.empty()) return;
    std::uint64_t least = items[0].bits;
    std::uint64_t greatest = items[0].bits;
    for (const Ordered& item : items) {
      least = std::min(least, item.bits);
      greatest = std::max(greatest, item.bits);
    }
    if (least == greatest) return;
    const Buckets buckets(least, greatest, bits_for(items.size(), 1, 20));
    ends_.assign(buckets.size() + 1, 0);
    for (const Ordered& item : items) ++ends_[buckets.of(item.bits) + 1];
    for (std::size_t b = 1; b < ends_.size(); ++b) ends_[b] += ends_[b - 1];
    sorted_.resize(items.size());
    for (const Ordered& item : items) sorted_[ends_[buckets.of(item.bits)]++] = item;
    for (std::size_t b = 0, begin = 0; b < buckets.size(); begin = ends_[b++]) {
      if (ends_[b] - begin < 2) continue;
      std::sort(&sorted_[begin], sorted_.data() + ends_[b],
                [](const Ordered& one, const Ordered& other) { return one.bits < other.bits; });
    }
    items.swap(sorted_);
  }

 private:
  std::vector<std::uint32_t> ends_;
  std::vector<Ordered> sorted_;
};

}  // namespace

void write(std::span<std::uint32_t> table, SampleIds ids, std::uint32_t value) {
  fill(table, ids, value);
}

void write(std::span<std::uint8_t> table, SampleIds ids, std::uint8_t value) {
  fill(table, ids, value);
}

std::size_t find_first(std::span<const std::uint32_t> table, std::uint32_t value,
                       std::span<const bool> wanted, SampleIds ids) {
  check(ids, std::min(table.size(), wanted.size()));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&table[ids[i + kAhead]]);
    if (table[ids[i]] == value && wanted[ids[i]]) return i;
  }
  return ids.size();
}

void look_up(std::span<const std::uint32_t> table, SampleIds ids, std::uint32_t* found) {
  check(ids, table.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&table[ids[i + kAhead]]);
    found[i] = table[ids[i]];
  }
}

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
  check_finite(ids, values);
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
    keys[i] = score_key(values.data(), seen.data(), ids[i]);
  }
}

double median(std::span<const double> values, std::span<const std::int32_t> seen) {
  // Some say between which bounds it should lie; only what does is sorted out.
  constexpr std::size_t kSome = 4096;
  std::vector<double> some;
  for (std::size_t i = 0; i < values.size(); i += values.size() / kSome + 1) {
    if (seen[i] > 0) some.push_back(values[i]);
  }
  std::sort(some.begin(), some.end());
  double least = -std::numeric_limits<double>::infinity(), most = -least;
  if (!some.empty()) {
    least = some[some.size() * 9 / 20];
    most = some[some.size() * 11 / 20];
  }
  const std::unique_ptr<double[]> middle(new double[values.size() + 1]);
  for (;;) {
    std::size_t count = 0, below = 0, within = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {  // without branches, none could be predicted
      const auto is_seen = static_cast<std::size_t>(seen[i] > 0);
      count += is_seen;
      below += is_seen & static_cast<std::size_t>(values[i] < least);
      middle[within] = values[i];
      within += is_seen & static_cast<std::size_t>(values[i] >= least) &
                static_cast<std::size_t>(values[i] <= most);
    }
    if (count == 0) return std::numeric_limits<double>::quiet_NaN();
    const std::size_t lower = (count - 1) / 2, upper = count / 2;
    if (below <= lower && upper < below + within) {
      const auto at = [&](std::size_t rank) {
        std::nth_element(&middle[0], &middle[rank - below], &middle[within]);
        return middle[rank - below];
      };
      const double found = at(lower);
      return (found + at(upper)) / 2;
    }
    least = -std::numeric_limits<double>::infinity();
    most = -least;
  }
}

std::size_t distinct(SampleIds ids, std::span<std::uint32_t> found) {
  constexpr unsigned kBits = 11;  // of an id, sorted by at once
  constexpr std::uint32_t kMask = (1u << kBits) - 1;
  const std::uint32_t most = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  std::vector<std::uint32_t> from(ids.begin(), ids.end());
  std::vector<std::uint32_t> to(ids.size());
  for (unsigned shift = 0; shift < static_cast<unsigned>(std::bit_width(most)); shift += kBits) {
    std::array<std::uint32_t, kMask + 2> ends{};
    for (const std::uint32_t id : from) ++ends[(id >> shift & kMask) + 1];
    for (std::size_t b = 1; b < ends.size(); ++b) ends[b] += ends[b - 1];
    for (const std::uint32_t id : from) to[ends[id >> shift & kMask]++] = id;
    from.swap(to);
  }
  return static_cast<std::size_t>(std::unique_copy(from.begin(), from.end(), found.begin()) -
                                  found.begin());
}

void count_below(std::span<const double> values, std::int64_t* below) {
  // A radix sort by bytes, from the lowest on, but for those that all have in common: of losses in
  // single precision three are.
  if (values.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw ConfigError(std::to_string(values.size()) + " values are too many: give less than 2^32");
  }
  constexpr std::size_t kBytes = sizeof(std::uint64_t);
  std::vector<std::array<std::uint32_t, 256>> counts(kBytes);
  std::vector<Ordered> items(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    items[i] = {ordered(values[i]), static_cast<std::uint32_t>(i)};
    for (std::size_t b = 0; b < kBytes; ++b) ++counts[b][(items[i].bits >> 8 * b) & 255];
  }
  std::vector<Ordered> sorted(values.size());
  for (std::size_t b = 0; b < kBytes && !items.empty(); ++b) {
    auto& ends = counts[b];
    if (ends[(items[0].bits >> 8 * b) & 255] == items.size()) continue;
    std::uint32_t end = 0;
    for (std::uint32_t& count : ends) end += std::exchange(count, end);
    for (const Ordered& item : items) sorted[ends[(item.bits >> 8 * b) & 255]++] = item;
    items.swap(sorted);
  }
  std::int64_t less = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && items[i].bits != items[i - 1].bits) less = static_cast<std::int64_t>(i);
    below[items[i].at] = less;
  }
}

void count_up_to(std::span<const double> values, std::span<std::uint32_t> order,
                 std::span<std::uint32_t> counts) {
  if (values.size() > std::numeric_limits<std::uint32_t>::max()) {
    throw ConfigError(std::to_string(values.size()) + " values are too many: give less than 2^32");
  }
  if (values.empty()) return;
  // First into parts, each of which the cache has room for while it is sorted.
  const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
  const Buckets buckets(ordered(*least), ordered(*greatest), bits_for(values.size(), 1024, 12));
  std::vector<std::uint32_t> ends(buckets.size() + 1);
  for (const double value : values) ++ends[buckets.of(ordered(value)) + 1];
  for (std::size_t b = 1; b < ends.size(); ++b) ends[b] += ends[b - 1];
  for (std::size_t i = 0; i < values.size(); ++i) {
    order[ends[buckets.of(ordered(values[i]))]++] = static_cast<std::uint32_t>(i);
  }
  Sorter part;
  for (std::size_t b = 0, begin = 0; b < buckets.size(); begin = ends[b++]) {
    part.items.clear();
    for (std::size_t i = begin; i < ends[b]; ++i) {
      if (i + kAhead < order.size()) __builtin_prefetch(&values[order[i + kAhead]]);
      part.items.push_back({ordered(values[order[i]]), order[i]});
    }
    part.sort();
    std::uint32_t end = ends[b];  // of those that equal the one at hand
    for (std::size_t i = part.items.size(); i-- > 0;) {
      if (i + 1 < part.items.size() && part.items[i].bits != part.items[i + 1].bits) {
        end = static_cast<std::uint32_t>(begin + i + 1);
      }
      if (!counts.empty()) counts[part.items[i].at] = end;
      order[begin + i] = part.items[i].at;
    }
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
