// The arena as a whole: creation, the lock, regions, leases, counters.
#include "stoker/arena.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "stoker/error.h"
#include "stoker/futex.h"

namespace stoker {
namespace {

constexpr std::int64_t kInsist = 5'000'000'000;
constexpr std::int64_t kStalled = 1'000'000'000;  // after a timeout, how long no process waits
constexpr std::int64_t kGlance = 1'000'000;       // longer than this

Segment create(const Geometry& geometry) {
  if (geometry.num_ids == 0) throw ConfigError("num_ids must be at least 1");
  if (geometry.mean_size == 0) throw ConfigError("mean_size must be at least 1 byte");
  return Segment::create(geometry);
}

Segment attach(int memory, int file) {
  try {
    Segment segment = Segment::attach(memory);
    if ((segment.header()->on_disk != 0) != (file >= 0)) {
      throw SegmentError("the segment needs its file's descriptor too, or must not have one");
    }
    const std::uint32_t regions = segment.header()->num_regions;
    if (regions == 0 || regions > kMaxRegions) {
      throw SegmentError("the segment has " + std::to_string(regions) + " regions: it is damaged");
    }
    return segment;
  } catch (...) {
    if (file >= 0) close(file);
    throw;
  }
}

}  // namespace

// --- the lock ---

Arena::Guard::Guard(Arena& arena, std::int64_t timeout_ns) : arena_(arena), held_(false) {
  const std::uint32_t me = arena.slot();
  // One stopped process must not cost everybody 50 ms at every step; the short wait leaves the CPU
  // to an owner that has only lost it to us.
  const bool stalled = timeout_ns == kWait && monotonic_ns() < arena.stalled_until_.load();
  const auto result = arena.lock_.acquire(me, stalled ? kGlance : timeout_ns);
  held_ = result != SlotLock::Result::kTimedOut;
  if (!held_) {
    if (!stalled) arena.stalled_until_.store(monotonic_ns() + kStalled);
    return;
  }
  arena.stalled_until_.store(0);  // the owner was not stopped, or runs again
  arena.evicted_ = nullptr;       // left over from a parent's thread, or from a throw
  if (result == SlotLock::Result::kTakenFromDead) arena.header_->unsound = 1;
  try {
    arena.put_in_order();
  } catch (...) {  // no memory for a repair: it stays unsound, and the next process repairs it
    arena.lock_.release();
    held_ = false;
  }
}

Arena::Guard::~Guard() {
  if (held_) arena_.lock_.release();
}

Arena::Guard::Guard(Arena& arena, Insist) : Guard(arena, kInsist) {
  if (!held_) {
    throw SegmentError(
        "the cache's lock could not be acquired within 5 s: a process that holds it is stopped, or "
        "there is no memory for a repair; continue or end the process, or free memory");
  }
}

// --- the whole ---

Arena::Arena(Segment segment)
    : segment_(std::move(segment)),
      header_(segment_.header()),
      slot_table_(segment_.at<Slot>(header_->slots_at)),
      entries_(segment_.at<Entry>(header_->entries_at)),
      ranks_(segment_.at<Rank>(header_->ranks_at), header_->blank != 0),
      chunks_(segment_.at<std::uint32_t>(header_->chunks_at)),
      nodes_(segment_.at<Node>(header_->nodes_at)),
      heap_positions_(segment_.at<std::uint32_t>(header_->heap_positions_at)),
      leases_(segment_.at<Lease>(header_->leases_at)),
      blocks_(header_, segment_.at<std::uint64_t>(header_->bitmap_at)),
      blocks_store_(memory_blocks(header_, segment_.at<unsigned char>(header_->data_at),
                                  segment_.descriptor().number())),
      slots_(segment_.descriptor(), slot_table_, [this](std::uint32_t slot) { adopt(slot); }),
      lock_(&header_->lock, slots_) {
  extents_.reserve(kMostExtents + 1);
  list_.reserve(1);
}

Arena::Arena(const Geometry& geometry, const std::string& path) : Arena(create(geometry)) {
  header_->num_regions = 1;
  Region& main = header_->regions[0];
  std::strncpy(main.name, "main", kNameBytes - 1);
  main.budget = header_->capacity;
  main.promote_to = main.ghost = kNone;
  main.ties = main.strict = main.holds_bytes = true;
  lines_[0].members = no_members();
  reset_derived();
  rebuild_leases();
  if (path.empty()) return;
  auto file = std::make_unique<FileBlocks>(header_, path);
  FileBlocks& opened = *file;
  blocks_store_ = std::move(file);
  if (!opened.is_new()) recover_file(opened.holes());
  opened.share();
}

Arena::Arena(int memory, int file) : Arena(attach(memory, file)) {
  if (file >= 0) blocks_store_ = std::make_unique<FileBlocks>(header_, file);
}

View::View(int memory) : arena_(Segment::attach_to_read(memory)) {
  if (arena_.header().on_disk != 0) {
    throw SegmentError("the segment lies on disk: only memory can be shared with other users");
  }
}

Arena::~Arena() {
  if (!slots_.taken()) return;
  try {
    release(INT64_MAX);
  } catch (const SegmentError&) {
    // No slot was free: then there are no leases either.
  }
}

void Arena::check(Ids ids) const {
  for (const std::uint32_t id : ids) {
    if (id >= header_->num_ids) {
      throw ConfigError("id " + std::to_string(id) + " is out of range: give ids from 0 to " +
                        std::to_string(header_->num_ids - 1));
    }
  }
}

// --- regions ---

namespace {

void fill(Region& region, const RegionSpec& spec) {
  std::memset(&region, 0, sizeof(region));
  std::strncpy(region.name, spec.name.c_str(), kNameBytes - 1);
  region.budget = spec.budget;
  region.order = spec.order;
  region.admission = spec.admission;
  region.pop = spec.pop;
  region.visits = spec.visits;
  region.ties = spec.ties;
  region.strict = spec.strict;
  region.holds_bytes = spec.holds_bytes;
  region.promote_to = region.ghost = kNone;
}

void check_name(const RegionSpec& spec) {
  if (spec.name.empty() || spec.name.size() >= kNameBytes) {
    throw ConfigError("region \"" + spec.name + "\": give a name of 1 to " +
                      std::to_string(kNameBytes - 1) + " bytes");
  }
}

// `regions` are those that `region` may name.
void check_links(const Region& region, const Region* regions) {
  const std::string who = std::string("region \"") + region.name + "\": ";
  const bool promotes = region.promote_to != kNone && regions[region.promote_to].holds_bytes;
  if (region.pop == Pop::kPromote && !promotes) {
    throw ConfigError(who + "name the region, one that holds samples, to promote to");
  }
  if (region.ghost != kNone && (!promotes || regions[region.ghost].holds_bytes)) {
    throw ConfigError(who + "a ghost holds no bytes, and what returns from it is promoted");
  }
}

std::vector<Region> resolve(const std::vector<RegionSpec>& specs) {
  std::vector<Region> regions(specs.size());
  const auto index = [&](const std::string& name) {
    std::uint32_t r = 0;
    while (r < specs.size() && specs[r].name != name) ++r;
    if (r == specs.size()) throw ConfigError("there is no region \"" + name + "\" among these");
    return r;
  };
  bool holds_bytes = false;
  for (std::uint32_t r = 0; r < specs.size(); ++r) {
    const RegionSpec& spec = specs[r];
    check_name(spec);
    if (index(spec.name) != r) throw ConfigError("two regions are named \"" + spec.name + "\"");
    fill(regions[r], spec);
    if (!spec.promote_to.empty()) regions[r].promote_to = index(spec.promote_to);
    if (!spec.ghost.empty()) regions[r].ghost = index(spec.ghost);
    holds_bytes = holds_bytes || spec.holds_bytes;
  }
  if (!holds_bytes) throw ConfigError("no region holds samples: give one that does");
  for (const Region& region : regions) check_links(region, regions.data());
  return regions;
}

}  // namespace

std::uint32_t Arena::region(const std::string& name) const {
  std::string known;
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (name == header_->regions[r].name) return r;
    known += (r == 0 ? "" : ", ") + std::string(header_->regions[r].name);
  }
  throw ConfigError("there is no region \"" + name + "\": the regions are " + known);
}

void Arena::configure(const std::vector<RegionSpec>& specs) {
  if (specs.empty() || specs.size() > kMaxRegions) {
    throw ConfigError(std::to_string(specs.size()) + " regions: give 1 to " +
                      std::to_string(kMaxRegions));
  }
  const std::vector<Region> regions = resolve(specs);
  std::uint64_t strict = 0;
  for (const RegionSpec& spec : specs) {
    if (spec.strict && spec.holds_bytes) strict += spec.budget;
  }
  if (strict > header_->capacity) {
    throw ConfigError("the regions' budgets add up to " + std::to_string(strict) +
                      " bytes, more than the capacity of " + std::to_string(header_->capacity));
  }
  const Guard guard(*this, Guard::Insist::kYes);
  std::size_t held = 0;
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (header_->regions[r].holds_bytes) held += header_->regions[r].size;
  }
  if (held > 0 && header_->inserts > 0) {
    throw ConfigError("the arena is not empty: configure it before use");
  }
  std::vector<Node> recovered;
  recovered.reserve(held);  // before any is taken out of its heap
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    for (Heap members = heap(r); members.size() > 0;) {
      const std::uint32_t pos = header_->blank == 0 ? members.size() - 1 : 0;
      if (header_->regions[r].holds_bytes) recovered.push_back(members.at(pos));
      members.remove(pos);
    }
  }
  header_->num_regions = static_cast<std::uint32_t>(regions.size());
  std::copy(regions.begin(), regions.end(), header_->regions);
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    lines_[r] = {may_line_up(regions[r]), 0, 0, no_members()};
  }
  settle_recovered(recovered);
}

// Whether its samples leave in the order in which they came or were used last. A random victim is
// found by its place in a heap, and SIEVE's hand meets those that came after the ones it spared.
bool Arena::may_line_up(const Region& region) const {
  const bool by_time = region.order == Order::kRecency || region.order == Order::kInsertion;
  const bool spares = region.pop == Pop::kRandom || region.pop == Pop::kSieve;
  return header_->blank != 0 && header_->exact != 0 && by_time && !spares;
}

void Arena::add_region(const RegionSpec& spec) {
  check_name(spec);
  const Guard guard(*this, Guard::Insist::kYes);
  if (header_->num_regions == kMaxRegions) {
    throw ConfigError("an arena has at most " + std::to_string(kMaxRegions) + " regions");
  }
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (spec.name == header_->regions[r].name) {
      throw ConfigError("region \"" + spec.name + "\" exists already: give another name");
    }
  }
  const std::uint32_t promote_to = spec.promote_to.empty() ? kNone : region(spec.promote_to);
  const std::uint32_t ghost = spec.ghost.empty() ? kNone : region(spec.ghost);
  Region added{};
  fill(added, spec);
  added.promote_to = promote_to;
  added.ghost = ghost;
  check_links(added, header_->regions);
  if (spec.holds_bytes && spec.strict) {
    Region& main = header_->regions[region("main")];
    if (main.budget < spec.budget || main.bytes > main.budget - spec.budget) {
      throw ConfigError("region \"" + spec.name + "\": " + std::to_string(spec.budget) +
                        " bytes are more than the " + std::to_string(main.budget - main.bytes) +
                        " free in \"main\": add regions before samples, or give less");
    }
    main.budget -= spec.budget;
  }
  header_->regions[header_->num_regions] = added;
  lines_[header_->num_regions] = {false, 0, 0, no_members()};
  ++header_->num_regions;
}

void Arena::resize_region(const std::string& name, std::uint64_t budget) {
  const std::uint32_t r = region(name);
  std::uint64_t others = 0;
  std::uint32_t main = kNone;
  {
    const Guard guard(*this, Guard::Insist::kYes);
    for (std::uint32_t i = 0; i < header_->num_regions; ++i) {
      const Region& other = header_->regions[i];
      if (i == r || !other.strict || !other.holds_bytes) continue;
      if (std::string(other.name) == "main") {
        main = i;
      } else {
        others += other.budget;
      }
    }
    const bool carved = header_->regions[r].strict && header_->regions[r].holds_bytes;
    if (!carved) main = kNone;
    if (carved && (budget > header_->capacity || others > header_->capacity - budget)) {
      throw ConfigError("region \"" + name + "\": " + std::to_string(budget) +
                        " bytes and the other regions' " + std::to_string(others) +
                        " are more than the capacity of " + std::to_string(header_->capacity) +
                        ": shrink another region first");
    }
    header_->regions[r].budget = budget;
    if (main != kNone) header_->regions[main].budget = header_->capacity - others - budget;
  }
  shed(r);
  if (main != kNone) shed(main);
}

std::vector<Region> Arena::regions() {
  const Guard guard(*this);  // as in counters()
  std::vector<Region> all(header_->regions, header_->regions + header_->num_regions);
  for (Region& each : all) each.budget = budget_of(each);
  return all;
}

// --- leases ---

bool Arena::lease(Ids ids, std::int64_t position) {
  check(ids);
  for (; ids.size() > kAtOnce; ids = ids.subspan(kAtOnce)) {
    if (!lease(ids.first(kAtOnce), position)) return false;
  }
  const Guard guard(*this);
  if (!guard) return false;
  leasing_.store(true);
  Slot& mine = slot_table_[slot()];
  for (const std::uint32_t id : ids) {
    const std::uint32_t taken = header_->free_lease;
    if (taken == 0 || ranks_[id].leases.load() == UINT16_MAX) return false;
    Lease& added = leases_[taken - 1];
    header_->free_lease = added.next;
    added = {position, id, 0};
    (mine.lease_head == 0 ? mine.lease_head : leases_[mine.lease_tail - 1].next) = taken;
    mine.lease_tail = taken;
    ranks_[id].leases.fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

void Arena::release(std::int64_t position) {
  Slot& mine = slot_table_[slot()];
  for (bool more = leasing_.load(); more;) {
    const Guard guard(*this);
    if (!guard) return;  // the next release drops these too
    std::size_t dropped = 0;
    more = mine.lease_head != 0;
    while (more && dropped++ < kAtOnce) {
      more = drop_lease(mine, position) && mine.lease_head != 0;
    }
    if (mine.lease_head == 0) leasing_.store(false);
  }
}

// Drops a slot's first lease if it is for a position up to this one.
bool Arena::drop_lease(Slot& owner, std::int64_t position) {
  const std::uint32_t ended = owner.lease_head;
  Lease& lease = leases_[ended - 1];
  if (lease.position > position) return false;
  owner.lease_head = lease.next;
  Rank& rank = ranks_[lease.id];
  const std::uint32_t region = rank.region.load(std::memory_order_relaxed);
  if (rank.leases.fetch_sub(1, std::memory_order_relaxed) == 1 && region != 0 &&
      header_->regions[region - 1].order == Order::kKey) {
    set_key(region - 1, lease.id, rank.key.load(std::memory_order_relaxed));
  }
  lease.next = header_->free_lease;
  header_->free_lease = ended;
  return true;
}

// --- counters ---

std::uint64_t Arena::io_errors() const {
  std::uint64_t sum = 0;
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    sum += slot_table_[s].io_errors.load(std::memory_order_relaxed);
  }
  return sum;
}

Counters Arena::counters() {
  Counters sum{};
  for (std::uint32_t s = 0; s < kMaxSlots; ++s) {
    const Slot& slot = slot_table_[s];
    sum.hits += slot.hits.load(std::memory_order_relaxed);
    sum.misses += slot.misses.load(std::memory_order_relaxed);
    sum.torn += slot.torn.load(std::memory_order_relaxed);
    sum.corrupt += slot.corrupt.load(std::memory_order_relaxed);
    sum.bypassed += slot.bypassed.load(std::memory_order_relaxed);
  }
  sum.io_errors = io_errors();
  // The caller must not hang on a stopped process: without the lock a number may lag behind.
  const Guard guard(*this);
  sum.inserts = header_->inserts;
  sum.evictions = header_->evictions;
  sum.rejected = header_->rejected;
  sum.repairs = header_->repairs;
  sum.reclaimed = header_->reclaimed;
  sum.payload = header_->payload;
  sum.free_blocks = header_->free_blocks;
  for (std::uint32_t r = 0; r < header_->num_regions; ++r) {
    if (header_->regions[r].holds_bytes) sum.entries += header_->regions[r].size;
  }
  return sum;
}

}  // namespace stoker
