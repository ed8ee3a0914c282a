// Which region a sample lies in: looking it up, moving it between regions, redividing their
// budgets; and how much memory or disk they have together.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <new>

#include "stoker/arena.h"
#include "stoker/error.h"
#include "stoker/futex.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;            // entries looked up before they are needed
constexpr std::size_t kMoves = 64;            // under one lock, each of which may evict
constexpr std::uint32_t kAFew = 8192;         // listed under the lock
constexpr std::uint64_t kPiece = 4ull << 20;  // bytes given back or taken under one lock
constexpr int kTries = 64;                    // evictions for one sample's place
constexpr int kPieces = 16;                   // given back or taken at least, however late it is

}  // namespace

// --- looking ---

void Arena::where(Ids ids, std::uint8_t* regions) const {
  check(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint8_t tag = ranks_[ids[i]].region.load(std::memory_order_relaxed);
    const State state = state_of(entries_[ids[i]].word.load(std::memory_order_acquire));
    regions[i] = state == State::kReady && tag != 0 ? static_cast<std::uint8_t>(tag - 1) : kNowhere;
  }
}

void Arena::copies(Ids ids, std::uint32_t region, std::uint32_t* numbers) const {
  check(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) {
      __builtin_prefetch(&entries_[ids[i + kAhead]]);
      __builtin_prefetch(&ranks_[ids[i + kAhead]]);
    }
    const Entry& entry = entries_[ids[i]];
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    const std::uint8_t tag = ranks_[ids[i]].region.load(std::memory_order_acquire);
    // Read again: the region must be that of this copy, not of one that came after it.
    const bool same = entry.word.load(std::memory_order_relaxed) >> 16 == word >> 16;
    const bool inside = state_of(word) == State::kReady && tag == region + 1;
    numbers[i] = same && inside ? number_of(word) : 0;
  }
}

std::vector<std::uint32_t> Arena::list(std::uint32_t region) {
  if (header_->blank != 0) return list_by_line(region);
  const auto ready = [this](std::uint32_t id) {
    return state_of(entries_[id].word.load(std::memory_order_acquire)) == State::kReady;
  };
  std::vector<std::uint32_t> ids;
  ids.reserve(kAFew);
  if (const Guard guard(*this); guard && header_->regions[region].size <= kAFew) {
    Heap members = heap(region);
    for (std::uint32_t pos = 0; pos < members.length(); ++pos) {
      if (members.holds(pos) && ready(members.at(pos).id())) ids.push_back(members.at(pos).id());
    }
    std::sort(ids.begin(), ids.end());
    return ids;
  }
  // So many that the lock would be held for long; and then a look at all ids costs little more.
  // Which of them are there is as good as random: counting them takes less than guessing.
  std::array<std::uint32_t, kAFew> some;
  for (std::uint32_t id = 0; id < header_->num_ids;) {
    const std::uint32_t end = id + std::min(header_->num_ids - id, kAFew);
    std::size_t found = 0;
    for (; id < end; ++id) {
      some[found] = id;
      const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
      found += static_cast<std::size_t>((tag == region + 1) & ready(id));
    }
    ids.insert(ids.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(found));
  }
  return ids;
}

// Of a blank arena, where all members are there but those of a ghost: without a look at entries.
std::vector<std::uint32_t> Arena::list_by_line(std::uint32_t region) const {
  const Region& of = header_->regions[region];
  std::vector<std::uint32_t> ids(of.holds_bytes ? of.size : 0);
  if (ids.empty()) return ids;
  std::size_t found = 0;
  for (std::size_t word = 0; found < ids.size(); ++word) {
    for (std::uint64_t left = lines_[region].members[word]; left != 0; left &= left - 1) {
      ids[found++] = static_cast<std::uint32_t>(64 * word) +
                     static_cast<std::uint32_t>(std::countr_zero(left));
    }
  }
  return ids;
}

// --- moving ---

void Arena::move(std::uint32_t region, Ids ids, const double* keys, bool* moved) {
  check(ids);
  if (region >= header_->num_regions || !header_->regions[region].holds_bytes) {
    throw ConfigError("this region holds no samples");
  }
  for (std::size_t done = 0; done < ids.size();) {
    const std::size_t end = std::min(done + kMoves, ids.size());
    const Guard guard(*this);
    if (!guard) {
      slot_table_[slot()].bypassed.fetch_add(ids.size() - done, std::memory_order_relaxed);
      std::fill(moved + done, moved + ids.size(), false);
      return;
    }
    for (; done < end; ++done) {
      moved[done] = move_one(region, ids[done], keys == nullptr ? nullptr : keys + done);
    }
  }
}

bool Arena::move_one(std::uint32_t region, std::uint32_t id, const double* key) {
  Rank& rank = ranks_[id];
  const std::uint8_t tag = rank.region.load(std::memory_order_relaxed);
  const State state = state_of(entries_[id].word.load(std::memory_order_acquire));
  if (state != State::kReady || tag == 0) return false;
  const std::uint32_t source = tag - 1u;
  const std::uint32_t pos = heap(source).find(id);
  Region& from = header_->regions[source];
  Region& to = header_->regions[region];
  if (source == region) {
    if (key != nullptr && to.order == Order::kKey) set_key(region, id, *key);
    return true;
  }
  const std::uint32_t length = entries_[id].length.load(std::memory_order_relaxed);
  if (length > budget_of(to)) return false;
  const double was = rank.key.load(std::memory_order_relaxed);
  if (key == nullptr && from.order == Order::kKey && to.order == Order::kKey) key = &was;
  // Out of everything while room is made: what it takes already is not in its way.
  const std::uint32_t blocks = blocks_of(length);
  heap(source).remove(pos);
  from.bytes -= length;
  header_->payload -= length;
  header_->free_blocks += blocks;
  const bool fitting = make_room(region, length, key);
  header_->free_blocks -= blocks;
  header_->payload += length;
  if (fitting && enlist(region, id, first_key(to, key))) {
    rank.visits.store(0, std::memory_order_relaxed);
    to.bytes += length;
    return true;
  }
  from.bytes += length;
  take_in(source, id, was);
  return false;
}

// --- budgets ---

void Arena::divide(const std::vector<std::string>& names, const std::vector<double>& shares) {
  double whole = 0;
  for (const double share : shares) {
    if (!(share >= 0) || !std::isfinite(share)) {
      throw ConfigError("share " + std::to_string(share) + " is invalid: give 0 or more");
    }
    whole += share;
  }
  if (names.size() != shares.size() || !(whole > 0)) {
    throw ConfigError(std::to_string(shares.size()) + " shares for " +
                      std::to_string(names.size()) +
                      " regions: give one for each, not all of them 0");
  }
  std::vector<std::uint32_t> regions;
  for (const std::string& name : names) {
    const std::uint32_t r = region(name);
    if (!header_->regions[r].strict || !header_->regions[r].holds_bytes ||
        std::find(regions.begin(), regions.end(), r) != regions.end()) {
      throw ConfigError("region \"" + name +
                        "\" cannot take a share: give strict regions that hold samples, each once");
    }
    regions.push_back(r);
  }
  {
    const Guard guard(*this, Guard::Insist::kYes);
    std::uint64_t total = 0;
    for (const std::uint32_t r : regions) total += header_->regions[r].budget;
    std::uint64_t left = total;
    for (std::size_t i = 1; i < regions.size(); ++i) {
      const double part = std::floor(static_cast<double>(total) * (shares[i] / whole));
      const std::uint64_t budget = std::min(left, static_cast<std::uint64_t>(part));
      header_->regions[regions[i]].budget = budget;
      left -= budget;
    }
    header_->regions[regions[0]].budget = left;
  }
  for (const std::uint32_t r : regions) shed(r);
}

// Evicts what is over a region's budget, in short steps, so that no process waits long for the
// lock. The budgets hold already: what a stopped process keeps us from is done by make_room.
void Arena::shed(std::uint32_t region) {
  for (bool over = true; over;) {
    const Guard guard(*this);
    over = guard && shed_some(region);
  }
}

// One step, under the lock; whether there is more to do.
bool Arena::shed_some(std::uint32_t r) {
  const Region& region = header_->regions[r];
  bool more = true;
  for (int step = 0; step < 64 && more; ++step) {
    more = region.bytes > budget_of(region);
    if (more && !region.holds_bytes) forget(heap(r).at(0).id());
    if (more && region.holds_bytes) more = evict_one(r);
  }
  return more;
}

// --- room ---

// Its part of the limit.
std::uint64_t Arena::budget_of(const Region& region) const {
  if (header_->limit >= header_->capacity || !region.holds_bytes) return region.budget;
  const double share = static_cast<double>(header_->limit) / static_cast<double>(header_->capacity);
  return static_cast<std::uint64_t>(share * static_cast<double>(region.budget));
}

std::uint64_t Arena::limit(std::uint64_t bytes, std::int64_t deadline) {
  if (header_->blank != 0) throw ConfigError("a cache without bytes has none to give back");
  {
    const Guard guard(*this, Guard::Insist::kYes);
    header_->limit = std::min(bytes, header_->capacity);
    const std::uint32_t goal = blocks_within(*header_, header_->limit);
    if (goal < header_->usable_blocks) blocks_.bound(goal);
  }
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) shed(r);
  settle_room(deadline);
  return room();
}

std::uint64_t Arena::memory() {
  const Guard guard(*this);  // as in counters()
  return memory_of(*header_, header_->reserved_blocks);
}

std::uint64_t Arena::room() {
  const Guard guard(*this);
  return end_of(*header_, header_->reserved_blocks);
}

// Makes what is reserved as much as is usable, and that as much as the limit says.
void Arena::settle_room(std::int64_t deadline) {
  std::uint32_t usable = 0;
  {
    const Guard guard(*this, Guard::Insist::kYes);
    usable = header_->usable_blocks;
  }
  vacate(usable, deadline);
  bool more = true;
  for (int piece = 0; more && (piece < kPieces || monotonic_ns() < deadline); ++piece) {
    const Guard guard(*this);
    more = guard && (grow_some() || shrink_some());
  }
}

// Moves samples out of the blocks from `usable` on, which none may have any longer. A reader meets
// them as it meets those that are replaced; one that is being written stays for now.
void Arena::vacate(std::uint32_t usable, std::int64_t deadline) {
  if (usable == header_->num_blocks) return;
  for (std::uint32_t id = 0; id < header_->num_ids; ++id) {
    if (!is_behind(entries_[id], usable)) continue;
    if (!move_down(id, usable, monotonic_ns() < deadline)) return;
  }
}

// Takes no lock: an entry that changes meanwhile may seem to be either.
bool Arena::is_behind(const Entry& entry, std::uint32_t usable) const {
  if (state_of(entry.word.load(std::memory_order_acquire)) != State::kReady) return false;
  const auto part = [&](int i) { return entry.extents[i].load(std::memory_order_relaxed); };
  const auto lies_behind = [usable](Extent extent) {
    return extent.count != 0 && extent.first + extent.count > usable;
  };
  if ((part(1) & kSpilled) == 0) {
    return lies_behind({part(0), part(1)}) || lies_behind({part(2), part(3)});
  }
  std::vector<Extent> extents;
  Extent list{};
  // What a disk has spoilt is behind: it cannot be told, and is no loss.
  return !load_extents(entry, extents, &list) || lies_behind(list) ||
         std::any_of(extents.begin(), extents.end(), lies_behind);
}

// Copies a sample as any reader and writer does, the lock being held only in between. False if
// there is no memory for that, or no lock.
bool Arena::move_down(std::uint32_t id, std::uint32_t usable, bool may_keep) {
  Snapshot snapshot{};
  measure({&id, 1}, &snapshot);
  if (!is_behind(entries_[id], usable)) return true;
  std::unique_ptr<unsigned char[]> bytes(new (std::nothrow) unsigned char[snapshot.length]);
  if (bytes == nullptr) return false;
  const Read read = may_keep ? this->read(id, snapshot, bytes.get()) : Read::kAbsent;
  bool placed = false;
  {
    const Guard guard(*this);
    if (!guard) return false;
    if (entries_[id].word.load(std::memory_order_acquire) != snapshot.word) return true;
    // What a disk has spoilt must not get a new checksum.
    if (read == Read::kWhole) pend(slot(), 1);
    placed = read == Read::kWhole && reserve_again(id);
    if (!placed) {
      drop(id);
      ++header_->evictions;
    }
  }
  Slot& mine = slot_table_[slot()];
  if (read == Read::kDamaged || read == Read::kUnreadable) mine.corrupt.fetch_add(1);
  if (read == Read::kUnreadable) mine.io_errors.fetch_add(1);
  if (placed && write(id, {bytes.get(), snapshot.length})) {
    publish(id);
  } else if (placed) {
    mine.io_errors.fetch_add(1);
    undo(id);
  }
  if (read == Read::kWhole) pend(slot(), -1);
  return true;
}

// Has a sample that is there be written again, to usable blocks; under the lock. Who dies before it
// is leaves a sample less, and never one of wrong bytes. False if there is no place for it.
bool Arena::reserve_again(std::uint32_t id) {
  Entry& entry = entries_[id];
  set_word(entry, State::kReserved, slot());
  free_blocks(entry);
  const std::uint32_t blocks = blocks_of(entry.length.load(std::memory_order_relaxed));
  const std::uint32_t r = ranks_[id].region.load(std::memory_order_relaxed) - 1u;
  bool placed = allocate(entry, blocks);
  for (int tries = 0; !placed && tries < kTries && evict_one(r); ++tries) {
    placed = allocate(entry, blocks);
  }
  if (placed) return true;
  for (auto& part : entry.extents) part.store(0, std::memory_order_relaxed);
  return false;
}

// One step under the lock, as the next; false when there is nothing more to do, or no room.
bool Arena::grow_some() {
  const std::uint32_t goal = blocks_within(*header_, header_->limit);
  if (header_->usable_blocks >= goal) return false;
  const std::uint32_t end = piece_from(header_->usable_blocks, goal);
  const bool has_room = end <= header_->reserved_blocks && header_->on_disk == 0;
  if (!has_room && blocks_store_->take(header_->usable_blocks, end) != 0) return false;
  header_->reserved_blocks = std::max(header_->reserved_blocks, end);
  blocks_.bound(end);
  return true;
}

// Gives room behind the usable blocks back, from the end on, as far as nothing lies there. A reader
// that is late may bring a page of memory back, and who dies in the middle of either step leaves
// some that is not counted: all behind goes each time. Of memory, what counts as reserved always
// is; a disk may have less, which is an error at a write.
bool Arena::shrink_some() {
  const std::uint32_t end = header_->reserved_blocks;
  if (end <= header_->usable_blocks) return false;
  const std::uint32_t most = piece_from(0, header_->num_blocks);
  const std::uint32_t begin = std::max(header_->usable_blocks, end - std::min(end, most));
  if (blocks_.free(begin, end) != end - begin) return false;
  if (header_->on_disk == 0) header_->reserved_blocks = begin;
  const bool is_taken = blocks_store_->give_back(begin) == 0;
  header_->reserved_blocks = is_taken ? begin : end;
  return is_taken;
}

// The end of a piece that begins with a block.
std::uint32_t Arena::piece_from(std::uint32_t block, std::uint32_t most) const {
  const std::uint64_t blocks = std::max<std::uint64_t>(1, kPiece / header_->block_size);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(block + blocks, most));
}

}  // namespace stoker
