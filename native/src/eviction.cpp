// Who leaves: admission rules, pop rules, ghosts. Only used under the lock.
#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "stoker/arena.h"
#include "stoker/crc32c.h"
#include "stoker/keys.h"

namespace stoker {
namespace {

// Outside the exact mode one eviction looks at no more nodes than this, so that the lock is short.
constexpr int kMostSteps = 64;
constexpr std::size_t kMostAside = 256;
constexpr std::uint32_t kRandomTries = 64;

std::uint64_t xorshift(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Whether there is room for so many more. Under the lock nothing may throw: what was taken out of a
// heap would be lost.
template <typename T>
bool has_room(std::vector<T>& items, std::size_t more = 1) {
  if (items.size() + more <= items.capacity()) return true;
  try {
    items.reserve(2 * items.capacity() + 16);
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// Whether a newcomer of this key beats a member. One of key -inf beats none, not even another -inf.
bool beats(const Region& wanted, double key, double member) {
  if (member == key) return wanted.ties && key != -std::numeric_limits<double>::infinity();
  return member < key;
}

// The members of a heap that a newcomer beats, from the smallest on, while none of them moves.
template <typename Expect>
class Beaten {
 public:
  // `reached` is scratch: the nodes that may come next, with positions in place of seats. The ids
  // of these are told to `expect`.
  Beaten(const Heap& members, const Region& wanted, double key, std::vector<Node>& reached,
         Expect expect)
      : members_(members), wanted_(wanted), key_(key), reached_(reached), expect_(expect) {
    reached.clear();
    if (has_room(reached)) reach(0);
  }
  // False when there are no more, or no memory to look at more.
  bool next(Node& found) {
    if (!has_room(reached_, 4)) return false;
    for (std::uint64_t child = first_; child < first_ + 4; ++child) reach(child);
    if (reached_.empty()) return false;
    std::pop_heap(reached_.begin(), reached_.end(), is_later);
    found = reached_.back();
    reached_.pop_back();
    first_ = 4ull * found.seat + 1;
    return true;
  }

 private:
  void reach(std::uint64_t pos) {
    if (pos >= members_.size()) return;
    const auto at = static_cast<std::uint32_t>(pos);
    const Node& node = members_.at(at);
    if (!beats(wanted_, key_, node.key)) return;  // nor what lies below it
    expect_(node.id());
    reached_.push_back({node.key, node.turn, at});
    std::push_heap(reached_.begin(), reached_.end(), is_later);
  }
  // A function object, which is inlined.
  static constexpr auto is_later = [](const Node& a, const Node& b) {
    return a.key > b.key || (a.key == b.key && a.turn > b.turn);
  };

  const Heap members_;
  const Region& wanted_;
  const double key_;
  std::vector<Node>& reached_;
  Expect expect_;
  std::uint64_t first_ = UINT32_MAX;  // child of the one found last; before that there is none
};

}  // namespace

// Inlined, as compilers drop calls of a function that does nothing but prefetch.
[[gnu::always_inline]] inline void Arena::expect(std::uint32_t id) const {
  __builtin_prefetch(&entries_[id], 1);
  __builtin_prefetch(&ranks_[id], 1);
}

// The next to leave, and the candidates for the one after it: their data is prefetched in the
// meantime. A line does so by itself.
[[gnu::always_inline]] inline void Arena::expect_victims(const Heap& members) const {
  const std::uint32_t most = members.is_line() ? 0 : std::min(5u, members.length());
  for (std::uint32_t pos = 0; pos < most; ++pos) expect(members.at(pos).id());
}

// What is drawn next if another one comes before: the sample, and of the one after it the node.
[[gnu::always_inline]] inline void Arena::expect_random(const Heap& members,
                                                        std::uint32_t size) const {
  std::uint64_t state = header_->random;
  const std::uint64_t next = xorshift(state) % size;
  const std::uint64_t later = xorshift(state) % size;
  if (std::max(next, later) >= members.size()) return;
  expect(members.at(static_cast<std::uint32_t>(next)).id());
  __builtin_prefetch(&members.at(static_cast<std::uint32_t>(later)), 1);
}

bool Arena::evictable(std::uint32_t id) const {
  return ranks_[id].leases.load(std::memory_order_relaxed) == 0 &&
         state_of(entries_[id].word.load(std::memory_order_relaxed)) == State::kReady;
}

// How much has to leave before a sample of this length fits. A strict region has its budget; those
// that borrow share what the strict ones leave.
Arena::Excess Arena::excess(const Region& region, std::uint64_t length) const {
  std::uint64_t bytes = region.bytes;
  std::uint64_t budget = budget_of(region);
  if (!region.strict) {
    bytes = 0;
    budget = header_->limit;
    for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
      const Region& other = header_->regions[r];
      if (!other.holds_bytes) continue;
      (other.strict ? budget : bytes) += other.strict ? 0 - budget_of(other) : other.bytes;
    }
  }
  const auto over = [](std::uint64_t wanted, std::uint64_t there) {
    return wanted > there ? wanted - there : 0;
  };
  return {std::max(over(bytes + length, budget), over(header_->payload + length, header_->limit)),
          over(blocks_of(length), header_->free_blocks)};
}

// With `newcomer`, that one may be put in the place of a victim's node at once, and is kNone then.
bool Arena::make_room(std::uint32_t region, std::uint64_t length, const double* key,
                      std::uint32_t* newcomer) {
  const Region& wanted = header_->regions[region];
  if (fits(wanted, length)) return true;
  if (wanted.strict && wanted.bytes + length <= budget_of(wanted)) {
    // Others may hold more than theirs, whose budgets fell and who could not shed it all.
    for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
      if (header_->regions[r].strict && header_->regions[r].holds_bytes) shed_some(r);
    }
    if (fits(wanted, length)) return true;
  }
  if (wanted.admission == Admission::kWhileRoom) return false;
  if (wanted.admission == Admission::kBeatsVictims) {
    return beats_victims(region, length, first_key(wanted, key), newcomer);
  }
  while (!fits(wanted, length)) {
    if (!evict_for(region)) return false;
  }
  return true;
}

// Evicts one sample so that another fits into `region`: from the region itself when it is strict;
// else from the last borrowing region over its budget, or the first one that has one to give.
bool Arena::evict_for(std::uint32_t region) {
  const Region* regions = header_->regions;
  if (regions[region].strict) return evict_one(region);
  const auto borrows = [&](std::uint32_t r) {
    return !regions[r].strict && regions[r].holds_bytes;
  };
  for (std::uint32_t r = header_->num_regions; r-- > 0;) {
    if (borrows(r) && regions[r].bytes > budget_of(regions[r]) && evict_one(r)) return true;
  }
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (borrows(r) && evict_one(r)) return true;
  }
  return false;
}

Arena::Bar Arena::bar_of(std::uint32_t region) {
  const Region& wanted = header_->regions[region];
  const bool has_bar = wanted.admission == Admission::kBeatsVictims && wanted.strict &&
                       wanted.order == Order::kKey && wanted.pop == Pop::kEvict &&
                       wanted.ghost == kNone && wanted.size > 0;
  const std::uint64_t budget = budget_of(wanted);
  return {has_bar ? heap(region).at(0).key : -std::numeric_limits<double>::infinity(),
          budget > wanted.bytes ? budget - wanted.bytes : 0};
}

// Evicts so many of the smallest that the newcomer fits, if it beats every one of them. Nodes stay
// where they are until that is known: most newcomers fail, or meet what was reserved just now.
bool Arena::beats_victims(std::uint32_t region, std::uint64_t length, double key,
                          std::uint32_t* newcomer) {
  const Region& wanted = header_->regions[region];
  if (wanted.order != Order::kKey || wanted.pop != Pop::kEvict) {
    return beats_popped(region, length, key);
  }
  Heap members = heap(region);
  if (members.size() == 0 || !beats(wanted, key, members.at(0).key)) return false;  // as most do
  Beaten beaten(members, wanted, key, reached_, [this](std::uint32_t id) { expect(id); });
  victims_.clear();
  const Excess excess = this->excess(wanted, length);
  Excess freed{};
  for (std::size_t aside = 0; !freed.covers(excess);) {
    Node next{};
    if (!has_room(victims_) || !beaten.next(next)) return false;
    if (evictable(next.id())) {
      victims_.push_back(next);
      const std::uint32_t size = entries_[next.id()].length.load(std::memory_order_relaxed);
      freed.bytes += size;
      freed.blocks += blocks_of(size);
    } else if (++aside == kMostAside && !header_->exact) {
      return false;
    }
  }
  for (std::size_t i = 0; i < victims_.size(); ++i) {
    const std::uint32_t id = victims_[i].id();
    const std::uint32_t pos = i == 0 ? victims_[i].seat : members.find(id);  // later ones may move
    if (newcomer != nullptr && header_->blank != 0 && i + 1 == victims_.size()) {
      members.replace(pos, std::exchange(*newcomer, kNone), key);  // where there is always room
    } else {
      members.remove(pos);
    }
    evict(region, id);
  }
  expect_victims(members);
  return true;
}

// The same where the smallest nodes may first have to move to where they belong.
bool Arena::beats_popped(std::uint32_t region, std::uint64_t length, double key) {
  const Region& wanted = header_->regions[region];
  std::vector<Victim> victims;
  Excess freed{};
  bool beats_all = true;
  while (beats_all && !freed.covers(excess(wanted, length))) {  // less where some move elsewhere
    Victim victim{};
    if (!has_room(victims) || !next_victim(region, victim)) {
      beats_all = false;
      break;
    }
    victims.push_back(victim);
    beats_all = beats(wanted, key, victim.key);
    const std::uint32_t size = entries_[victim.id].length.load(std::memory_order_relaxed);
    freed.bytes += size;
    freed.blocks += blocks_of(size);
  }
  for (const Victim& victim : victims) {
    if (beats_all) {
      evict(region, victim.id);
    } else {
      take_in(region, victim.id, victim.key);
    }
  }
  return beats_all;
}

// Pops until a sample has left the cache, or none may; false when nothing left the region.
bool Arena::evict_one(std::uint32_t region) {
  const std::uint32_t before = header_->regions[region].size;
  Victim victim{};
  if (!next_victim(region, victim)) return header_->regions[region].size < before;
  evict(region, victim.id);
  return true;
}

// Takes the next victim out of the region's heap. Those that may not leave keep their place.
bool Arena::next_victim(std::uint32_t region, Victim& victim) {
  if (header_->regions[region].pop == Pop::kRandom) return random_victim(region, victim);
  Heap members = heap(region);
  std::vector<Victim> aside;
  bool found = false;
  int steps = header_->exact ? std::numeric_limits<int>::max() : kMostSteps;
  while (!found && members.size() > 0 && (header_->exact || aside.size() < kMostAside)) {
    const Node top = members.at(0);
    if (!evictable(top.id())) {
      if (!has_room(aside)) break;
      aside.push_back({top.id(), top.key});
      members.remove(0);
    } else if (settled(region, members, steps <= 0, steps)) {
      victim = {top.id(), top.key};
      members.remove(0);
      found = true;
    }
  }
  for (const Victim& kept : aside) take_in(region, kept.id, kept.key);
  expect_victims(members);
  // So many of the first are leased that any other is better than none.
  return found || (aside.size() == kMostAside && !header_->exact && random_victim(region, victim));
}

// Looks at the smallest node: true when it is to leave; else it was moved to where it belongs.
bool Arena::settled(std::uint32_t region, Heap& members, bool at_once, int& steps) {
  const Region& rules = header_->regions[region];
  const Node top = members.at(0);
  Rank& rank = ranks_[top.id()];
  if (at_once) return true;
  --steps;
  const double key = rank.key.load(std::memory_order_relaxed);
  if (rules.order == Order::kRecency || rules.order == Order::kFrequency) {
    if (key <= top.key) return true;
    members.update(0, key);
    return false;
  }
  const std::uint8_t visits = rank.visits.load(std::memory_order_relaxed);
  if (rules.pop == Pop::kPromote && visits >= rules.visits) {
    return !promote(region, top.id());
  }
  if (rules.pop == Pop::kSecondChance && visits > 0) {
    rank.visits.store(visits - 1, std::memory_order_relaxed);
    members.update(0, tick());
    return false;
  }
  if (rules.pop == Pop::kSieve && visits > 0) {
    rank.visits.store(0, std::memory_order_relaxed);
    members.update(0, pair_key(count_of(top.key) + 1, clock_of(top.key)));
    return false;
  }
  return true;
}

// Puts what a region counts into its heap. One for which no node is left is freed, as it would be
// out of reach of eviction; false.
bool Arena::take_in(std::uint32_t region, std::uint32_t id, double key) {
  if (heap(region).insert(id, key)) return true;
  header_->regions[region].bytes -= entries_[id].length.load(std::memory_order_relaxed);
  if (header_->regions[region].holds_bytes) drop(id);
  return false;
}

bool Arena::random_victim(std::uint32_t region, Victim& victim) {
  Heap members = heap(region);
  const std::uint32_t size = members.size();
  if (size == 0) return false;
  std::uint32_t pos = static_cast<std::uint32_t>(xorshift(header_->random) % size);
  // After some tries it is a search, so that one free sample among leased ones is found.
  const std::uint32_t most = header_->exact ? size : std::min<std::uint32_t>(size, kMostAside);
  for (std::uint32_t tries = 0; tries < kRandomTries + most; ++tries) {
    const Node node = members.at(pos);
    if (evictable(node.id())) {
      victim = {node.id(), node.key};
      members.remove(pos);
      expect_random(members, size);
      return true;
    }
    pos = tries < kRandomTries ? static_cast<std::uint32_t>(xorshift(header_->random) % size)
                               : (pos + 1) % size;
  }
  return false;
}

// Adds a sample to a region; if the pool of nodes is used up, ghosts give theirs.
bool Arena::enlist(std::uint32_t region, std::uint32_t id, double key) {
  const Region* regions = header_->regions;
  while (!heap(region).push(id, key)) {
    std::uint32_t ghost = 0;
    while (ghost < header_->num_regions &&
           (regions[ghost].holds_bytes || regions[ghost].size == 0)) {
      ++ghost;
    }
    if (ghost == header_->num_regions) return false;
    forget(heap(ghost).at(0).id());
  }
  return true;
}

// False when there is no node for it: then it stays where it was.
bool Arena::promote(std::uint32_t region, std::uint32_t id) {
  Region& from = header_->regions[region];
  Region& to = header_->regions[from.promote_to];
  const std::uint32_t length = entries_[id].length.load(std::memory_order_relaxed);
  Heap members = heap(region);
  const std::uint32_t pos = members.find(id);
  const double key = members.at(pos).key;
  members.remove(pos);
  ranks_[id].visits.store(0, std::memory_order_relaxed);
  if (!enlist(from.promote_to, id, first_key(to, nullptr))) {
    members.push(id, key);
    return false;
  }
  from.bytes -= length;
  to.bytes += length;
  return true;
}

// The victim is out of the heap already.
void Arena::evict(std::uint32_t region, std::uint32_t id) {
  Region& from = header_->regions[region];
  const std::uint32_t length = entries_[id].length.load(std::memory_order_relaxed);
  if (evicted_ != nullptr) keep_copy(id, length);
  set_word(entries_[id], State::kEmpty, 0);
  free_blocks(entries_[id]);
  from.bytes -= length;
  header_->payload -= length;
  ++header_->evictions;
  if (from.pop == Pop::kSieve && from.size > 0) {
    // The hand's pass: the one of the sample it looks at next.
    from.round = count_of(heap(region).at(0).key);
  }
  if (from.ghost != kNone) remember(from.ghost, id);
}

// What cannot be copied, for want of memory or because the disk changed it, is not handed on.
void Arena::keep_copy(std::uint32_t id, std::uint32_t length) {
  const std::size_t count = evicted_->ids.size();
  const std::size_t before = evicted_->data.size();
  bool kept = false;
  try {
    evicted_->data.resize(before + length);
    evicted_->ids.push_back(id);
    evicted_->keys.push_back(ranks_[id].key.load(std::memory_order_relaxed));
    evicted_->offsets.push_back(static_cast<std::int64_t>(before + length));
    unsigned char* copy = evicted_->data.data() + before;
    kept = copy_out(entries_[id], length, copy) &&
           (!blocks_store_->checksummed() || crc32c(0, copy, length) == entries_[id].crc.load());
  } catch (const std::bad_alloc&) {
  }
  if (kept) return;
  evicted_->data.resize(before);
  evicted_->ids.resize(count);
  evicted_->keys.resize(count);
  evicted_->offsets.resize(count + 1);
}

// A ghost's members are ids whose entries are empty; their lengths stay for its budget.
void Arena::remember(std::uint32_t ghost, std::uint32_t id) {
  Region& memory = header_->regions[ghost];
  const std::uint32_t length = entries_[id].length.load(std::memory_order_relaxed);
  if (length > memory.budget) return;
  while (memory.bytes + length > memory.budget) forget(heap(ghost).at(0).id());
  if (heap(ghost).push(id, tick())) memory.bytes += length;
}

void Arena::forget(std::uint32_t id) {
  const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
  if (tag == 0 || header_->regions[tag - 1].holds_bytes) return;
  header_->regions[tag - 1].bytes -= entries_[id].length.load(std::memory_order_relaxed);
  heap(tag - 1u).take_out(id);
}

void Arena::free_blocks(const Entry& entry) {
  if (header_->blank) return;
  Extent list{};
  std::vector<Extent>& extents = extents_;
  if (load_extents(entry, extents, &list)) {
    for (const Extent extent : extents) blocks_.release(extent);
  } else {
    header_->unsound = 1;  // only a repair finds these blocks again
  }
  if (list.count != 0) blocks_.release(list);
}

// Takes a sample out of its region and frees it: for discard, and for reservations undone.
void Arena::drop(std::uint32_t id) {
  const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
  const std::uint32_t length = entries_[id].length.load(std::memory_order_relaxed);
  if (tag != 0) {
    heap(tag - 1u).take_out(id);
    header_->regions[tag - 1].bytes -= length;
  }
  set_word(entries_[id], State::kEmpty, 0);
  free_blocks(entries_[id]);
  header_->payload -= length;
}

}  // namespace stoker
