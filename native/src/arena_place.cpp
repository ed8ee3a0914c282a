// Which region a sample lies in: looking it up, moving it between regions, redividing their
// budgets.
#include <algorithm>
#include <cmath>

#include "stoker/arena.h"
#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::size_t kMoves = 64;     // under one lock, each of which may evict
constexpr std::uint32_t kAFew = 8192;  // listed under the lock

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
  for (std::uint32_t id = 0; id < header_->num_ids; ++id) {
    const std::uint8_t tag = ranks_[id].region.load(std::memory_order_relaxed);
    if (tag == region + 1 && ready(id)) ids.push_back(id);
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
  if (length > to.budget) return false;
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
    more = region.bytes > region.budget;
    if (more && !region.holds_bytes) forget(heap(r).at(0).id());
    if (more && region.holds_bytes) more = evict_one(r);
  }
  return more;
}

}  // namespace stoker
