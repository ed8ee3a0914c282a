// What lies in a segment: plain structures at fixed offsets, valid in every process that maps it.
//
// Entries and ranks are the only truth. The bitmap, the heaps and the byte counts are derived from
// them and are rebuilt by Arena::repair.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace stoker {

static_assert(std::endian::native == std::endian::little, "the futex word is the low half");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline constexpr std::uint64_t kMagic = 0x31304152454b5453;  // "STKERA01"
inline constexpr std::uint32_t kAbi = 4;
inline constexpr std::uint32_t kFileAbi = 3;  // of what a file holds
inline constexpr std::uint32_t kMaxSlots = 1024;
inline constexpr std::uint32_t kMaxRegions = 16;
inline constexpr std::uint32_t kNameBytes = 24;
inline constexpr std::uint32_t kNone = 0xffffffff;
inline constexpr std::uint32_t kChunkNodes = 1024;

// --- the entry's word: {version:48, owner slot:13, waiters:1, state:2} ---

enum class State : std::uint64_t { kEmpty = 0, kClaimed = 1, kReserved = 2, kReady = 3 };

inline constexpr std::uint64_t kWaiters = 4;

constexpr State state_of(std::uint64_t word) { return static_cast<State>(word & 3); }
constexpr std::uint32_t owner_of(std::uint64_t word) {
  return static_cast<std::uint32_t>((word >> 3) & 0x1fff);
}
constexpr std::uint64_t next_word(std::uint64_t word, State state, std::uint32_t owner) {
  return (((word >> 16) + 1) << 16) | (static_cast<std::uint64_t>(owner) << 3) |
         static_cast<std::uint64_t>(state);
}

// The version, to tell copies of one sample from each other: it takes 2^32 steps to come again.
constexpr std::uint32_t number_of(std::uint64_t word) {
  return static_cast<std::uint32_t>(word >> 16);
}

struct Extent {
  std::uint32_t first;
  std::uint32_t count;
};

// The hot half of a sample: all that a reader needs, never across a cache line.
// Up to two extents are inline. With kSpilled set in extents[1], `extents[1] & ~kSpilled` extents
// are listed in blocks from extents[0] on, and extents[2] is the CRC of that list: a disk may have
// changed it, and blocks are freed by what it says. A blank arena has no extents: there its entries
// have the ranks, so that an access takes one cache line and not two.
struct alignas(16) Entry {
  std::atomic<std::uint64_t> word;
  std::atomic<std::uint32_t> length;
  std::atomic<std::uint32_t> crc;  // of the payload; only segments on disk use it
  std::atomic<std::uint32_t> extents[4];
};
static_assert(sizeof(Entry) == 32);
inline constexpr std::uint32_t kSpilled = 0x80000000;
inline constexpr std::uint32_t kMostExtents = 256;  // of one sample
inline constexpr std::uint32_t kHints = 128;

// The cold half: what eviction needs.
struct Rank {
  std::atomic<double> key;
  std::atomic<std::uint32_t> seat;   // where its place in a heap is noted
  std::atomic<std::uint8_t> region;  // index + 1; 0: in no region
  std::atomic<std::uint8_t> visits;
  std::atomic<std::uint16_t> leases;  // derived from the lease lists
};
static_assert(sizeof(Rank) == 16);
static_assert(sizeof(Rank) == sizeof(Entry::extents));

// The ranks by id: one after the other, or in a blank arena each within its entry.
class Ranks {
 public:
  Ranks(void* base, bool blank) : base_(static_cast<unsigned char*>(base)), bits_(blank ? 5 : 4) {}
  Rank& operator[](std::uint32_t id) const {
    return *reinterpret_cast<Rank*>(base_ + (static_cast<std::uint64_t>(id) << bits_));
  }

 private:
  unsigned char* base_;
  int bits_;  // log2 of the bytes from one to the next
};

// Of samples with equal keys the one whose turn is smallest leaves first. Ids often come class by
// class, and neighbours among them lie far apart here (Fibonacci hashing). The same in every arena,
// since jobs of any seed may share one.
constexpr std::uint32_t turn_of(std::uint32_t id) { return id * 0x9E3779B1u; }
constexpr std::uint32_t id_of(std::uint32_t turn) { return turn * 0x0E8B2F51u; }

static_assert(id_of(turn_of(123456789)) == 123456789);

struct Node {
  std::uint32_t id() const { return id_of(turn); }

  double key;
  std::uint32_t turn;
  std::uint32_t seat;  // of a pool's index i: the node's seat ^ i, so that zeros are in good order
};

enum class Order : std::uint8_t { kKey = 0, kRecency = 1, kFrequency = 2, kInsertion = 3 };
enum class Admission : std::uint8_t { kAlways = 0, kBeatsVictims = 1, kWhileRoom = 2 };
enum class Pop : std::uint8_t {
  kEvict = 0,
  kRandom = 1,
  kSieve = 2,
  kSecondChance = 3,
  kPromote = 4
};

struct Region {
  char name[kNameBytes];
  std::uint64_t budget;  // payload bytes
  std::uint64_t bytes;   // payload bytes held (or remembered, by a ghost)
  std::uint64_t round;   // SIEVE's pass
  std::uint32_t size;    // nodes in the heap
  std::uint32_t promote_to;
  std::uint32_t ghost;
  Order order;
  Admission admission;
  Pop pop;
  std::uint8_t visits;
  bool ties;
  bool strict;
  bool holds_bytes;
};

struct Lease {
  std::int64_t position;
  std::uint32_t id;
  std::uint32_t next;
};

struct alignas(64) Slot {
  std::atomic<std::uint32_t> in_use;
  std::atomic<std::uint32_t> pending;  // claims and reservations; never less than there are
  std::uint32_t lease_head;            // index + 1 into the lease pool; 0: none
  std::uint32_t lease_tail;
  std::atomic<std::uint64_t> hits, misses, torn, corrupt, bypassed, io_errors;
};
static_assert(sizeof(Slot) == 64);

struct Header {
  std::uint64_t magic;
  std::uint32_t abi;
  std::uint32_t num_ids;
  std::uint64_t capacity;  // payload bytes
  std::uint64_t mean_size;
  std::uint32_t block_size;
  std::uint32_t num_blocks;
  std::uint32_t num_chunks;
  std::uint32_t num_leases;
  std::uint64_t slots_at, entries_at, ranks_at, bitmap_at, chunks_at, nodes_at, heap_positions_at,
      leases_at, data_at;
  std::uint64_t total_bytes;   // of the mapping
  std::uint64_t file_data_at;  // segments on disk: where the blocks start in the file
  std::uint8_t on_disk;
  std::uint8_t exact;
  std::uint8_t blank;  // samples have lengths, and no bytes: there are no blocks

  alignas(64) std::atomic<std::uint64_t> clock;
  alignas(64) std::atomic<std::uint32_t> lock;
  std::atomic<std::int64_t> reclaimed_at;  // CLOCK_MONOTONIC nanoseconds

  // Below: only under the lock.
  std::uint32_t unsound;  // what is derived does not agree with the entries: repair before use
  std::uint32_t num_regions;
  std::uint64_t limit;            // payload bytes that fit now, of `capacity`
  std::uint32_t usable_blocks;    // the first; no sample gets one of those behind
  std::uint32_t reserved_blocks;  // the first, which have memory; at least the usable ones
  std::uint32_t free_blocks;      // of the usable ones
  std::uint32_t cursor;           // next fit
  std::uint32_t hints[kHints];    // where large runs became free lately; the bitmap knows better
  std::uint32_t next_hint;
  std::uint32_t free_chunks;
  std::uint32_t free_lease;  // index + 1
  std::uint64_t payload;
  std::uint64_t generation;
  std::uint64_t random;
  std::uint64_t inserts, evictions, rejected, repairs, reclaimed;
  Region regions[kMaxRegions];
};

}  // namespace stoker
