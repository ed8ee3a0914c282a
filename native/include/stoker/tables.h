// Tables with a row for each sample, of which a batch reads or writes some.
//
// Samples come in random order, so each row is a cache miss: where processors do not look ahead far
// enough by themselves, the next ones are fetched meanwhile.
// Stateless; safe in any thread as far as the tables are. Ids are checked before anything is
// written (ConfigError).
#pragma once

#include <cstdint>
#include <span>

namespace stoker {

using SampleIds = std::span<const std::uint32_t>;

// Adds one to the count of each id, as often as it comes.
void count(std::span<std::int32_t> counts, SampleIds ids);

// What training has learned of each sample; all of one length.
struct ScoreTable {
  std::span<double> values;
  std::span<std::int32_t> last;
  std::span<std::int32_t> seen;
};

// Writes a score for each id, observed at `step`; of an id that comes twice the later one stays.
void write_scores(const ScoreTable& table, SampleIds ids, std::span<const double> values,
                  std::int32_t step);

// keys[i]: the score of ids[i], -infinity where `seen` is not above 0.
void score_keys(std::span<const double> values, std::span<const std::int32_t> seen, SampleIds ids,
                double* keys);

// below[i]: how many of `values`, none of which is NaN, are less than values[i].
void count_below(std::span<const double> values, std::int64_t* below);

// counts[i]: how many of `values`, none of which is NaN, are at most values[i]; and `order`, their
// indices from the least value on, of equal ones in any order. Both are as long as `values`, or
// `counts` is empty where it is not wanted. In linear time where few values have their leading bits
// in common.
void count_up_to(std::span<const double> values, std::span<std::uint32_t> order,
                 std::span<std::uint32_t> counts);

// next[i]: the place from i + 1 on, in `own` and then `later`, at which own[i] comes again; behind
// both where it does not. Takes 4 bytes for each id up to the largest, and linear time.
void next_use(SampleIds own, SampleIds later, std::int64_t* next);

// first[id]: the first place of each id that comes in `ids`; the others stay as they were.
void first_use(SampleIds ids, std::span<std::int64_t> first);

}  // namespace stoker
