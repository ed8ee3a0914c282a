// What the placement daemon and the shim share: the table of placed files (written by the daemon
// alone, mapped read-only by every program), the counters (written by the programs), and the
// requests (from the programs to the daemon).
//
// The environment variable STOKER_TIERING names the run's directory, which holds
//   table      the header, then entries, indexes and strings, as below
//   counters   struct stoker_counters, then struct stoker_ring
//   socket     the daemon's datagram socket; its full path is at most 107 bytes long
//
// A request is a struct stoker_request and a path. It lies in the ring of the counters, which the
// daemon empties some times a second: a program that opens 100,000 small files pays some dozen
// nanoseconds for each. What should not wait for that goes to the socket, and to the ring if the
// socket's queue is full: files for which the program waits; large ones, which it will read from
// their copies while they are made; and files whose opening took long. With these travels a
// descriptor (SCM_RIGHTS), so that the storage is not asked to open them a second time, and what
// both read is in the page cache once. A full ring loses requests; they come again.
// All numbers are of the machine's own order. Times are nanoseconds of CLOCK_MONOTONIC, except a
// file's own times, which are nanoseconds since 1970.
//
// The daemon's duties, on which the shim relies:
// - `magic` of either file is written last. Every byte is written, as a zero at least, before it is
//   published, because a hole in a full tmpfs would be a SIGBUS in the program. Files never shrink.
// - It holds an open-file-description lock of the whole table as long as it lives.
// - Words marked atomic are written whole: through numpy, or memoryview.cast("I" or "Q"), never by
//   struct.pack_into("<..."), which writes byte by byte. What they publish is written before them.
// - An entry describes one version of one source file. Its path and its source_* fields never
//   change once an index points to it: a changed source gets a new entry, the old one is `dropped`.
//   tier and copy_ino change only while the entry is `wanted`.
// - A copy is complete, has the source's size and exactly the source's mtime, and never changes.
//   It lies at copy_dirs[source][tier] + "/" + the entry's path; while it is being copied, at
//   tiers[tier].part_dir + "/" + the entry's number in decimal, renamed before it is `placed`.
// - Copies are readable by the daemon's user only.
// - Only regular files have entries; an `opened` of a directory or of nothing gets no answer.
// - Every `opened` of a regular file is answered by an entry, `refused` if need be (then the
//   source_* fields may be 0), and soon if it came by the socket: the program may wait for it.
// - It looks at the source of every placed file from time to time and drops those that changed:
//   programs open copies without a look.
// - Empty files are rejected (a file of unknown length may call itself empty), and so, for the
//   moment, are files changed within the last seconds (a second change would not show in the
//   mtime).
// - After each change of an entry (and of `copied`, every MiB or so), changes[hash % 64] goes up by
//   one and is woken (FUTEX_WAKE). Waiters look again every millisecond at the latest anyway.
//
// Hash of a file: crc32 as in zlib over the bytes of the path relative to its source, started with
// the source's number: zlib.crc32(path, source). An index of 2^k slots of 4 bytes begins 4 * 2^k
// bytes after the index's offset, so that the next size lies beside it while it is being filled and
// the old one can be given back (FALLOC_FL_PUNCH_HOLE) afterwards. A slot holds an entry's number
// plus one, 0 is empty; collisions go to the next slot, around the end; at least a quarter is
// empty.
//   path index, first slot:  (hash * 0x9E3779B1 mod 2^32) >> (32 - k)
//   copy index, first slot:  (copy_ino * 0x9E3779B97F4A7C15 mod 2^64) >> (64 - k)
#pragma once

#include <stddef.h>
#include <stdint.h>

#define STOKER_TABLE_MAGIC "STOKERT1"
#define STOKER_COUNTERS_MAGIC "STOKERC2"
#define STOKER_TABLE_VERSION 2u
#define STOKER_REQUEST_MAGIC 0x4d544b53u  // "SKTM"
#define STOKER_MAX_SOURCES 8              // also spellings of one source's path
#define STOKER_MAX_TIERS 8
#define STOKER_BUCKETS 64
#define STOKER_SHARDS 64
#define STOKER_MARKS 65536
#define STOKER_RING_BYTES 4194304  // a power of two

enum stoker_state {
  STOKER_WANTED = 1,   // accepted, waiting for a copier
  STOKER_COPYING = 2,  // its first `copied` bytes can be read from the part file
  STOKER_PLACED = 3,   // complete
  STOKER_REFUSED = 4,  // fits nowhere, or failed too often: read the source, do not ask again
  STOKER_DROPPED = 5,  // the source changed: the copy is gone, or will be
};

struct stoker_string {  // 16 bytes; the bytes lie in the arena and are followed by a NUL
  uint64_t offset;      // from the arena's begin
  uint32_t length;      // without the NUL
  uint32_t zero;
};

// Copies are served only as long as the path leads to the directory that it led to at the start: a
// link may be switched, a directory renamed, another one mounted over it in the program's
// namespace.
struct stoker_source {        // 40 bytes
  struct stoker_string path;  // absolute, without a slash at its end
  uint64_t dev;               // st_dev of the directory
  uint64_t ino;               // its st_ino
  uint32_t number;            // rows with the same number are spellings of one source
  uint32_t zero;
};

struct stoker_tier {              // 24 bytes
  struct stoker_string part_dir;  // absolute
  uint64_t dev;                   // st_dev of files made in it
};

struct stoker_entry {     // 128 bytes
  uint32_t word;          // atomic: state + 256 * number of changes of state so far
  uint8_t tier;           // valid while copying, placed or dropped
  uint8_t source;         // the source's number
  uint16_t link;          // 1: the path itself is a symbolic link (O_NOFOLLOW must fail)
  uint32_t hash;          // of the path, as above
  uint32_t path_length;   // at least 1
  uint64_t path_offset;   // relative to the source; as in stoker_string
  uint64_t copied;        // atomic: bytes
  uint64_t validated_ns;  // atomic: when the daemon last saw the source unchanged
  uint64_t copy_ino;      // valid while copying, placed or dropped
  uint64_t source_dev;
  uint64_t source_ino;
  uint32_t source_mode;
  uint32_t source_nlink;
  uint32_t source_uid;
  uint32_t source_gid;
  uint64_t source_size;    // bytes
  uint64_t source_blocks;  // of 512 bytes
  int64_t source_atime_ns;
  int64_t source_mtime_ns;
  int64_t source_ctime_ns;
  uint32_t source_blksize;
  uint32_t zero;
};

struct stoker_table {  // 4096 bytes, the beginning of the file
  char magic[8];
  uint32_t version;
  uint32_t zero;
  uint64_t bytes;  // length of the file; all of it is mapped, most of it may be a hole
  uint64_t entries_offset;
  uint64_t entries_limit;
  uint64_t path_index_offset;
  uint64_t copy_index_offset;
  uint64_t arena_offset;
  uint64_t arena_limit;
  uint32_t index_limit_log2;  // the largest k either index has room for, at most 30
  uint32_t zero1;
  uint64_t small_bytes;   // the first open of a file up to this size waits for its copy
  uint64_t ahead_bytes;   // a read this far beyond `copied`, or nearer, waits for it
  uint32_t wait_ms;       // the longest wait without progress
  uint32_t heartbeat_ms;  // a daemon silent for longer counts as gone, lock or not
  uint32_t source_count;  // rows of `sources`
  uint32_t tier_count;
  struct stoker_source sources[STOKER_MAX_SOURCES];
  struct stoker_tier tiers[STOKER_MAX_TIERS];
  struct stoker_string copy_dirs[STOKER_MAX_SOURCES][STOKER_MAX_TIERS];  // [number][tier]
  uint64_t large_bytes;      // files above are read from their copies while they are made
  uint64_t mount_namespace;  // st_ino of the daemon's /proc/self/ns/mnt, 0 where it is unknown. In
                             // another one parts of the source may be other directories: there each
                             // open of a copy looks at the source first
  char pad1[128];
  uint64_t heartbeat_ns;     // atomic; 0 after an orderly end
  uint64_t arena_used;       // atomic: bytes
  uint32_t entry_count;      // atomic
  uint32_t path_index_log2;  // atomic
  uint32_t copy_index_log2;  // atomic
  uint32_t daemon_pid;
  char pad2[32];
  uint32_t changes[STOKER_BUCKETS];  // atomic; futex words
  char pad3[1984];
};

// Any number of programs add to the counters with relaxed atomics; the sum over the shards counts.
// Row 0 is the source, row 1 + t is tier t. Reads through stdio buffers, mmap, sendfile and the
// like happen where no shim can see them and are not in `reads` and `bytes`.
struct stoker_row {
  uint64_t opens;
  uint64_t reads;  // calls
  uint64_t bytes;
};

struct stoker_shard {  // 320 bytes
  struct stoker_row rows[1 + STOKER_MAX_TIERS];
  uint64_t requests;       // sent
  uint64_t requests_lost;  // the daemon's queue was full, or there was no daemon
  uint64_t waits;          // opens and reads that waited for a copy
  uint64_t waits_given_up;
  uint64_t checks;     // looks at the source before a copy was opened
  uint64_t changes;    // of them: the source had changed
  uint64_t elsewhere;  // opens that found another directory at the source's path
  char pad[48];
};

// Records lie one behind the other, around the end, each at a multiple of 8 bytes: a stamp, which
// is one more than the number of bytes before it since the beginning, then the request and the
// path. A program claims room by raising `head` (not beyond `tail` plus the ring's size), and
// writes the stamp last. One that is killed in between holds up the daemon for a second, and what
// was claimed in the meantime is lost. The daemon believes nothing: a path must have its request's
// hash.
struct stoker_ring {
  uint64_t head;  // atomic: bytes ever claimed
  char pad1[56];
  uint64_t tail;  // atomic: bytes the daemon is done with
  char pad2[56];
  uint64_t words[STOKER_RING_BYTES / 8];
};

// A mark is the time until which what it stands for may have been changed by a program under the
// shim, its lowest bits being flags. It stands for all files whose names, or whose inodes, have its
// number; `all` stands for every file. An entry is in doubt unless its validated_ns is later than
// its marks: then programs look at the source before they use the copy, and ask the daemon to.
enum stoker_mark_flags {
  STOKER_WRITING = 1,           // a program has it open for writing: its copy is not used
  STOKER_WRITING_FOR_EVER = 2,  // and it cannot be known when that ends
  STOKER_MARK_FLAGS = 3,
};

struct stoker_counters {
  char magic[8];
  uint64_t marked;  // atomic: 0 as long as no mark is set
  uint64_t all;     // atomic
  char pad[40];
  uint64_t marks[STOKER_MARKS];  // atomic
  struct stoker_shard shards[STOKER_SHARDS];
};

enum stoker_request_kind {
  STOKER_OPENED = 1,   // `path` was opened for reading and has no entry: it wants to be placed
  STOKER_CHANGED = 2,  // the source of `entry` is another file now or may be, or the copy is not
                       // what the entry says: look at them; if so drop the copy, place it again
};

struct stoker_request {  // 16 bytes, then path_length bytes of the path, without a NUL
  uint32_t magic;
  uint8_t kind;
  uint8_t source;
  uint16_t path_length;
  uint32_t entry;  // 0xffffffff in `opened`
  uint32_t hash;
};

#define STOKER_AT(type, member, offset) \
  _Static_assert(offsetof(struct type, member) == (offset), #type "." #member)
#define STOKER_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type)

STOKER_SIZE(stoker_string, 16);
STOKER_SIZE(stoker_source, 40);
STOKER_SIZE(stoker_tier, 24);
STOKER_SIZE(stoker_entry, 128);
STOKER_AT(stoker_entry, word, 0);
STOKER_AT(stoker_entry, tier, 4);
STOKER_AT(stoker_entry, source, 5);
STOKER_AT(stoker_entry, link, 6);
STOKER_AT(stoker_entry, hash, 8);
STOKER_AT(stoker_entry, path_length, 12);
STOKER_AT(stoker_entry, path_offset, 16);
STOKER_AT(stoker_entry, copied, 24);
STOKER_AT(stoker_entry, validated_ns, 32);
STOKER_AT(stoker_entry, copy_ino, 40);
STOKER_AT(stoker_entry, source_dev, 48);
STOKER_AT(stoker_entry, source_ino, 56);
STOKER_AT(stoker_entry, source_mode, 64);
STOKER_AT(stoker_entry, source_nlink, 68);
STOKER_AT(stoker_entry, source_uid, 72);
STOKER_AT(stoker_entry, source_gid, 76);
STOKER_AT(stoker_entry, source_size, 80);
STOKER_AT(stoker_entry, source_blocks, 88);
STOKER_AT(stoker_entry, source_atime_ns, 96);
STOKER_AT(stoker_entry, source_mtime_ns, 104);
STOKER_AT(stoker_entry, source_ctime_ns, 112);
STOKER_AT(stoker_entry, source_blksize, 120);
STOKER_SIZE(stoker_table, 4096);
STOKER_AT(stoker_table, version, 8);
STOKER_AT(stoker_table, bytes, 16);
STOKER_AT(stoker_table, entries_offset, 24);
STOKER_AT(stoker_table, entries_limit, 32);
STOKER_AT(stoker_table, path_index_offset, 40);
STOKER_AT(stoker_table, copy_index_offset, 48);
STOKER_AT(stoker_table, arena_offset, 56);
STOKER_AT(stoker_table, arena_limit, 64);
STOKER_AT(stoker_table, index_limit_log2, 72);
STOKER_AT(stoker_table, small_bytes, 80);
STOKER_AT(stoker_table, ahead_bytes, 88);
STOKER_AT(stoker_table, wait_ms, 96);
STOKER_AT(stoker_table, heartbeat_ms, 100);
STOKER_AT(stoker_table, source_count, 104);
STOKER_AT(stoker_table, tier_count, 108);
STOKER_AT(stoker_table, sources, 112);
STOKER_AT(stoker_table, tiers, 432);
STOKER_AT(stoker_table, copy_dirs, 624);
STOKER_AT(stoker_table, large_bytes, 1648);
STOKER_AT(stoker_table, mount_namespace, 1656);
STOKER_AT(stoker_table, heartbeat_ns, 1792);
STOKER_AT(stoker_table, arena_used, 1800);
STOKER_AT(stoker_table, entry_count, 1808);
STOKER_AT(stoker_table, path_index_log2, 1812);
STOKER_AT(stoker_table, copy_index_log2, 1816);
STOKER_AT(stoker_table, daemon_pid, 1820);
STOKER_AT(stoker_table, changes, 1856);
STOKER_SIZE(stoker_row, 24);
STOKER_SIZE(stoker_shard, 320);
STOKER_AT(stoker_shard, requests, 216);
STOKER_AT(stoker_counters, marked, 8);
STOKER_AT(stoker_counters, all, 16);
STOKER_AT(stoker_counters, marks, 64);
STOKER_AT(stoker_counters, shards, 524352);
STOKER_AT(stoker_shard, elsewhere, 264);
STOKER_SIZE(stoker_counters, 544832);
STOKER_SIZE(stoker_ring, 128 + STOKER_RING_BYTES);
STOKER_SIZE(stoker_request, 16);
