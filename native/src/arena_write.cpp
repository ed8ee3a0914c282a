// The arena's writing side: reserve under the lock, copy outside it, publish; and single flight.
#include <algorithm>
#include <climits>
#include <new>

#include "stoker/arena.h"
#include "stoker/crc32c.h"
#include "stoker/error.h"
#include "stoker/futex.h"
#include "stoker/keys.h"
#include "stoker/racy_copy.h"

namespace stoker {
namespace {

constexpr std::size_t kBatch = 64;                 // samples reserved under one lock
constexpr std::uint64_t kBatchBytes = 4ull << 20;  // and at most about so many bytes
constexpr std::int64_t kHold = 500'000;      // ns after which a batch lets others have the lock,
constexpr std::size_t kGlance = 8;           // looked at before every so many samples
constexpr std::size_t kAhead = 8;            // entries looked up before they are needed
constexpr std::int64_t kSlice = 20'000'000;  // between two looks at whether a claimant lives

const std::atomic<std::uint32_t>* futex_of(const Entry& entry) {
  return reinterpret_cast<const std::atomic<std::uint32_t>*>(&entry.word);
}

}  // namespace

std::uint32_t Arena::blocks_of(std::uint64_t length) const {
  if (header_->blank) return 0;
  return static_cast<std::uint32_t>((length + header_->block_size - 1) / header_->block_size);
}

// Moves an entry to its next state and wakes those who wait for that.
void Arena::set_word(Entry& entry, State state, std::uint32_t owner) {
  std::uint64_t word = entry.word.load(std::memory_order_relaxed);
  while (!exchange(entry, word, next_word(word, state, owner))) {
  }
  if (word & kWaiters) futex_wake(futex_of(entry), INT_MAX);
}

double Arena::first_key(const Region& region, const double* key, double now) const {
  if (region.order == Order::kFrequency) return pair_key(1, static_cast<std::uint64_t>(now));
  if (region.pop == Pop::kSieve) return pair_key(region.round, static_cast<std::uint64_t>(now));
  return region.order == Order::kKey && key != nullptr ? *key : now;
}

void Arena::check(const Placing& placing) const {
  for (const std::uint32_t region : {placing.region, placing.overflow}) {
    if (region == kNone) continue;
    if (region >= header_->num_regions || !header_->regions[region].holds_bytes) {
      throw ConfigError("this region holds no samples");
    }
  }
}

// Does something with some of the samples after others, as many as one lock is held for.
template <typename Do>
void Arena::in_parts(Ids ids, const Sample* samples, const Placing& placing, Do do_some) {
  check(ids);
  check(placing);
  for (std::size_t done = 0; done < ids.size();) {
    std::size_t count = 0;
    std::uint64_t bytes = 0;
    while (done + count < ids.size() && count < kBatch && bytes < kBatchBytes) {
      bytes += samples[done + count++].size;
    }
    Placing part = placing;
    if (part.keys != nullptr) part.keys += done;
    do_some(done, count, part);
    done += count;
  }
}

void Arena::put(Ids ids, const Sample* samples, const Placing& placing, bool* admitted) {
  in_parts(ids, samples, placing, [&](std::size_t at, std::size_t count, const Placing& part) {
    put_some(ids.subspan(at, count), samples + at, part, admitted + at);
  });
}

void Arena::reserve_rooms(Ids ids, const Sample* samples, const Placing& placing, bool* reserved) {
  if (header_->on_disk || header_->blank) throw ConfigError("only an arena in memory has rooms");
  in_parts(ids, samples, placing, [&](std::size_t at, std::size_t count, const Placing& part) {
    Reserved how[kBatch];
    pend(slot(), static_cast<std::int32_t>(count));
    reserve_some(ids.subspan(at, count), samples + at, part, how);
    for (std::size_t i = 0; i < count; ++i) {
      reserved[at + i] = how[i] == Reserved::kTaken;
      if (!reserved[at + i]) pend(slot(), -1);
    }
  });
}

std::vector<std::span<unsigned char>> Arena::room_of(std::uint32_t id) {
  write_fence();  // readers of what was in these blocks must see that their version has gone
  std::vector<Extent> extents;
  Extent list{};
  std::vector<std::span<unsigned char>> room;
  if (!load_extents(entries_[id], extents, &list)) return room;
  std::uint64_t left = entries_[id].length.load(std::memory_order_relaxed);
  auto* const data = segment_.at<unsigned char>(header_->data_at);
  const auto* const end = segment_.at<unsigned char>(end_of(*header_, header_->reserved_blocks));
  for (const Extent extent : extents) {
    const std::uint64_t bytes =
        std::min<std::uint64_t>(left, std::uint64_t{extent.count} * header_->block_size);
    room.push_back({data + std::uint64_t{extent.first} * header_->block_size, bytes});
    segment_.mapped().bring(room.back(), end);
    left -= bytes;
  }
  return room;
}

bool Arena::settle(std::uint32_t id, bool is_written) {
  const std::uint64_t word = entries_[id].word.load(std::memory_order_acquire);
  if (state_of(word) != State::kReserved || owner_of(word) != slot()) return false;  // after a fork
  const bool is_there = is_written ? publish(id) : undo(id);
  pend(slot(), -1);
  return is_there;
}

// The region asked for, else the one for what that region rejects.
Arena::Reserved Arena::place(std::uint32_t id, std::uint64_t length, const double* key,
                             const Placing& placing) {
  const Reserved first = reserve(id, length, key, placing.region);
  if (first != Reserved::kRefused || placing.overflow == kNone) return first;
  return reserve(id, length, key, placing.overflow);
}

void Arena::put_some(Ids ids, const Sample* samples, const Placing& placing, bool* admitted) {
  Reserved reserved[kBatch];
  Slot& mine = slot_table_[slot()];
  const auto count = static_cast<std::int32_t>(ids.size());
  pend(slot(), count);
  reserve_some(ids, samples, placing, reserved);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    admitted[i] = reserved[i] != Reserved::kRefused;
    if (reserved[i] == Reserved::kTaken) {
      const bool written = write(ids[i], samples[i]);
      if (!written) mine.io_errors.fetch_add(1, std::memory_order_relaxed);
      admitted[i] = written ? publish(ids[i]) : undo(ids[i]);
    } else if (reserved[i] == Reserved::kRefused) {
      give_back(ids[i]);
    }
  }
  pend(slot(), -count);
}

// The same as put() for samples that are neither there nor claimed, of a blank arena. Most
// newcomers are turned away, and are not looked at then.
void Arena::put_unclaimed(Ids ids, const Sample* samples, const Placing& placing) {
  in_parts(ids, samples, placing, [&](std::size_t at, std::size_t count, const Placing& part) {
    const Guard guard(*this, Guard::Insist::kYes);
    const bool has_bar = part.keys != nullptr && part.overflow == kNone;
    Bar bar = bar_of(part.region);
    const auto is_turned_away = [&](std::size_t i) {
      return has_bar && part.keys[i] < bar.key && samples[at + i].size > bar.room;
    };
    std::uint32_t taken[kBatch];
    std::size_t num_taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count && !is_turned_away(i + kAhead)) {
        __builtin_prefetch(&entries_[ids[at + i + kAhead]], 1);
      }
      if (is_turned_away(i)) {
        ++header_->rejected;
        continue;
      }
      const double* key = part.keys == nullptr ? nullptr : part.keys + i;
      if (place(ids[at + i], samples[at + i].size, key, part) != Reserved::kTaken) continue;
      taken[num_taken++] = ids[at + i];
      bar = bar_of(part.region);
    }
    for (std::size_t i = 0; i < num_taken; ++i) publish(taken[i]);
  });
}

void Arena::reserve_some(Ids ids, const Sample* samples, const Placing& placing,
                         Reserved* reserved) {
  for (std::size_t i = 0; i < ids.size();) {
    const Guard guard(*this);
    if (!guard) {
      slot_table_[slot()].bypassed.fetch_add(ids.size() - i, std::memory_order_relaxed);
      std::fill(reserved + i, reserved + ids.size(), Reserved::kRefused);
      break;
    }
    evicted_ = placing.evicted;
    const bool alone = header_->blank != 0;  // no other process waits for the lock
    const std::int64_t until = alone ? 0 : monotonic_ns() + kHold;
    do {
      if (i + kAhead < ids.size()) {
        __builtin_prefetch(&entries_[ids[i + kAhead]], 1);
        __builtin_prefetch(&ranks_[ids[i + kAhead]], 1);
      }
      const double* key = placing.keys == nullptr ? nullptr : placing.keys + i;
      reserved[i] = place(ids[i], samples[i].size, key, placing);
    } while (++i < ids.size() && (alone || i % kGlance != 0 || monotonic_ns() < until));
    evicted_ = nullptr;
  }
}

Arena::Reserved Arena::reserve(std::uint32_t id, std::uint64_t length, const double* key,
                               std::uint32_t region) {
  Entry& entry = entries_[id];
  const std::uint32_t me = slot();
  std::uint64_t word = entry.word.load(std::memory_order_acquire);
  const bool mine = owner_of(word) == me;
  if (state_of(word) == State::kReady || (state_of(word) == State::kReserved && mine)) {
    const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
    if (key != nullptr && tag != 0 && header_->regions[tag - 1].order == Order::kKey) {
      set_key(tag - 1u, id, *key);
    }
    return Reserved::kPresent;
  }
  const bool claimed = state_of(word) == State::kClaimed;
  if (state_of(word) == State::kReserved || (claimed && !mine)) {
    return Reserved::kRefused;  // another process's: two copies would be one too many
  }
  const Region& asked = header_->regions[region];
  const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
  bool fitting = length <= header_->limit && length <= budget_of(asked) && length < UINT32_MAX;
  // An empty S3-FIFO fills both its queues: without that, main would wait an epoch for its share.
  const bool filling =
      header_->evictions == 0 && asked.bytes >= budget_of(asked) && fits(asked, length);
  const bool remembered = asked.ghost != kNone && tag == asked.ghost + 1;
  if (fitting && asked.pop == Pop::kPromote && (remembered || filling)) region = asked.promote_to;
  if (fitting) forget(id);
  Region& target = header_->regions[region];
  fitting = fitting && (!target.strict || length <= budget_of(target));
  std::uint32_t newcomer = id;
  while (fitting && (fitting = make_room(region, length, key, &newcomer)) &&
         !allocate(entry, blocks_of(length))) {
    // There is room, but in too many pieces.
    fitting = target.admission != Admission::kWhileRoom && evict_for(region);
  }
  if (!fitting) {
    ++header_->rejected;
    return Reserved::kRefused;
  }
  entry.length.store(static_cast<std::uint32_t>(length), std::memory_order_relaxed);
  ranks_[id].visits.store(0, std::memory_order_relaxed);
  for (;;) {
    // Claims come without the lock; one that came in between keeps the sample to itself.
    const bool free = state_of(word) == State::kEmpty ||
                      (state_of(word) == State::kClaimed && owner_of(word) == me);
    if (!free) {
      free_blocks(entry);
      return Reserved::kRefused;
    }
    const std::uint64_t waiters = word & kWaiters;
    if (exchange(entry, word, next_word(word, State::kReserved, me) | waiters)) {
      if (state_of(word) == State::kClaimed) pend(me, -1);
      break;
    }
  }
  header_->payload += length;
  if (newcomer != kNone && !enlist(region, id, first_key(target, key))) {
    drop(id);  // out of nodes, and so out of reach of eviction
    return Reserved::kRefused;
  }
  target.bytes += length;
  ++header_->inserts;
  return Reserved::kTaken;
}

// Fills in the entry's extents.
bool Arena::allocate(Entry& entry, std::uint32_t count) {
  if (header_->blank) return true;
  if (!blocks_.allocate(count, kMostExtents, extents_)) return false;
  write_fence();  // readers of what was here must see that their version has gone
  std::uint32_t parts[4] = {0, 0, 0, 0};
  if (extents_.size() <= 2) {
    for (std::size_t i = 0; i < extents_.size(); ++i) {
      parts[2 * i] = extents_[i].first;
      parts[2 * i + 1] = extents_[i].count;
    }
  } else {
    const std::uint64_t bytes = extents_.size() * sizeof(Extent);
    const bool listed = blocks_.allocate(blocks_of(bytes), 1, list_);
    if (!listed || !blocks_store_->write(list_[0], extents_.data(), bytes)) {
      for (const Extent extent : extents_) blocks_.release(extent);
      if (listed) blocks_.release(list_[0]);
      return false;
    }
    parts[0] = list_[0].first;
    parts[1] = static_cast<std::uint32_t>(extents_.size()) | kSpilled;
    parts[2] = crc32c(0, extents_.data(), bytes);
  }
  for (int i = 0; i < 4; ++i) entry.extents[i].store(parts[i], std::memory_order_relaxed);
  return true;
}

// Copies a reserved sample into its blocks. No lock is held.
bool Arena::write(std::uint32_t id, const Sample& sample) {
  if (header_->blank) return true;
  Entry& entry = entries_[id];
  write_fence();  // readers of what was in these blocks must see that their version has gone
  std::vector<Extent> extents;
  Extent list{};
  try {
    if (!load_extents(entry, extents, &list)) return false;
  } catch (const std::bad_alloc&) {
    return false;  // what is reserved must not stay so
  }
  const auto* from = static_cast<const unsigned char*>(sample.data);
  std::uint64_t left = sample.size;
  for (const Extent extent : extents) {
    const std::uint64_t bytes =
        std::min<std::uint64_t>(left, std::uint64_t{extent.count} * header_->block_size);
    if (!blocks_store_->write(extent, from, bytes)) return false;
    from += bytes;
    left -= bytes;
  }
  if (!blocks_store_->checksummed()) return true;
  Record record{};
  record.generation = header_->clock.fetch_add(1) + 1;
  record.id = id;
  record.length = static_cast<std::uint32_t>(sample.size);
  record.crc = crc32c(0, sample.data, sample.size);
  for (int i = 0; i < 4; ++i) record.extents[i] = entry.extents[i].load(std::memory_order_relaxed);
  record.self_crc = BlockStore::self_crc(record);
  entry.crc.store(record.crc, std::memory_order_relaxed);
  return blocks_store_->put_record(record);
}

// False when the reservation was taken away (a repair found its blocks in use twice).
bool Arena::publish(std::uint32_t id) {
  Entry& entry = entries_[id];
  const std::uint32_t me = slot();
  std::uint64_t word = entry.word.load(std::memory_order_relaxed);
  while (state_of(word) == State::kReserved && owner_of(word) == me) {
    if (exchange(entry, word, next_word(word, State::kReady, 0))) {
      if (word & kWaiters) futex_wake(futex_of(entry), INT_MAX);
      return true;
    }
  }
  return false;
}

// Frees a reservation whose bytes could not be written, now or at the next lock; false.
bool Arena::undo(std::uint32_t id) {
  {
    const Guard guard(*this);
    if (guard) {
      drop(id);
      return false;
    }
  }
  slot_table_[slot()].pending.fetch_add(1);
  const std::unique_lock waiting(undone_mutex_, std::try_to_lock);
  if (!waiting) return false;  // it ends with this process
  try {
    undone_.push_back(id);
    any_undone_.store(true);
  } catch (const std::bad_alloc&) {
    // the same
  }
  return false;
}

// Under the lock. After a fork the list may hold what is the parent's to undo, and the mutex may
// be locked by a thread that is not here.
void Arena::finish_undo() {
  const std::unique_lock waiting(undone_mutex_, std::try_to_lock);
  if (!waiting) return;
  const std::uint32_t me = slot();
  for (const std::uint32_t id : undone_) {
    const std::uint64_t word = entries_[id].word.load(std::memory_order_acquire);
    if (state_of(word) != State::kReserved || owner_of(word) != me) continue;
    drop(id);
    slot_table_[me].pending.fetch_sub(1);
  }
  undone_.clear();
  any_undone_.store(false);
}

void Arena::discard(Ids ids) {
  check(ids);
  for (std::size_t done = 0; done < ids.size(); done += kAtOnce) {
    const Guard guard(*this);
    if (!guard) return;
    for (std::size_t i = done; i < std::min(done + kAtOnce, ids.size()); ++i) {
      const std::uint64_t word = entries_[ids[i]].word.load(std::memory_order_acquire);
      if (state_of(word) == State::kReady) drop(ids[i]);
    }
  }
}

void Arena::discard_from(std::uint32_t region, Ids ids) {
  check(ids);
  for (std::size_t done = 0; done < ids.size(); done += kAtOnce) {
    const Guard guard(*this);
    if (!guard) return;
    const auto is_there = [&](std::size_t at) {
      return at < ids.size() &&
             ranks_[ids[at]].region.load(std::memory_order_relaxed) == region + 1;
    };
    for (std::size_t i = done; i < std::min(done + kAtOnce, ids.size()); ++i) {
      if (i + 4 * kAhead < ids.size()) {
        __builtin_prefetch(&ranks_[ids[i + 4 * kAhead]], 1);
        __builtin_prefetch(&entries_[ids[i + 4 * kAhead]], 1);
      }
      if (is_there(i + 2 * kAhead)) heap(region).expect_position(ids[i + 2 * kAhead]);
      if (is_there(i + kAhead)) heap(region).expect_node(ids[i + kAhead]);
      if (is_there(i) && evictable(ids[i])) drop(ids[i]);
    }
  }
}

void Arena::set_keys(Ids ids, const double* keys) {
  check(ids);
  rekey(ids, keys, nullptr);
}

// Only those that `which` says, if it says anything.
void Arena::rekey(Ids ids, const double* keys, const bool* which) {
  std::uint32_t keyed = 0;  // tags of the regions that keys order, as bits
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    keyed |= static_cast<std::uint32_t>(header_->regions[r].order == Order::kKey) << (r + 1);
  }
  const auto has_key = [&](std::size_t i) {
    return ranks_[ids[i]].key.load(std::memory_order_relaxed) == keys[i];
  };
  std::uint32_t changed[kAtOnce];
  for (std::size_t done = 0; done < ids.size(); done += kAtOnce) {
    const Guard guard(*this);
    if (!guard) return;
    // Most have their keys already, or are not there: only the others need what heaps have. Without
    // a branch, which no processor could predict.
    std::size_t count = 0;
    for (std::size_t i = done; i < std::min(done + kAtOnce, ids.size()); ++i) {
      if (i + 4 * kAhead < ids.size()) __builtin_prefetch(&ranks_[ids[i + 4 * kAhead]], 1);
      const std::uint32_t tag = ranks_[ids[i]].region.load(std::memory_order_relaxed);
      const bool is_meant = which == nullptr || which[i];
      changed[count] = static_cast<std::uint32_t>(i - done);
      count += (keyed >> (tag & 31)) & static_cast<std::uint32_t>(is_meant) &
               static_cast<std::uint32_t>(!has_key(i));
    }
    const auto members = [&](std::uint32_t id) {
      return heap(ranks_[id].region.load(std::memory_order_relaxed) - 1u);
    };
    for (std::size_t n = 0; n < count; ++n) {
      const auto at = [&](std::size_t later) { return ids[done + changed[later]]; };
      if (n + 2 * kAhead < count) members(at(n + 2 * kAhead)).expect_position(at(n + 2 * kAhead));
      if (n + kAhead < count) members(at(n + kAhead)).expect_node(at(n + kAhead));
      const std::size_t i = done + changed[n];
      if (!has_key(i)) {  // of a sample that comes twice the first may have set it
        set_key(ranks_[ids[i]].region.load(std::memory_order_relaxed) - 1u, ids[i], keys[i]);
      }
    }
  }
}

// Of a leased sample it counts once the leases end: what was served just now has the smallest keys,
// and would be in the way of eviction, which cannot have it yet.
void Arena::set_key(std::uint32_t region, std::uint32_t id, double key) {
  Rank& rank = ranks_[id];
  if (rank.leases.load(std::memory_order_relaxed) == 0) {
    Heap members = heap(region);
    members.update(members.find(id), key);
  } else {
    rank.key.store(key, std::memory_order_relaxed);
  }
}

// --- single flight ---

void Arena::claim(Ids ids, bool* claimed) {
  check(ids);
  const std::uint32_t me = slot();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + 2 * kAhead < ids.size()) __builtin_prefetch(&entries_[ids[i + 2 * kAhead]], 1);
    Entry& entry = entries_[ids[i]];
    pend(me, 1);
    std::uint64_t word = entry.word.load(std::memory_order_acquire);
    claimed[i] = false;
    while (!claimed[i]) {
      const bool orphan = state_of(word) == State::kClaimed && owner_of(word) != me &&
                          !slots_.alive(owner_of(word));
      if (state_of(word) != State::kEmpty && !orphan) break;
      claimed[i] = exchange(entry, word, next_word(word, State::kClaimed, me) | (word & kWaiters));
    }
    if (!claimed[i]) pend(me, -1);
  }
}

// Ends a claim of this process without a sample; false when there was none.
bool Arena::give_back(std::uint32_t id) {
  const std::uint32_t me = slot();
  Entry& entry = entries_[id];
  std::uint64_t word = entry.word.load(std::memory_order_acquire);
  while (state_of(word) == State::kClaimed && owner_of(word) == me) {
    if (exchange(entry, word, next_word(word, State::kEmpty, 0))) {
      if (word & kWaiters) futex_wake(futex_of(entry), INT_MAX);
      pend(me, -1);
      return true;
    }
  }
  return false;
}

void Arena::abandon(Ids ids) {
  check(ids);
  for (const std::uint32_t id : ids) give_back(id);
}

bool Arena::are_coming(Ids ids) const {
  check(ids);
  bool any = false;
  for (const std::uint32_t id : ids) {
    const State state = state_of(entries_[id].word.load(std::memory_order_acquire));
    if (state == State::kEmpty) return false;
    any = any || state != State::kReady;
  }
  return any;
}

void Arena::wait(Ids ids, std::int64_t timeout_ns, bool* found) {
  check(ids);
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    Entry& entry = entries_[ids[i]];
    for (;;) {
      std::uint64_t word = entry.word.load(std::memory_order_acquire);
      const State state = state_of(word);
      found[i] = state == State::kReady;
      const std::int64_t left = deadline - monotonic_ns();
      if (found[i] || state == State::kEmpty || left <= 0) break;
      if (!slots_.alive(owner_of(word))) {
        reclaim();
        if (entry.word.load(std::memory_order_acquire) == word) break;
        continue;
      }
      if ((word & kWaiters) == 0 && !entry.word.compare_exchange_strong(word, word | kWaiters)) {
        continue;
      }
      futex_wait(futex_of(entry), static_cast<std::uint32_t>(word | kWaiters),
                 std::min(left, kSlice));
    }
  }
}

}  // namespace stoker
