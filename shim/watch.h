// Which descriptors were opened under a source, by number. Advisory: the program may have closed
// one and opened another under its number unseen, so code that serves bytes checks the file itself.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { WATCHED_DESCRIPTORS = 65536 };  // higher ones are not watched

#define WATCH_COPY 0x80000000u       // the copy itself: see watch_of_copy
#define WATCH_IMPATIENT 0x40000000u  // the source; a wait for its copy was given up
#define WATCH_PLAIN 0x20000000u      // the source, or a copy that stays one; reads are only counted
#define WATCH_WRITER 0x10000000u     // a file that is open for writing: see watch_of_writer
#define WATCH_ALONE \
  0x08000000u  // no other process has the same open file, and no other number
               // stands for it, unless it is a writer's
#define WATCH_ENTRY \
  0x07ffffffu  // the source; these bits are the entry, plus one; all set: it had none yet, and the
               // upper half is the hash of its name

// Of a copy: the row that counts it, the mark of its source, and the moment when the source was
// known to be unchanged.
static inline uint64_t watch_of_copy(unsigned row, uint32_t mark, uint32_t moment) {
  return (uint64_t)moment << 32 | WATCH_COPY | mark << 8 | row;
}

static inline uint64_t watch_of_writer(uint32_t mark) {
  return WATCH_WRITER | WATCH_ALONE | mark << 8;
}

static inline unsigned watch_row(uint64_t watch) { return watch & WATCH_COPY ? watch & 255 : 0; }
static inline uint32_t watch_mark(uint64_t watch) { return (uint32_t)(watch >> 8) & 0xffff; }
static inline uint32_t watch_moment(uint64_t watch) { return (uint32_t)(watch >> 32); }

static inline bool watch_is_source(uint64_t watch) {
  return watch != 0 && !(watch & (WATCH_COPY | WATCH_WRITER));
}

static inline bool watch_is_nameless(uint64_t watch) {
  return (watch & WATCH_ENTRY) == WATCH_ENTRY;
}

// The entry's number; one that no entry has where it is not known.
static inline uint32_t watch_entry(uint64_t watch) { return (uint32_t)(watch & WATCH_ENTRY) - 1; }

extern _Atomic(uint64_t) watched[WATCHED_DESCRIPTORS];  // 0: not watched

static inline uint64_t watch_get(int fd) {
  if ((unsigned)fd >= WATCHED_DESCRIPTORS) return 0;
  return atomic_load_explicit(&watched[fd], memory_order_relaxed);
}

static inline void watch_set(int fd, uint64_t value) {
  if ((unsigned)fd >= WATCHED_DESCRIPTORS) return;
  if (watch_get(fd) != value) atomic_store_explicit(&watched[fd], value, memory_order_relaxed);
}

// Like watch_set, with WATCH_ALONE.
void watch_set_alone(int fd, uint64_t value);

// `watch` is what a number stood for that was closed; call after the close.
void watch_closed(uint64_t watch);

// Call when the library is loaded.
void watch_forks(void);
