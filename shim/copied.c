#include "copied.h"

#include "real.h"
#include "wait.h"
#include "watch.h"

// Whether the descriptor is still the entry's source, unchanged: its number may be another file's.
static bool is_source(int fd, const struct stoker_entry* entry) {
  struct stat status;
  return raw_fstat(fd, &status) == 0 && status.st_dev == entry->source_dev &&
         status.st_ino == entry->source_ino && (uint64_t)status.st_size == entry->source_size &&
         time_ns(status.st_mtim) == entry->source_mtime_ns;
}

bool copied_entry(int fd, uint32_t watch, struct stoker_entry* entry) {
  const uint32_t number = watch_entry(watch);
  const unsigned state = map_state(number);
  if (state == 0 || state == STOKER_REFUSED || state == STOKER_DROPPED) return false;
  if (!map_live() || !map_read(number, entry)) return false;
  if (is_source(fd, entry)) return true;
  watch_set(fd, 0);
  return false;
}

bool copied_reaches(int fd, uint32_t watch, uint64_t end, struct stoker_entry* entry) {
  if (entry_state(entry) == STOKER_PLACED) return true;
  if (entry_state(entry) == STOKER_COPYING && entry->copied >= end) return true;
  if (watch & WATCH_IMPATIENT) return false;
  if (wait_for_bytes(watch_entry(watch), end, entry)) return true;
  // Not for a jump far ahead of the copier, which costs no wait.
  if (end - entry->copied <= map_header()->ahead_bytes) watch_set(fd, watch | WATCH_IMPATIENT);
  return false;
}
