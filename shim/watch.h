// Which descriptors were opened under a source, by number. Advisory: the program may have closed
// one and opened another under its number unseen, so whoever serves bytes checks the file itself.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { WATCHED_DESCRIPTORS = 65536 };  // higher ones are not watched

#define WATCH_COPY 0x80000000u       // the copy itself; the low bits are the tier
#define WATCH_IMPATIENT 0x40000000u  // the source; a wait for its copy was given up
#define WATCH_ENTRY 0x3fffffffu      // the source; these bits are the entry, or all set: none yet

static inline bool watch_is_source(uint32_t watch) { return watch != 0 && !(watch & WATCH_COPY); }

// The entry's number; one that no entry has where it is not known.
static inline uint32_t watch_entry(uint32_t watch) { return (watch & WATCH_ENTRY) - 1; }

extern _Atomic(uint32_t) watched[WATCHED_DESCRIPTORS];  // 0: not watched; else what it is, plus one

static inline uint32_t watch_get(int fd) {
  if ((unsigned)fd >= WATCHED_DESCRIPTORS) return 0;
  return atomic_load_explicit(&watched[fd], memory_order_relaxed);
}

static inline void watch_set(int fd, uint32_t value) {
  if ((unsigned)fd >= WATCHED_DESCRIPTORS) return;
  if (watch_get(fd) != value) atomic_store_explicit(&watched[fd], value, memory_order_relaxed);
}
