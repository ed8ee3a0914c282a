// Rebuilds derived state from the entries: after a crash, from a file, and to verify.
#include <algorithm>
#include <climits>
#include <limits>

#include "stoker/arena.h"
#include "stoker/crc32c.h"
#include "stoker/error.h"
#include "stoker/futex.h"

namespace stoker {
namespace {

constexpr std::int64_t kReclaimEvery = 1'000'000'000;
constexpr std::int64_t kMoving = 2'000'000'000;  // ns in which samples move as a file is opened

}  // namespace

// --- after a crash ---

// Puts a slot in order whose last owner died; its new owner has not used it yet.
void Arena::adopt(std::uint32_t slot) {
  auto result = SlotLock::Result::kTakenFromDead;
  if (!lock_.inherit(slot)) result = lock_.acquire(slot, Guard::kWait);
  if (result == SlotLock::Result::kTimedOut) {
    throw SegmentError("no owner slot is free and the lock is held by a stopped process");
  }
  const struct Release {
    SlotLock& lock;
    ~Release() { lock.release(); }
  } release{lock_};
  if (result == SlotLock::Result::kTakenFromDead) header_->unsound = 1;
  if (header_->unsound != 0) repair();
  std::bitset<kMaxSlots> dead;
  dead[slot] = true;
  reclaim_slots(dead);
  slot_table_[slot].in_use.store(1);
}

// Empties all that is derived.
void Arena::reset_derived() {
  blocks_.clear();
  header_->payload = 0;
  header_->free_chunks = header_->num_chunks;
  for (std::uint32_t i = 0; i < header_->num_chunks; ++i) chunks_[i] = i;
  const std::uint64_t nodes = std::uint64_t{header_->num_chunks} * kChunkNodes;
  for (std::uint64_t i = 0; header_->repairs > 0 && i < nodes; ++i) nodes_[i].seat = 0;
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    header_->regions[r].size = 0;
    header_->regions[r].bytes = 0;
  }
}

// The lock's owner died somewhere inside: rebuild from entries and ranks.
void Arena::repair() {
  ++header_->repairs;
  reset_derived();
  for (std::uint32_t id = 0; id < header_->num_ids; ++id) readmit(id);
  rebuild_leases();
  header_->unsound = 0;
}

// At the start of every hold of the lock.
void Arena::put_in_order() {
  if (header_->unsound != 0) {
    repair();
    reclaim_dead();
  }
  if (any_undone_.load()) finish_undo();
  if (monotonic_ns() - header_->reclaimed_at.load() > kReclaimEvery) reclaim_dead();
}

void Arena::readmit(std::uint32_t id) {
  Entry& entry = entries_[id];
  Rank& rank = ranks_[id];
  const State state = state_of(entry.word.load(std::memory_order_acquire));
  const std::uint32_t length = entry.length.load(std::memory_order_relaxed);
  std::uint32_t tag = rank.region.load(std::memory_order_relaxed);
  const bool held = state == State::kReady || state == State::kReserved;
  if (tag > header_->num_regions || (tag != 0 && header_->regions[tag - 1].holds_bytes != held)) {
    tag = 0;
  }
  if (held && tag == 0) tag = first_holder() + 1;  // the crash came between two stores
  rank.region.store(0, std::memory_order_relaxed);
  if (tag == 0) return;
  if (held) {
    Extent list{};
    const bool sound = load_extents(entry, extents_, &list);
    if (list.count != 0) extents_.push_back(list);
    if (!sound || !mark_all(extents_)) {
      set_word(entry, State::kEmpty, 0);
      return;
    }
    header_->payload += length;
  }
  header_->regions[tag - 1].bytes += length;
  take_in(tag - 1, id, rank.key.load(std::memory_order_relaxed));
}

// The first region that holds samples; a crash in the middle of a change may have left none.
std::uint32_t Arena::first_holder() const {
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (header_->regions[r].holds_bytes) return r;
  }
  return 0;
}

// All of the extents or none.
bool Arena::mark_all(const std::vector<Extent>& extents) {
  std::size_t marked = 0;
  while (marked < extents.size() && blocks_.mark(extents[marked])) ++marked;
  if (marked == extents.size()) return true;
  while (marked > 0) blocks_.release(extents[--marked]);
  return false;
}

// Takes back what the owners of these slots held.
void Arena::reclaim_slots(const std::bitset<kMaxSlots>& dead) {
  bool pending = false;
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    pending = pending || (dead[s] && slot_table_[s].pending.load() != 0);
  }
  for (std::uint32_t id = 0; pending && id < header_->num_ids; ++id) {
    Entry& entry = entries_[id];
    std::uint64_t word = entry.word.load(std::memory_order_acquire);
    const State state = state_of(word);
    if (state == State::kEmpty || state == State::kReady || !dead[owner_of(word)]) continue;
    ++header_->reclaimed;
    if (state == State::kReserved) {
      drop(id);
    } else if (entry.word.compare_exchange_strong(word, next_word(word, State::kEmpty, 0)) &&
               (word & kWaiters)) {
      // Another process may have taken the orphan over just now; then it is not ours to empty.
      futex_wake(reinterpret_cast<const std::atomic<std::uint32_t>*>(&entry.word), INT_MAX);
    }
  }
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    if (!dead[s]) continue;
    drop_leases(s);
    slot_table_[s].pending.store(0);
    slot_table_[s].in_use.store(0);
  }
}

void Arena::reclaim_dead() {
  header_->reclaimed_at.store(monotonic_ns());
  std::bitset<kMaxSlots> dead;
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    dead[s] = slot_table_[s].in_use.load() != 0 && slots_.seize(s);
  }
  if (dead.none()) return;
  reclaim_slots(dead);
  slots_.let_go();
}

void Arena::reclaim() {
  const Guard guard(*this);
  if (guard) reclaim_dead();
}

// --- leases ---

void Arena::drop_leases(std::uint32_t slot) {
  Slot& owner = slot_table_[slot];
  while (owner.lease_head != 0) drop_lease(owner, INT64_MAX);
  owner.lease_tail = 0;
}

// The lists of the slots are the truth; a crash may have left one broken, then its tail is lost.
void Arena::rebuild_leases() {
  for (std::uint32_t id = 0; header_->repairs > 0 && id < header_->num_ids; ++id) {
    ranks_[id].leases.store(0, std::memory_order_relaxed);
  }
  std::vector<bool> listed(header_->num_leases + 1, false);
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    std::uint32_t* link = &slot_table_[s].lease_head;
    std::uint32_t last = 0;
    while (*link != 0) {
      if (*link > header_->num_leases || listed[*link] ||
          leases_[*link - 1].id >= header_->num_ids) {
        *link = 0;
        break;
      }
      listed[*link] = true;
      last = *link;
      ranks_[leases_[last - 1].id].leases.fetch_add(1, std::memory_order_relaxed);
      link = &leases_[last - 1].next;
    }
    slot_table_[s].lease_tail = last;
  }
  header_->free_lease = 0;
  for (std::uint32_t i = header_->num_leases; i > 0; --i) {
    if (listed[i]) continue;
    leases_[i - 1].next = header_->free_lease;
    header_->free_lease = i;
  }
}

// --- from a file ---

// Reads every record; where two claim a block, the younger one is right. Room behind the usable
// blocks is given back, since the file may have had more.
void Arena::recover_file(const std::vector<Hole>& holes) {
  take_room();
  constexpr std::uint32_t kPage = 4096;
  std::vector<Record> page(kPage);
  std::vector<Record> sound;
  std::uint32_t count = 0;
  for (std::uint32_t first = 0; first < header_->num_ids; first += count) {
    count = std::min(kPage, header_->num_ids - first);
    if (!blocks_store_->get_records(first, {page.data(), count})) continue;
    for (std::uint32_t i = 0; i < count; ++i) {
      const Record& record = page[i];
      if (record.generation != 0 && record.id == first + i &&
          record.self_crc == BlockStore::self_crc(record)) {
        sound.push_back(record);
      }
    }
  }
  std::sort(sound.begin(), sound.end(),
            [](const Record& a, const Record& b) { return a.generation > b.generation; });
  if (!sound.empty()) header_->clock.store(sound.front().generation);
  for (const Record& record : sound) recover(record, holes);
  give_back_behind();
}

// Has the file take the room that it lacks, as far as there is some.
void Arena::take_room() {
  constexpr std::uint32_t kLeast = 64;  // blocks, which are whole pages
  const std::uint32_t goal = header_->usable_blocks;
  std::uint32_t end = 0;
  std::uint32_t step = goal;
  int code = 0;
  while (end < goal && step >= kLeast) {
    const std::uint32_t next = std::min(end + step, goal);
    const int failed = blocks_store_->take(end, next);
    if (failed == 0) {
      end = next;
    } else {
      step = step / 2 / kLeast * kLeast;
      code = failed;
    }
  }
  if (end == 0) throw CapacityError(describe_errno("reserve disk for what the file holds", code));
  if (end < goal) blocks_.bound(end);
  // There may be more behind, from when it was allowed more.
  header_->reserved_blocks = end < goal ? end : header_->num_blocks;
}

// What lies behind the usable blocks moves, as far as there is time, or is lost. The rest goes at
// once, as no other process is here yet: in pieces, a large file would take its time at each start.
void Arena::give_back_behind() {
  const std::uint32_t usable = header_->usable_blocks;
  if (usable == header_->reserved_blocks) return;
  vacate(usable, monotonic_ns() + kMoving);
  const Guard guard(*this, Guard::Insist::kYes);
  const std::uint32_t behind = header_->reserved_blocks - usable;
  if (blocks_.free(usable, header_->reserved_blocks) == behind &&
      blocks_store_->give_back(usable) == 0) {
    header_->reserved_blocks = usable;
  }
}

namespace {

// Whether some of the bytes lie where a file has none: there it was given back.
bool touches(const std::vector<Hole>& holes, std::uint64_t begin, std::uint64_t bytes) {
  const auto next = std::upper_bound(holes.begin(), holes.end(), begin,
                                     [](std::uint64_t at, const Hole& h) { return at < h.end; });
  return bytes > 0 && next != holes.end() && next->begin < begin + bytes;
}

}  // namespace

bool Arena::recover(const Record& record, const std::vector<Hole>& holes) {
  Region& main = header_->regions[0];
  if (main.bytes + record.length > budget_of(main)) return false;
  Entry& entry = entries_[record.id];
  for (int i = 0; i < 4; ++i) entry.extents[i].store(record.extents[i]);
  Extent list{};
  if (!load_extents(entry, extents_, &list)) return false;
  std::uint64_t blocks = 0;
  for (const Extent extent : extents_) {
    const std::uint64_t begin = std::uint64_t{extent.first} * header_->block_size;
    const std::uint64_t before =
        std::min<std::uint64_t>(record.length, blocks * header_->block_size);
    const std::uint64_t bytes = std::min<std::uint64_t>(
        record.length - before, std::uint64_t{extent.count} * header_->block_size);
    if (touches(holes, begin, bytes)) return false;
    blocks += extent.count;
  }
  if (list.count != 0) extents_.push_back(list);
  if (blocks != blocks_of(record.length) || !mark_all(extents_)) return false;
  entry.length.store(record.length);
  entry.crc.store(record.crc);
  set_word(entry, State::kReady, 0);
  main.bytes += record.length;
  header_->payload += record.length;
  const auto age = static_cast<double>(record.generation);
  ranks_[record.id].key.store(age);
  return take_in(0, record.id, age);
}

// Under the lock, with regions that are new: the keys so far are generations, which is what the
// clock said when each sample was written.
void Arena::settle_recovered(const std::vector<Node>& recovered) {
  const std::uint32_t r = first_holder();
  Region& first = header_->regions[r];
  for (const Node& node : recovered) {
    const double key = first_key(first, nullptr, node.key);
    ranks_[node.id()].key.store(key, std::memory_order_relaxed);
    first.bytes += entries_[node.id()].length.load(std::memory_order_relaxed);
    take_in(r, node.id(), key);
  }
  while (!fits(first, 0) && evict_one(r)) {
  }
}

// --- verify ---

namespace {

[[noreturn]] void broken(const std::string& what) {
  throw SegmentError("the segment breaks an invariant: " + what);
}

}  // namespace

void Arena::verify() {
  const Guard guard(*this, Guard::Insist::kYes);
  std::vector<std::uint64_t> bytes(kMaxRegions, 0);
  std::vector<std::uint32_t> members(kMaxRegions, 0);
  std::vector<bool> used(header_->num_blocks, false);
  std::uint64_t payload = 0;
  std::uint32_t taken = 0;
  const auto take = [&](Extent extent, const std::string& who) {
    for (std::uint32_t i = 0; i < extent.count; ++i) {
      const std::uint64_t block = std::uint64_t{extent.first} + i;
      if (block >= header_->num_blocks) broken(who + " reaches beyond the last block");
      if (used[block]) broken(who + " shares block " + std::to_string(block));
      if (!blocks_.used(extent.first + i)) broken(who + " lies in a free block");
      used[block] = true;
      taken += block < header_->usable_blocks ? 1 : 0;
    }
  };
  for (std::uint32_t id = 0; id < header_->num_ids; ++id) {
    const Entry& entry = entries_[id];
    const std::string who = "sample " + std::to_string(id);
    const State state = state_of(entry.word.load(std::memory_order_acquire));
    const std::uint32_t length = entry.length.load(std::memory_order_relaxed);
    const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
    const bool held = state == State::kReady || state == State::kReserved;
    if (tag > header_->num_regions) broken(who + " is in an unknown region");
    if (held != (tag != 0 && header_->regions[tag - 1].holds_bytes)) {
      broken(who + (held ? " is in no region" : " is empty and in a region"));
    }
    if (tag != 0) {
      bytes[tag - 1] += length;
      ++members[tag - 1];
      const Heap all = heap(tag - 1u);
      const std::uint32_t pos = all.find(id);
      if (pos >= all.length() || all.at(pos).id() != id)
        broken(who + " is not where its heap says");
    }
    if (!held) continue;
    payload += length;
    Extent list{};
    std::vector<Extent> extents;
    if (!load_extents(entry, extents, &list)) broken(who + " has no readable extents");
    std::uint64_t room = 0;
    for (const Extent extent : extents) {
      take(extent, who);
      room += std::uint64_t{extent.count} * header_->block_size;
    }
    take(list, who);
    if (room < length && header_->blank == 0) broken(who + " has too few blocks");
  }
  if (payload != header_->payload) broken("the payload is counted wrongly");
  if (taken + header_->free_blocks != header_->usable_blocks) broken("blocks leaked");
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    const Region& region = header_->regions[r];
    const std::string who = std::string("region ") + region.name;
    if (region.bytes != bytes[r]) broken(who + " counts its bytes wrongly");
    if (region.size != members[r]) broken(who + " has lost members");
    if (!heap(r).in_order()) broken(who + " is out of order");
  }
  if (header_->payload > header_->capacity) broken("the payload exceeds the capacity");
  std::vector<std::uint16_t> leases(header_->num_ids, 0);
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    for (std::uint32_t at = slot_table_[s].lease_head; at != 0; at = leases_[at - 1].next) {
      ++leases[leases_[at - 1].id];
    }
  }
  for (std::uint32_t id = 0; id < header_->num_ids; ++id) {
    if (leases[id] != ranks_[id].leases.load()) {
      broken("sample " + std::to_string(id) + " counts its leases wrongly");
    }
  }
}

}  // namespace stoker
