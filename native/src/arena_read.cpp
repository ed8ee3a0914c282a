// The arena's lock-free side: look, copy out, check the version, touch.
#include <algorithm>
#include <limits>
#include <string>

#include "stoker/arena.h"
#include "stoker/crc32c.h"
#include "stoker/error.h"
#include "stoker/keys.h"
#include "stoker/marks.h"
#include "stoker/racy_copy.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;     // entries looked up before they are needed
constexpr std::size_t kDataAhead = 4;  // samples

}  // namespace

std::uint64_t Arena::measure(Ids ids, Snapshot* snapshots) const {
  check(ids);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&entries_[ids[i + kAhead]]);
    const Entry& entry = entries_[ids[i]];
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    const bool ready = state_of(word) == State::kReady;
    const bool stored = ready && header_->blank == 0;
    const std::uint32_t length = stored ? entry.length.load(std::memory_order_relaxed) : 0;
    snapshots[i] = {ready ? word : 0, length};
    total += length;
  }
  return total;
}

std::uint64_t Arena::get(Ids ids, const Snapshot* snapshots, unsigned char* out,
                         std::int64_t* offsets, bool* found) {
  Slot& mine = slot_table_[slot()];
  const std::uint64_t now = advance(ids.size()) + 1;
  std::uint64_t at = 0;
  std::uint64_t hits = 0;
  offsets[0] = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kDataAhead < ids.size()) {
      expect(snapshots[i + kDataAhead], ids[i + kDataAhead]);
      __builtin_prefetch(&ranks_[ids[i + kDataAhead]], 1);
    }
    const Read read = this->read(ids[i], snapshots[i], out + at);
    found[i] = read == Read::kWhole;
    if (read == Read::kWhole) {
      ++hits;
      at += snapshots[i].length;
      touch(ids[i], now + i);
    } else if (read == Read::kTorn) {
      mine.torn.fetch_add(1, std::memory_order_relaxed);
    } else if (read != Read::kAbsent) {
      mine.corrupt.fetch_add(1, std::memory_order_relaxed);
      if (read == Read::kUnreadable) mine.io_errors.fetch_add(1, std::memory_order_relaxed);
      discard({&ids[i], 1});
    }
    offsets[i + 1] = static_cast<std::int64_t>(at);
  }
  mine.hits.fetch_add(hits, std::memory_order_relaxed);
  mine.misses.fetch_add(ids.size() - hits, std::memory_order_relaxed);
  return at;
}

std::uint64_t Arena::peek(Ids ids, const Snapshot* snapshots, unsigned char* out,
                          std::int64_t* offsets, bool* found) const {
  std::uint64_t at = 0;
  offsets[0] = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kDataAhead < ids.size()) expect(snapshots[i + kDataAhead], ids[i + kDataAhead]);
    found[i] = read(ids[i], snapshots[i], out + at) == Read::kWhole;
    if (found[i]) at += snapshots[i].length;
    offsets[i + 1] = static_cast<std::int64_t>(at);
  }
  return at;
}

// Copies one sample out, as it was when its snapshot was taken.
Arena::Read Arena::read(std::uint32_t id, Snapshot snapshot, unsigned char* out) const {
  if (snapshot.word == 0) return Read::kAbsent;
  const Entry& entry = entries_[id];
  const std::uint32_t crc = entry.crc.load(std::memory_order_relaxed);
  const bool copied = copy_out(entry, snapshot.length, out);
  read_fence();
  if (entry.word.load(std::memory_order_relaxed) != snapshot.word) return Read::kTorn;
  if (!copied) return Read::kUnreadable;
  const bool whole = !blocks_store_->checksummed() || crc32c(0, out, snapshot.length) == crc;
  return whole ? Read::kWhole : Read::kDamaged;
}

// Has the first bytes of a sample, which is read soon, brought near.
void Arena::expect(Snapshot snapshot, std::uint32_t id) const {
  if (snapshot.length == 0) return;
  const Extent extent{entries_[id].extents[0].load(std::memory_order_relaxed), 0};
  if (extent.first < header_->num_blocks) blocks_store_->prefetch(extent);
}

// False when what the entry says is impossible: it changed in the meantime, or a disk failed.
bool Arena::copy_out(const Entry& entry, std::uint32_t length, unsigned char* out) const {
  if (header_->blank) return true;
  std::uint64_t left = length;
  const auto copy = [&](Extent extent) {
    const std::uint64_t bytes =
        std::min<std::uint64_t>(left, std::uint64_t{extent.count} * header_->block_size);
    if (extent.first > header_->num_blocks || extent.count > header_->num_blocks - extent.first ||
        !blocks_store_->read(extent, out, bytes)) {
      return false;
    }
    out += bytes;
    left -= bytes;
    return true;
  };
  const auto part = [&](int i) { return entry.extents[i].load(std::memory_order_relaxed); };
  if ((part(1) & kSpilled) == 0) {
    const Extent first{part(0), part(1)};
    const Extent second{part(2), part(3)};
    return copy(first) && (left == 0 || copy(second)) && left == 0;
  }
  std::vector<Extent> extents;
  Extent list{};
  if (!load_extents(entry, extents, &list)) return false;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (i + 1 < extents.size() && extents[i + 1].first < header_->num_blocks) {
      blocks_store_->prefetch(extents[i + 1]);
    }
    if (!copy(extents[i])) return false;
  }
  return left == 0;
}

// All extents of an entry, and the blocks that list them (count 0 when they are inline).
bool Arena::load_extents(const Entry& entry, std::vector<Extent>& extents, Extent* list) const {
  extents.clear();
  *list = {0, 0};
  if (header_->blank) return true;
  const auto inside = [this](Extent extent) {
    return extent.first <= header_->num_blocks &&
           extent.count <= header_->num_blocks - extent.first;
  };
  std::uint32_t parts[4];
  for (int i = 0; i < 4; ++i) parts[i] = entry.extents[i].load(std::memory_order_relaxed);
  if ((parts[1] & kSpilled) == 0) {
    for (int i = 0; i < 4; i += 2) {
      if (parts[i + 1] != 0) extents.push_back({parts[i], parts[i + 1]});
    }
    return std::all_of(extents.begin(), extents.end(), inside);
  }
  const std::uint32_t count = parts[1] & ~kSpilled;
  if (count == 0 || count > kMostExtents) return false;
  *list = {parts[0], blocks_of(count * sizeof(Extent))};
  if (!inside(*list)) {
    *list = {0, 0};
    return false;
  }
  extents.resize(count);
  return blocks_store_->read(*list, extents.data(), count * sizeof(Extent)) &&
         crc32c(0, extents.data(), count * sizeof(Extent)) == parts[2] &&
         std::all_of(extents.begin(), extents.end(), inside);
}

// Readers only store keys that grow; eviction looks at them lazily.
void Arena::touch(std::uint32_t id, std::uint64_t now) {
  Rank& rank = ranks_[id];
  const std::uint8_t tag = rank.region.load(std::memory_order_relaxed);
  if (tag == 0 || tag > kMaxRegions) return;
  const Region& region = header_->regions[tag - 1];
  if (region.order == Order::kRecency) {
    rank.key.store(static_cast<double>(now), std::memory_order_relaxed);
    if (header_->blank != 0) heap(tag - 1u).touched(id, static_cast<double>(now));
  } else if (region.order == Order::kFrequency) {
    const std::uint64_t count = count_of(rank.key.load(std::memory_order_relaxed));
    rank.key.store(pair_key(count + 1, now), std::memory_order_relaxed);
  } else if (region.pop >= Pop::kSieve) {
    const std::uint8_t most = region.pop == Pop::kSieve ? 1 : 3;
    const std::uint8_t visits = rank.visits.load(std::memory_order_relaxed);
    if (visits < most) rank.visits.store(visits + 1, std::memory_order_relaxed);
  }
}

void Arena::contains(Ids ids, bool* found) const {
  check(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(&entries_[ids[i + kAhead]]);
    found[i] = state_of(entries_[ids[i]].word.load(std::memory_order_acquire)) == State::kReady;
  }
}

std::size_t Arena::find_lacking(Ids ids, std::span<const std::uint32_t> marks, std::uint32_t stamp,
                                std::int64_t* places) const {
  check(ids);
  if (marks.size() < header_->num_ids) {
    throw ConfigError(std::to_string(marks.size()) + " marks for " +
                      std::to_string(header_->num_ids) + " ids: give one for each");
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) {
      __builtin_prefetch(&entries_[ids[i + kAhead]]);
      __builtin_prefetch(&marks[ids[i + kAhead]]);
    }
    const State state = state_of(entries_[ids[i]].word.load(std::memory_order_acquire));
    places[count] = static_cast<std::int64_t>(i);  // without a branch, which none could predict
    count += static_cast<std::size_t>((state != State::kReady) & !is_marked(marks, ids[i], stamp));
  }
  return count;
}

void Arena::keys(Ids ids, double* keys) const {
  check(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint8_t tag = ranks_[ids[i]].region.load(std::memory_order_relaxed);
    const double key = ranks_[ids[i]].key.load(std::memory_order_relaxed);
    const State state = state_of(entries_[ids[i]].word.load(std::memory_order_acquire));
    if (state != State::kReady || tag == 0) {
      keys[i] = std::numeric_limits<double>::quiet_NaN();
    } else if (header_->regions[tag - 1].order == Order::kFrequency) {
      keys[i] = static_cast<double>(count_of(key));
    } else if (header_->regions[tag - 1].pop == Pop::kSieve) {
      keys[i] = static_cast<double>(clock_of(key));
    } else {
      keys[i] = key;
    }
  }
}

}  // namespace stoker
