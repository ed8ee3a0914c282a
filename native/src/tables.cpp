#include "stoker/tables.h"

#include <algorithm>
#include <limits>
#include <string>
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

void check_sums(std::span<const std::uint32_t> counts, std::size_t phases, std::size_t visits) {
  std::size_t drawn = 0;
  std::uint64_t sum = 0;
  for (const std::uint32_t times : counts) {
    drawn += times != 0;
    sum += times;
  }
  if (drawn != phases || sum != visits) {
    throw ConfigError(std::to_string(phases) + " phases for " + std::to_string(drawn) +
                      " samples that are drawn " + std::to_string(sum) + " times, and not " +
                      std::to_string(visits) + ": give one for each");
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
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) {
      const std::uint32_t later = ids[i + kAhead];
      __builtin_prefetch(&table.values[later], 1);
      __builtin_prefetch(&table.last[later], 1);
      __builtin_prefetch(&table.seen[later], 1);
    }
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
    const bool is_seen = seen[ids[i]] > 0;
    keys[i] = is_seen ? values[ids[i]] : -std::numeric_limits<double>::infinity();
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

void spread(std::span<const std::uint32_t> counts, std::span<const double> phases,
            std::span<std::uint32_t> ids) {
  check_sums(counts, phases.size(), ids.size());
  const std::size_t size = ids.size();
  // One bucket a visit: most have none or a few, which are put in order by insertion.
  std::vector<std::uint32_t> ends(size + 1, 0);
  const auto each = [&](auto visit) {
    std::size_t drawn = 0;
    for (std::uint32_t id = 0; id < counts.size(); ++id) {
      if (counts[id] == 0) continue;
      const double phase = phases[drawn++];
      for (std::uint32_t turn = 0; turn < counts[id]; ++turn) {
        const double key = (static_cast<double>(turn) + phase) / static_cast<double>(counts[id]);
        const double bucket = std::clamp(key, 0.0, 1.0) * static_cast<double>(size);
        visit(id, key, std::min(size - 1, static_cast<std::size_t>(bucket)));
      }
    }
  };
  each([&](std::uint32_t, double, std::size_t bucket) { ++ends[bucket + 1]; });
  for (std::size_t b = 0; b < size; ++b) ends[b + 1] += ends[b];
  std::vector<double> keys(size);
  each([&](std::uint32_t id, double key, std::size_t bucket) {
    const std::uint32_t to = ends[bucket]++;
    keys[to] = key;
    ids[to] = id;
  });
  for (std::size_t b = 0, begin = 0; b < size; begin = ends[b++]) {
    for (std::size_t at = begin + 1; at < ends[b]; ++at) {
      const double key = keys[at];
      const std::uint32_t id = ids[at];
      std::size_t to = at;
      for (; to > begin && keys[to - 1] > key; --to) {
        keys[to] = keys[to - 1];
        ids[to] = ids[to - 1];
      }
      keys[to] = key;
      ids[to] = id;
    }
  }
}

}  // namespace stoker
