// A cache of samples that processes share: dense ids in, bytes out.
//
// Readers take no lock: they copy a sample out and then check that its version has not changed.
// Writers reserve blocks under one timed lock, copy outside it and publish. The lock's owner may
// die at any instruction: entries and ranks are the truth, the rest is rebuilt from them.
//
// Every method may be called from any thread of any process. Ids are checked (ConfigError).
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "stoker/block_store.h"
#include "stoker/blocks.h"
#include "stoker/heap.h"
#include "stoker/layout.h"
#include "stoker/segment.h"
#include "stoker/slot_lock.h"
#include "stoker/slots.h"

namespace stoker {

struct Sample {
  const void* data;
  std::uint64_t size;
};

struct RegionSpec {
  std::string name;
  std::uint64_t budget = 0;
  Order order = Order::kKey;
  Admission admission = Admission::kAlways;
  bool ties = true;
  Pop pop = Pop::kEvict;
  std::uint8_t visits = 0;
  std::string promote_to;  // empty: nowhere
  std::string ghost;       // empty: none
  bool strict = true;
  bool holds_bytes = true;
};

// Samples that a put evicted, for a tier below: sample i is data[offsets[i]] to data[offsets[i +
// 1]].
struct Evicted {
  std::vector<std::uint32_t> ids;
  std::vector<double> keys;  // by which they were ordered
  std::vector<std::int64_t> offsets{0};
  std::vector<unsigned char> data;
};

struct Counters {
  std::uint64_t hits, misses, torn, corrupt, bypassed, io_errors, inserts, evictions, rejected,
      repairs, reclaimed, payload, entries, free_blocks;
};

class Arena {
 public:
  // An empty path makes a segment in memory, any other a file; what the file holds is recovered.
  Arena(const Geometry& geometry, const std::string& path);
  // Joins a segment by its descriptors (file < 0: a segment in memory). Takes both over.
  Arena(int memory, int file);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  using Ids = std::span<const std::uint32_t>;

  // --- reading ---
  struct Snapshot {
    std::uint64_t word;
    std::uint32_t length;
  };
  // Looks at each id and returns the bytes that get() needs at most.
  std::uint64_t measure(Ids ids, Snapshot* snapshots) const;
  // Copies samples out one after another; offsets has one more element than ids. A sample that is
  // not there has no bytes. Returns the bytes written.
  std::uint64_t get(Ids ids, const Snapshot* snapshots, unsigned char* out, std::int64_t* offsets,
                    bool* found);
  // The same, but that nothing is written: no access is noted, and a damaged copy stays.
  std::uint64_t peek(Ids ids, const Snapshot* snapshots, unsigned char* out, std::int64_t* offsets,
                     bool* found) const;
  void contains(Ids ids, bool* found) const;
  // Writes where in `ids` those are that are not there now, and that `marks` (by id, see marks.h)
  // say were not marked with this stamp; returns how many. `places` has room for all.
  std::size_t find_lacking(Ids ids, std::span<const std::uint32_t> marks, std::uint32_t stamp,
                           std::int64_t* places) const;

  // --- writing ---
  struct Placing {
    std::uint32_t region;
    std::uint32_t overflow = kNone;  // where a sample goes that the region rejects
    const double* keys = nullptr;    // one an id, for regions of order kKey
    Evicted* evicted = nullptr;      // gets a copy of what had to leave
  };
  // The claim of a sample that is rejected everywhere is released. One that is there already stays
  // in its region, whichever is asked for: only move() and a region's own rules change that.
  void put(Ids ids, const Sample* samples, const Placing& placing, bool* admitted);
  // Reserves room as put() does, for samples whose bytes the caller brings to their place, those of
  // room_of(); of `samples` only the sizes count. What is not reserved keeps its claim. Each one
  // that is, is settled once: it is there from then on, or given up. Only in memory.
  void reserve_rooms(Ids ids, const Sample* samples, const Placing& placing, bool* reserved);
  std::vector<std::span<unsigned char>> room_of(std::uint32_t id);
  bool settle(std::uint32_t id, bool is_written);
  // What a store does with a run of accesses, `at_once` at a time: get, then claim and put what was
  // missed. For a blank arena.
  struct Run {
    std::span<const std::int64_t> lengths;  // by id, or one for all
    const double* keys = nullptr;           // one an access: of a sample that is put, and of one
                                            // that was found unless there are keys `after`
    const double* scores = nullptr;         // by id: in place of `keys`, for what is put, the score
    const std::int32_t* seen = nullptr;     // of each sample that was seen; see score_key()
    const double* after = nullptr;          // one an access, set when its batch is over
    const std::uint8_t* regions = nullptr;  // one an access, where it goes; else all to `entrance`
    std::uint32_t entrance;
    std::uint32_t overflow = kNone;
    std::size_t at_once;
    const std::int64_t& length_of(std::uint32_t id) const {
      return lengths[lengths.size() == 1 ? 0 : id];
    }
  };
  // hits[i]: whether the access needed no put; of several misses of a sample in a batch the first.
  void replay(Ids ids, const Run& run, bool* hits);
  // What decides who stands in for samples that are not cached, where each one is served once an
  // epoch (stoker.store.substitutes.OnceEach, marks.h). Arrays are by id.
  struct OnceEach {
    std::span<std::uint32_t> served;       // the stamp of the epoch in which it was served last
    std::span<std::uint32_t> turns;        // on whose turn, of those served in this epoch
    std::uint32_t stamp = 0;               // of this epoch
    const std::uint8_t* places = nullptr;  // the region of each; null: all in `entrance`
    std::uint8_t place = 0;                // of those that take part
    // 1: it came with a package, as only those that take part do; with `make_room`
    std::uint8_t* packaged = nullptr;
    std::int64_t room = 0;  // bytes of those that take part, served when `make_room` is due
    // Returns samples that may stand in, valid until the next call, none where there are no more;
    // told how many accesses of the run have begun.
    std::function<Ids(std::size_t)> search;
    Ids candidates{};  // what it returned last, as far as it was not used
    // Brings what fits where samples were; told who was served since, returns the next `room`.
    std::function<std::int64_t(std::vector<std::uint32_t>&)> make_room;
    std::vector<std::uint32_t> gone{};  // those that take part and that the cache has served since
  };
  enum class How : std::int8_t { kHit, kSubstituted, kFetched, kPackaged };
  // The same as replay(), but that samples stand in for others: served[i] is what access i got.
  // Those that do not take part are asked for once.
  // With keys `after`, `keys` are for puts only; what stands in for others may have none.
  void replay_once_each(Ids ids, const Run& run, OnceEach& once, std::uint32_t* served, How* how);
  // Who is served for samples that are missed.
  struct StandIns {
    // By id: the number of a key sample's copy, times 2^32, plus the key sample. That serves while
    // this copy of it is in the region; 0: none does.
    std::span<const std::uint64_t> serves;
    std::uint32_t region;
  };
  // The same for one batch, where stand-ins are got in place of samples that are missed, and those
  // are not put. Keys are those of samples that are put. served[i]: which sample the access got.
  void replay_batch(Ids batch, const Run& run, const StandIns& stand_ins, std::uint32_t* served,
                    bool* hits);
  void discard(Ids ids);
  // Only those in this region that no process leases.
  void discard_from(std::uint32_t region, Ids ids);
  void set_keys(Ids ids, const double* keys);
  void keys(Ids ids, double* keys) const;

  // --- single flight ---
  void claim(Ids ids, bool* claimed);
  void abandon(Ids ids);
  // Whether some are claimed, and those that are not are there.
  bool are_coming(Ids ids) const;
  // True where the sample is there now; false where its claimant gave up, died or took too long.
  void wait(Ids ids, std::int64_t timeout_ns, bool* found);

  // --- leases: a leased sample is not evicted ---
  // False when the pool of leases is used up or the lock could not be acquired.
  bool lease(Ids ids, std::int64_t position);
  // Drops this process's leases taken for positions up to this one; when the lock cannot be
  // acquired, the next call does.
  void release(std::int64_t position);

  // --- places ---
  // Moves samples to another region; none of their bytes is copied. The region admits them or not
  // by its rules, as in a put. moved[i]: whether it is in that region now. Without keys, one keeps
  // its key if both regions are ordered by keys, and counts as inserted now if not.
  void move(std::uint32_t region, Ids ids, const double* keys, bool* moved);
  static constexpr std::uint8_t kNowhere = 255;
  // Each sample's region, kNowhere if it is not there; takes no lock.
  void where(Ids ids, std::uint8_t* regions) const;
  // Which copy of each sample is in a region: a number that grows each time the sample is put
  // there again; 0 if it is not there. Takes no lock.
  void copies(Ids ids, std::uint32_t region, std::uint32_t* numbers) const;
  // The samples in a region, by id. Of a large region, what is added or removed during the call may
  // or may not be in it.
  std::vector<std::uint32_t> list(std::uint32_t region);

  // --- regions ---
  // Replaces all regions of an arena into which nothing was put. What its file held goes to the
  // first of them that holds samples, oldest first to leave; what that has no budget for is
  // evicted.
  void configure(const std::vector<RegionSpec>& specs);
  // Carves a region out of "main".
  void add_region(const RegionSpec& spec);
  // Evicts what is over the new budget. "main" gives or takes the difference where there is one.
  // If the lock cannot be held for long enough, puts evict the rest, as they need room.
  void resize_region(const std::string& name, std::uint64_t budget);
  // Redivides what these strict regions have together, in proportion to `shares`; the first
  // gets what rounding leaves. At once, so that callers at the same time agree. Evicts what is over
  // a budget, as resize_region.
  void divide(const std::vector<std::string>& names, const std::vector<double>& shares);
  // Lets no more than so many payload bytes fit, in the same proportions, until the next call.
  // What is over that is evicted, and the memory or disk behind given back to the system, or taken
  // again. Samples move out of what is given back, or are evicted once it is later than `deadline`;
  // some of it changes hands then, too, and another call does the rest.
  // Returns what room() does: more than meant where a sample is being written there, which another
  // call mends, or where the file system takes nothing back; less where the system has none.
  std::uint64_t limit(std::uint64_t bytes, std::int64_t deadline = INT64_MAX);
  // Bytes of memory that the segment takes now.
  std::uint64_t memory();
  // The same, or of one on disk the bytes that its file takes there.
  std::uint64_t room();
  std::uint32_t region(const std::string& name) const;
  std::vector<Region> regions();  // with the budgets that they have now

  // --- care ---
  Counters counters();
  // Failed reads and writes of the disk, of all processes; takes no lock.
  std::uint64_t io_errors() const;
  // Checks every invariant; throws SegmentError with the first that does not hold.
  void verify();
  // Takes back what dead processes held.
  void reclaim();

  const Header& header() const { return *header_; }
  int memory_descriptor() const { return segment_.descriptor().number(); }
  int file_descriptor() const { return blocks_store_->descriptor(); }

 private:
  friend class View;
  explicit Arena(Segment segment);

  static constexpr std::size_t kAtOnce = 1024;  // small steps under one lock
  enum class Reserved { kTaken, kPresent, kRefused };
  class Guard;
  struct Victim {
    std::uint32_t id;
    double key;
  };

  std::uint32_t slot() { return slots_.mine(); }
  void check(Ids ids) const;
  double tick() { return static_cast<double>(advance(1) + 1); }
  // A blank arena is one thread's: locked instructions, each of which waits for the stores before
  // it, would take most of its time. These three have none there.
  std::uint64_t advance(std::uint64_t ticks) {
    if (header_->blank == 0) return header_->clock.fetch_add(ticks);
    const std::uint64_t before = header_->clock.load(std::memory_order_relaxed);
    header_->clock.store(before + ticks, std::memory_order_relaxed);
    return before;
  }
  bool exchange(Entry& entry, std::uint64_t& word, std::uint64_t next) {
    if (header_->blank == 0) {
      return entry.word.compare_exchange_weak(word, next, std::memory_order_acq_rel);
    }
    entry.word.store(next, std::memory_order_relaxed);
    return true;
  }
  // Counts claims and reservations; of a blank arena no process is left to take them back.
  void pend(std::uint32_t slot, std::int32_t change) {
    if (header_->blank != 0) return;
    slot_table_[slot].pending.fetch_add(static_cast<std::uint32_t>(change));
  }
  Heap heap(std::uint32_t region) {
    Line* const line = header_->blank == 0 ? nullptr : &lines_[region];
    return {header_, region, chunks_, nodes_, heap_positions_, ranks_, line};
  }
  std::vector<std::uint32_t> list_by_line(std::uint32_t region) const;
  // A bit for each id, where a line keeps them.
  std::vector<std::uint64_t> no_members() const {
    return std::vector<std::uint64_t>(header_->blank == 0 ? 0 : header_->num_ids / 64 + 1);
  }
  bool may_line_up(const Region& region) const;
  std::uint32_t blocks_of(std::uint64_t length) const;

  // reading (arena_read.cpp)
  enum class Read { kAbsent, kTorn, kDamaged, kUnreadable, kWhole };
  Read read(std::uint32_t id, Snapshot snapshot, unsigned char* out) const;
  void expect(Snapshot snapshot, std::uint32_t id) const;
  bool copy_out(const Entry& entry, std::uint32_t length, unsigned char* out) const;
  bool load_extents(const Entry& entry, std::vector<Extent>& extents, Extent* list) const;
  void touch(std::uint32_t id, std::uint64_t now);
  void rekey(Ids ids, const double* keys, const bool* which);
  void set_key(std::uint32_t region, std::uint32_t id, double key);

  // replaying (arena_replay.cpp)
  void check_replay(Ids ids) const;
  void look(Ids batch, bool* found);
  class Chooser;
  void fetch(const Chooser& chosen, const Run& run, const double* keys, How* how);
  void fetch_open(const Chooser& chosen, const Run& run, const double* keys, How* how);
  void fetch_apart(const Chooser& chosen, const Run& run, const double* keys, std::uint32_t target,
                   How* how);
  void note_packaged(const Chooser& chosen, const Run& run, OnceEach& once, How* how);
  void check_keys(const Run& run, const OnceEach& once) const;
  std::uint32_t stand_in_for(std::uint32_t id, const StandIns& by) const;
  std::vector<std::uint32_t> stand_in(Ids batch, const StandIns& by, std::uint32_t* served,
                                      bool* found);
  void put_missed(Ids batch, std::size_t begin, const Run& run,
                  const std::vector<std::uint32_t>& missed, bool* found);

  // writing (arena_write.cpp)
  Reserved reserve(std::uint32_t id, std::uint64_t length, const double* key, std::uint32_t region);
  bool allocate(Entry& entry, std::uint32_t count);
  bool write(std::uint32_t id, const Sample& sample);
  bool publish(std::uint32_t id);
  void check(const Placing& placing) const;
  template <typename Do>
  void in_parts(Ids ids, const Sample* samples, const Placing& placing, Do do_some);
  void put_some(Ids ids, const Sample* samples, const Placing& placing, bool* admitted);
  void put_unclaimed(Ids ids, const Sample* samples, const Placing& placing);
  void reserve_some(Ids ids, const Sample* samples, const Placing& placing, Reserved* reserved);
  Reserved place(std::uint32_t id, std::uint64_t length, const double* key, const Placing& placing);
  bool undo(std::uint32_t id);
  void finish_undo();
  void set_word(Entry& entry, State state, std::uint32_t owner);
  bool give_back(std::uint32_t id);
  double first_key(const Region& region, const double* key) {
    return first_key(region, key, tick());
  }
  double first_key(const Region& region, const double* key, double now) const;

  // places (arena_place.cpp)
  bool move_one(std::uint32_t region, std::uint32_t id, const double* key);
  void shed(std::uint32_t region);
  bool shed_some(std::uint32_t region);
  void settle_room(std::int64_t deadline);
  void vacate(std::uint32_t usable, std::int64_t deadline);
  std::uint64_t budget_of(const Region& region) const;
  bool move_down(std::uint32_t id, std::uint32_t usable, bool may_keep);
  bool is_behind(const Entry& entry, std::uint32_t usable) const;
  bool reserve_again(std::uint32_t id);
  bool grow_some();
  bool shrink_some();
  std::uint32_t piece_from(std::uint32_t block, std::uint32_t most) const;

  // eviction (eviction.cpp)
  bool make_room(std::uint32_t region, std::uint64_t length, const double* key,
                 std::uint32_t* newcomer = nullptr);
  struct Excess {
    std::uint64_t bytes = 0;
    std::uint64_t blocks = 0;
    bool covers(const Excess& other) const {
      return bytes >= other.bytes && blocks >= other.blocks;
    }
  };
  Excess excess(const Region& region, std::uint64_t length) const;
  bool fits(const Region& region, std::uint64_t length) const {
    return Excess{}.covers(excess(region, length));
  }
  bool evict_for(std::uint32_t region);
  // A newcomer of a lesser key that takes more than the room is sure to be rejected.
  struct Bar {
    double key;
    std::uint64_t room;
  };
  Bar bar_of(std::uint32_t region);
  bool beats_victims(std::uint32_t region, std::uint64_t length, double key,
                     std::uint32_t* newcomer);
  bool beats_popped(std::uint32_t region, std::uint64_t length, double key);
  bool next_victim(std::uint32_t region, Victim& victim);
  void expect(std::uint32_t id) const;
  void expect_victims(const Heap& members) const;
  bool take_in(std::uint32_t region, std::uint32_t id, double key);
  bool random_victim(std::uint32_t region, Victim& victim);
  void expect_random(const Heap& members, std::uint32_t size) const;
  bool settled(std::uint32_t region, Heap& members, bool at_once, int& steps);
  bool promote(std::uint32_t region, std::uint32_t id);
  bool enlist(std::uint32_t region, std::uint32_t id, double key);
  void evict(std::uint32_t region, std::uint32_t id);
  void keep_copy(std::uint32_t id, std::uint32_t length);
  bool evict_one(std::uint32_t region);
  void remember(std::uint32_t ghost, std::uint32_t id);
  void forget(std::uint32_t id);
  bool evictable(std::uint32_t id) const;
  void free_blocks(const Entry& entry);
  void drop(std::uint32_t id);

  // care (recovery.cpp)
  void put_in_order();
  void adopt(std::uint32_t slot);
  void repair();
  void reset_derived();
  void readmit(std::uint32_t id);
  std::uint32_t first_holder() const;
  bool mark_all(const std::vector<Extent>& extents);
  void reclaim_slots(const std::bitset<kMaxSlots>& dead);
  void reclaim_dead();
  void recover_file(const std::vector<Hole>& holes);
  bool recover(const Record& record, const std::vector<Hole>& holes);
  void take_room();
  void give_back_behind();
  void settle_recovered(const std::vector<Node>& recovered);
  bool drop_lease(Slot& owner, std::int64_t position);
  void drop_leases(std::uint32_t slot);
  void rebuild_leases();

  Segment segment_;
  Header* header_;
  Slot* slot_table_;
  Entry* entries_;
  Ranks ranks_;
  std::uint32_t* chunks_;
  Node* nodes_;
  std::uint32_t* heap_positions_;
  Lease* leases_;
  Line lines_[kMaxRegions];  // of a blank arena
  Blocks blocks_;
  std::unique_ptr<BlockStore> blocks_store_;
  Slots slots_;
  SlotLock lock_;
  // Scratch, under the lock. The first two never grow, so that nothing is lost for want of memory.
  std::vector<Extent> extents_;
  std::vector<Extent> list_;  // where the extents of one sample are listed
  std::vector<Node> victims_;
  std::vector<Node> reached_;
  Evicted* evicted_ = nullptr;        // of the put that holds the lock
  std::atomic<bool> leasing_{false};  // false: this process has no leases
  std::atomic<std::int64_t> stalled_until_{0};
  std::mutex undone_mutex_;
  std::vector<std::uint32_t> undone_;  // reservations to give back at the next lock
  std::atomic<bool> any_undone_{false};
};

// An arena of another user's that this process may only read, by a descriptor that is open to read.
class View {
 public:
  // Takes the descriptor over. Throws SegmentError for a segment on disk and for what is none.
  explicit View(int memory);
  const Arena& arena() const { return arena_; }

 private:
  const Arena arena_;
};

// Holds the arena's lock, repaired and swept if need be; false when it could not be acquired in
// time.
class Arena::Guard {
 public:
  static constexpr std::int64_t kWait = 50'000'000;
  enum class Insist { kYes };
  explicit Guard(Arena& arena) : Guard(arena, kWait) {}
  // For operations that cannot be skipped: waits longer, then throws SegmentError.
  Guard(Arena& arena, Insist);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  explicit operator bool() const { return held_; }

 private:
  Guard(Arena& arena, std::int64_t timeout_ns);

  Arena& arena_;
  bool held_;
};

}  // namespace stoker
