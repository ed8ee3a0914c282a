#include "stoker/tables.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stoker/error.h"
#include "stoker/work_pool.h"

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

constexpr std::size_t kForTwo = 1 << 18;  // values that are sorted by two threads

// Sorts items by dividing them once more, into buckets of one or a few.
class Sorter {
 public:
  std::vector<Ordered> items;  // given, and sorted by sort()

  // Takes the memory for so many items, so that nothing is thrown later on.
  void reserve(std::size_t most) {
    items.reserve(most);
    sorted_.reserve(most);
    ends_.reserve((std::size_t{1} << bits_for(most, 1, kMostBits)) + 1);
  }

  void sort() {
    if (items.empty()) return;
    std::uint64_t least = items[0].bits;
    std::uint64_t greatest = items[0].bits;
    for (const Ordered& item : items) {
      least = std::min(least, item.bits);
      greatest = std::max(greatest, item.bits);
    }
    if (least == greatest) return;
    const Buckets buckets(least, greatest, bits_for(items.size(), 1, kMostBits));
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
  static constexpr int kMostBits = 20;

  std::vector<std::uint32_t> ends_;
  std::vector<Ordered> sorted_;
};

// Sorts what `order` has from `begin` on by value, where all before are less; counts those up to
// each of them, unless there is no room for that.
void count_part(std::span<const double> values, std::span<std::uint32_t> order, std::size_t begin,
                std::span<std::uint32_t> counts, Sorter& part) {
  part.items.clear();
  for (std::size_t i = begin; i < order.size(); ++i) {
    if (i + kAhead < order.size()) __builtin_prefetch(&values[order[i + kAhead]]);
    part.items.push_back({ordered(values[order[i]]), order[i]});
  }
  part.sort();
  auto end = static_cast<std::uint32_t>(order.size());  // of those that equal the one at hand
  for (std::size_t i = part.items.size(); i-- > 0;) {
    if (i + 1 < part.items.size() && part.items[i].bits != part.items[i + 1].bits) {
      end = static_cast<std::uint32_t>(begin + i + 1);
    }
    if (!counts.empty()) counts[part.items[i].at] = end;
    order[begin + i] = part.items[i].at;
  }
}

// What lies in the middle of some values in their order, sorted out without sorting the others.
class Middle {
 public:
  // Of the values where `is_chosen(i)`, those from about the share `from` on to the share `to`; and
  // so many more that it has the two of them that `ranks` returns, told how many there are.
  template <typename IsChosen, typename Ranks>
  Middle(std::span<const double> values, const IsChosen& is_chosen, double from, double to,
         const Ranks& ranks)
      : values_(new double[values.size() + 1]) {
    double least = -std::numeric_limits<double>::infinity(), most = -least;
    bound(values, is_chosen, from, to, least, most);
    sort_out(values, is_chosen, least, most);
    if (count_ == 0) return;
    const auto [lower, upper] = ranks(count_);
    if (below_ <= lower && upper < below_ + within_) return;
    sort_out(values, is_chosen, -std::numeric_limits<double>::infinity(),
             std::numeric_limits<double>::infinity());
  }

  std::size_t count() const { return count_; }  // of all that are chosen

  double at(std::size_t rank) const {
    std::nth_element(&values_[0], &values_[rank - below_], &values_[within_]);
    return values_[rank - below_];
  }

  // How many are larger than one that it has.
  std::size_t above(double value) const {
    const auto is_above = [&](double other) { return other > value; };
    const auto within = std::count_if(&values_[0], &values_[within_], is_above);
    return count_ - below_ - within_ + static_cast<std::size_t>(within);
  }

 private:
  // Some say between which values the shares lie, about.
  template <typename IsChosen>
  static void bound(std::span<const double> values, const IsChosen& is_chosen, double from,
                    double to, double& least, double& most) {
    constexpr std::size_t kSome = 4096;
    std::vector<double> some;
    for (std::size_t i = 0; i < values.size(); i += values.size() / kSome + 1) {
      if (is_chosen(i)) some.push_back(values[i]);
    }
    std::sort(some.begin(), some.end());
    const auto at = [&](double share) {
      return some[static_cast<std::size_t>(share * static_cast<double>(some.size()))];
    };
    if (!some.empty() && from > 0) least = at(from);
    if (!some.empty() && to < 1) most = at(to);
  }

  template <typename IsChosen>
  void sort_out(std::span<const double> values, const IsChosen& is_chosen, double least,
                double most) {
    count_ = below_ = within_ = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {  // without branches, none could be predicted
      const auto is_one = static_cast<std::size_t>(is_chosen(i));
      count_ += is_one;
      below_ += is_one & static_cast<std::size_t>(values[i] < least);
      values_[within_] = values[i];
      within_ += is_one & static_cast<std::size_t>(values[i] >= least) &
                 static_cast<std::size_t>(values[i] <= most);
    }
  }

  std::unique_ptr<double[]> values_;
  std::size_t count_ = 0, below_ = 0, within_ = 0;
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

void count_kinds(std::span<const std::uint8_t> kinds, SampleIds ids, Kinds& counts) {
  check(ids, kinds.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&kinds[ids[i + kAhead]]);
    ++counts[kinds[ids[i]]];
  }
}

void write_scores(const ScoreTable& table, SampleIds ids, std::span<const double> values,
                  std::span<const std::int32_t> steps) {
  check(ids, table.values.size());
  check_finite(ids, values);
  const std::size_t each = steps.size() == 1 ? 0 : 1;
  // Processors look ahead far enough by themselves: to prefetch three tables takes longer.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    table.values[ids[i]] = values[i];
    table.last[ids[i]] = steps[each * i];
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
  const auto is_seen = [&](std::size_t i) { return seen[i] > 0; };
  const auto ranks = [](std::size_t count) { return std::pair((count - 1) / 2, count / 2); };
  const Middle middle(values, is_seen, 0.45, 0.55, ranks);
  if (middle.count() == 0) return std::numeric_limits<double>::quiet_NaN();
  const auto [lower, upper] = ranks(middle.count());
  const double found = middle.at(lower);
  return (found + middle.at(upper)) / 2;
}

Floor least_of_largest(std::span<const double> values, std::span<const bool> chosen,
                       std::size_t count) {
  const auto number = static_cast<std::size_t>(std::count(chosen.begin(), chosen.end(), true));
  if (count > number) {
    throw ConfigError("the largest " + std::to_string(count) + " of " + std::to_string(number) +
                      " values: give as many as there are, or fewer");
  }
  if (count == 0) return {std::numeric_limits<double>::infinity(), 0};
  constexpr double kAround = 0.05;  // of the values: more than what is looked at errs by
  const double share = 1 - static_cast<double>(count) / static_cast<double>(number);
  const std::size_t rank = number - count;
  const Middle middle(
      values, [&](std::size_t i) { return chosen[i]; }, share - kAround, share + kAround,
      [&](std::size_t) { return std::pair(rank, rank); });
  const double least = middle.at(rank);
  return {least, middle.above(least)};
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
  WorkPool pool(values.size() < kForTwo ? 0 : 1);
  const std::size_t lanes = pool.threads() + 1;
  const auto begin_of = [&](std::size_t lane) { return values.size() * lane / lanes; };
  // First into parts, each of which the cache has room for while it is sorted.
  const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
  const Buckets buckets(ordered(*least), ordered(*greatest), bits_for(values.size(), 1024, 12));
  std::vector<std::vector<std::uint32_t>> ends(lanes, std::vector<std::uint32_t>(buckets.size()));
  pool.run(lanes, [&](std::size_t lane) {
    for (std::size_t i = begin_of(lane); i < begin_of(lane + 1); ++i) {
      ++ends[lane][buckets.of(ordered(values[i]))];
    }
  });
  std::uint32_t end = 0, most = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const std::uint32_t begin = end;
    for (auto& own : ends) end += std::exchange(own[b], end);
    most = std::max(most, end - begin);
  }
  pool.run(lanes, [&](std::size_t lane) {
    for (std::size_t i = begin_of(lane); i < begin_of(lane + 1); ++i) {
      order[ends[lane][buckets.of(ordered(values[i]))]++] = static_cast<std::uint32_t>(i);
    }
  });
  std::vector<Sorter> sorters(lanes);
  for (Sorter& sorter : sorters) sorter.reserve(most);
  std::atomic<std::size_t> next = 0;
  pool.run(lanes, [&](std::size_t lane) {
    for (std::size_t b; (b = next.fetch_add(1)) < buckets.size();) {
      const std::size_t begin = b == 0 ? 0 : ends.back()[b - 1];
      count_part(values, order.first(ends.back()[b]), begin, counts, sorters[lane]);
    }
  });
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
