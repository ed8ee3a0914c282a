// Tables with a row for each sample, of which a batch reads or writes some.
//
// Samples come in random order, so each row is a cache miss: the next ones are fetched meanwhile.
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

// next[i]: the place from i + 1 on, in `own` and then `later`, at which own[i] comes again; behind
// both where it does not. Takes 4 bytes for each id up to the largest, and linear time.
void next_use(SampleIds own, SampleIds later, std::int64_t* next);

// Fills in each id as often as counts[id] says, its visits at equal distances: the j-th of n, from
// 0 on, lies at (j + phase) / n of the whole, with one phase, from 0 to below 1, for each id that
// comes at all. Equal ones stay in the order of ids. In linear time where phases are even.
void spread(std::span<const std::uint32_t> counts, std::span<const double> phases,
            std::span<std::uint32_t> ids);

}  // namespace stoker
