// Tables with a row for each sample, of which a batch reads or writes some.
//
// Samples come in random order, so each row is a cache miss: where processors do not look ahead far
// enough by themselves, the next ones are fetched meanwhile.
// Stateless; safe in any thread as far as the tables are. Ids are checked before anything is
// written (ConfigError).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace stoker {

using SampleIds = std::span<const std::uint32_t>;

// Adds one to the count of each id, as often as it comes.
void count(std::span<std::int32_t> counts, SampleIds ids);

// Counts of samples of each kind.
using Kinds = std::array<std::int64_t, 256>;

// Adds one to the count of each id's kind.
void count_kinds(std::span<const std::uint8_t> kinds, SampleIds ids, Kinds& counts);
// Writes one value for each id.
void write(std::span<std::uint32_t> table, SampleIds ids, std::uint32_t value);
void write(std::span<std::uint8_t> table, SampleIds ids, std::uint8_t value);

// Where in `ids` the first of those is for which the table has this value, and which is among the
// `wanted` (by id, as many as the table); ids.size() if there is none.
std::size_t find_first(std::span<const std::uint32_t> table, std::uint32_t value,
                       std::span<const bool> wanted, SampleIds ids);

// found[i]: what the table says of ids[i].
void look_up(std::span<const std::uint32_t> table, SampleIds ids, std::uint32_t* found);

// What training has learned of each sample; all of one length.
struct ScoreTable {
  std::span<double> values;
  std::span<std::int32_t> last;
  std::span<std::int32_t> seen;
};

// Writes a score for each id, observed at `steps`, one for each or one for all; of an id that comes
// twice the later one stays. All have to be finite, which is checked first, as ids are.
void write_scores(const ScoreTable& table, SampleIds ids, std::span<const double> values,
                  std::span<const std::int32_t> steps);

// The score of a sample; -infinity where `seen` is not above 0. Without a branch, as no processor
// could predict it.
inline double score_key(const double* values, const std::int32_t* seen, std::uint32_t id) {
  constexpr auto kNever = std::bit_cast<std::uint64_t>(-std::numeric_limits<double>::infinity());
  const std::uint64_t is_seen = 0 - static_cast<std::uint64_t>(seen[id] > 0);
  const auto score = std::bit_cast<std::uint64_t>(values[id]);
  return std::bit_cast<double>((score & is_seen) | (kNever & ~is_seen));
}

// keys[i]: the score of ids[i], likewise.
void score_keys(std::span<const double> values, std::span<const std::int32_t> seen, SampleIds ids,
                double* keys);

// The median of the values of rows whose `seen` is above 0; NaN if there are none.
double median(std::span<const double> values, std::span<const std::int32_t> seen);

struct Floor {
  double least;       // infinity where there are none
  std::size_t above;  // how many are larger
};

// The least of the `count` largest of the values that are chosen. ConfigError for more than these.
Floor least_of_largest(std::span<const double> values, std::span<const bool> chosen,
                       std::size_t count);

// Writes each of `ids` once, ascending, to `found`, which has room for all; returns how many these
// are. In linear time.
std::size_t distinct(SampleIds ids, std::span<std::uint32_t> found);

// below[i]: how many of `values`, none of which is NaN, are less than values[i].
void count_below(std::span<const double> values, std::int64_t* below);

// counts[i]: how many of `values`, none of which is NaN, are at most values[i]; and `order`, their
// indices from the least value on, of equal ones in any order. Both are as long as `values`, or
// `counts` is empty where it is not wanted. In linear time where few values have their leading bits
// in common; in two threads where there are many.
void count_up_to(std::span<const double> values, std::span<std::uint32_t> order,
                 std::span<std::uint32_t> counts);

// next[i]: the place from i + 1 on, in `own` and then `later`, at which own[i] comes again; behind
// both where it does not. Takes 4 bytes for each id up to the largest, and linear time.
void next_use(SampleIds own, SampleIds later, std::int64_t* next);

// first[id]: the first place of each id that comes in `ids`; the others stay as they were.
void first_use(SampleIds ids, std::span<std::int64_t> first);

}  // namespace stoker
