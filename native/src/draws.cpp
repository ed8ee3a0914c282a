#include "stoker/draws.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 64;  // swaps whose places are drawn, and fetched, at once
constexpr unsigned kPartBits = 12;  // log2 of the buckets that are sorted at once

// NumPy's random_interval, several in a row: from 0 to `most`, then to one less, and so on, each by
// drawing until that is met. Without branches on what is drawn, as none could be predicted.
void down_from(std::uint64_t most, std::span<std::size_t> found, const Bits& bits) {
  for (std::size_t i = 0; i < found.size();) {
    const std::uint64_t here = most - i;
    const bool is_short = here <= std::numeric_limits<std::uint32_t>::max();
    const std::uint64_t word = is_short ? bits.next32(bits.state) : bits.next64(bits.state);
    found[i] = word & (~std::uint64_t{0} >> std::countl_zero(here));
    i += static_cast<std::size_t>(found[i] <= here);
  }
}

constexpr double kMostByInversion = 30;  // successes expected
constexpr std::size_t kLogs = 256;       // computed at once

// NumPy's random_binomial_inversion: of `n` trials of probability `p`; log1p(-p) is given.
std::int64_t binomial(std::int64_t n, double p, double log, const Bits& bits) {
  const double q = 1.0 - p;
  const double none = std::exp(static_cast<double>(n) * log);
  const std::int64_t few = std::min<std::int64_t>(n, 10);  // not above the bound
  std::int64_t found = 0;
  double left = bits.next_double(bits.state);
  for (double here = none; left > here;) {
    ++found;
    if (found > few) {
      const double mean = static_cast<double>(n) * p;
      const double bound = mean + 10.0 * std::sqrt(mean * q + 1);
      if (found > static_cast<std::int64_t>(std::min(static_cast<double>(n), bound))) {
        found = 0;
        here = none;
        left = bits.next_double(bits.state);
        continue;
      }
    }
    left -= here;
    here = (static_cast<double>(n - found + 1) * p * here) / (static_cast<double>(found) * q);
  }
  return found;
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

// Visits by when they come, from 0 to 1. There are as many buckets as visits, most of which have
// none or a few.
class Visits {
 public:
  Visits(std::size_t all, std::span<double> keys, std::span<std::uint32_t> ids)
      : last_(all - 1), scale_(static_cast<double>(all)), keys_(keys), ids_(ids) {}

  std::size_t bucket_of(double key) const {
    return std::min(last_, static_cast<std::size_t>(std::clamp(key, 0.0, 1.0) * scale_));
  }

  // Sorts those from `begin` to `end`, all of the 2^kPartBits buckets from `first` on, stably.
  void sort(std::size_t begin, std::size_t end, std::size_t first) {
    ends_.assign((std::size_t{1} << kPartBits) + 1, 0);
    for (std::size_t i = begin; i < end; ++i) ++ends_[bucket_of(keys_[i]) - first + 1];
    for (std::size_t b = 1; b < ends_.size(); ++b) ends_[b] += ends_[b - 1];
    sorted_.resize(end - begin);
    for (std::size_t i = begin; i < end; ++i) {
      sorted_[ends_[bucket_of(keys_[i]) - first]++] = {keys_[i], ids_[i]};
    }
    for (std::size_t i = 1; i < sorted_.size(); ++i) {  // which moves within a bucket only
      const auto own = sorted_[i];
      std::size_t to = i;
      for (; to > 0 && sorted_[to - 1].first > own.first; --to) sorted_[to] = sorted_[to - 1];
      sorted_[to] = own;
    }
    for (std::size_t i = 0; i < sorted_.size(); ++i) ids_[begin + i] = sorted_[i].second;
  }

 private:
  std::size_t last_;
  double scale_;
  std::span<double> keys_;
  std::span<std::uint32_t> ids_;
  std::vector<std::uint32_t> ends_;
  std::vector<std::pair<double, std::uint32_t>> sorted_;
};

}  // namespace

template <typename Item>
void shuffle(std::span<Item> items, const Bits& bits, std::size_t since) {
  std::array<std::size_t, kAhead> others;
  since = std::max<std::size_t>(since, 1);  // the first has none to trade places with
  for (std::size_t left = items.size(); left > since;) {
    const std::size_t count = std::min(kAhead, left - since);
    down_from(left - 1, std::span(others).first(count), bits);
    for (std::size_t i = 0; i < count; ++i) __builtin_prefetch(&items[others[i]], 1);
    for (std::size_t i = 0; i < count; ++i) std::swap(items[--left], items[others[i]]);
  }
}

template void shuffle(std::span<std::uint8_t> items, const Bits& bits, std::size_t since);
template void shuffle(std::span<std::uint32_t> items, const Bits& bits, std::size_t since);
template void shuffle(std::span<std::uint64_t> items, const Bits& bits, std::size_t since);

bool multinomial(std::uint32_t size, std::span<const double> p, const Bits& bits,
                 std::span<std::uint32_t> counts) {
  if (counts.size() != p.size() || p.empty()) {
    throw ConfigError("room for " + std::to_string(counts.size()) + " counts of " +
                      std::to_string(p.size()) + " probabilities: give one for each, and one");
  }
  std::fill(counts.begin(), counts.end(), 0u);
  std::array<double, kLogs> rarer, logs;  // of success and failure, whichever is rarer
  std::int64_t left = size;
  double mass = 1.0;
  for (std::size_t at = 0; at + 1 < p.size() && left > 0; at += kLogs) {
    const std::size_t end = std::min(at + kLogs, p.size() - 1);
    std::array<double, kLogs> own;
    for (std::size_t i = at; i < end; mass -= p[i++]) own[i - at] = p[i] / mass;
    for (std::size_t i = 0; i < end - at; ++i) {
      rarer[i] = own[i] <= 0.5 ? own[i] : 1.0 - own[i];
      logs[i] = std::log1p(-rarer[i]);
    }
    for (std::size_t i = 0; i < end - at && left > 0; ++i) {
      if (own[i] == 0.0) continue;
      // Written so that a probability that is no number fails.
      if (!(rarer[i] * static_cast<double>(left) <= kMostByInversion)) return false;
      const std::int64_t drawn = binomial(left, rarer[i], logs[i], bits);
      const std::int64_t count = own[i] <= 0.5 ? drawn : left - drawn;
      counts[at + i] = static_cast<std::uint32_t>(count);
      left -= count;
    }
  }
  if (left > 0) counts.back() = static_cast<std::uint32_t>(left);
  return true;
}

void draw_along(std::span<const std::uint32_t> order, std::span<const double> parts, double start,
                std::span<std::uint32_t> drawn) {
  if (order.empty() || parts.size() != order.size()) {
    throw ConfigError(std::to_string(parts.size()) + " parts for " + std::to_string(order.size()) +
                      " samples: give one for each, and one at least");
  }
  double length = 0;
  for (const double part : parts) length += part;
  // Rounding must neither push the last point off the line nor lose it.
  const double scale = static_cast<double>(drawn.size()) / length;
  double end = 0;
  std::size_t k = 0;
  for (std::size_t i = 0; i < order.size() && k < drawn.size(); ++i) {
    end += parts[i];
    while (k < drawn.size() && static_cast<double>(k) + start < end * scale) drawn[k++] = order[i];
  }
  std::fill(drawn.begin() + static_cast<std::ptrdiff_t>(k), drawn.end(), order.back());
}

void draw_among(std::span<std::uint32_t> order, std::span<const double> shares, double start,
                std::size_t count) {
  if (count > order.size()) {
    throw ConfigError(std::to_string(count) + " of " + std::to_string(order.size()) +
                      " samples: give as many as there are, or fewer");
  }
  for (const std::uint32_t id : order) {
    if (id >= shares.size()) {
      throw ConfigError("id " + std::to_string(id) + " is out of range: give ids from 0 to " +
                        std::to_string(shares.size() - 1));
    }
  }
  const auto share_of = [&](std::size_t i) {
    if (i + kAhead < order.size()) __builtin_prefetch(&shares[order[i + kAhead]]);
    return shares[order[i]];
  };
  double length = 0;
  for (std::size_t i = 0; i < order.size(); ++i) length += share_of(i);
  // Rounding must neither push the last point off the line nor lose it.
  const double scale = static_cast<double>(count) / length;
  double end = 0;
  std::size_t k = 0;
  for (std::size_t i = 0; i < order.size() && k < count; ++i) {
    end += share_of(i);
    if (static_cast<double>(k) + start < end * scale) order[k++] = order[i];
  }
  // What the last point missed.
  while (k < count) order[k++] = order.back();
}

void repeat(std::span<const std::uint32_t> counts, std::span<std::uint32_t> ids) {
  std::uint64_t sum = 0;
  for (const std::uint32_t times : counts) sum += times;
  if (sum != ids.size()) {
    throw ConfigError("room for " + std::to_string(ids.size()) + " visits, of " +
                      std::to_string(sum) + ": give as much as there are");
  }
  // Most come a few times. So many are written in any case, and the next ones over them: no
  // processor could predict where to stop.
  constexpr std::uint32_t kFew = 4;
  std::size_t at = 0;
  for (std::uint32_t id = 0; id < counts.size(); ++id) {
    const std::uint32_t times = counts[id];
    if (times <= kFew && at + kFew <= ids.size()) {
      for (std::uint32_t turn = 0; turn < kFew; ++turn) ids[at + turn] = id;
    } else {
      for (std::uint32_t turn = 0; turn < times; ++turn) ids[at + turn] = id;
    }
    at += times;
  }
}

void spread(std::span<const std::uint32_t> counts, std::span<const double> phases,
            std::span<std::uint32_t> ids) {
  check_sums(counts, phases.size(), ids.size());
  if (ids.empty()) return;
  std::vector<double> keys(ids.size());
  Visits visits(ids.size(), keys, ids);
  // First into parts, each of which the cache has room for while it is sorted.
  std::vector<std::uint32_t> ends(((ids.size() - 1) >> kPartBits) + 2, 0);
  const auto each = [&](auto visit) {
    std::size_t drawn = 0;
    for (std::uint32_t id = 0; id < counts.size(); ++id) {
      if (counts[id] == 0) continue;
      const double phase = phases[drawn++];
      for (std::uint32_t turn = 0; turn < counts[id]; ++turn) {
        const double key = (static_cast<double>(turn) + phase) / static_cast<double>(counts[id]);
        visit(id, key, visits.bucket_of(key) >> kPartBits);
      }
    }
  };
  each([&](std::uint32_t, double, std::size_t part) { ++ends[part + 1]; });
  for (std::size_t part = 1; part < ends.size(); ++part) ends[part] += ends[part - 1];
  each([&](std::uint32_t id, double key, std::size_t part) {
    const std::uint32_t to = ends[part]++;
    keys[to] = key;
    ids[to] = id;
  });
  for (std::size_t part = 0, begin = 0; part + 1 < ends.size(); begin = ends[part++]) {
    visits.sort(begin, ends[part], part << kPartBits);
  }
}

}  // namespace stoker
