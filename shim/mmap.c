// mmap of a large file that was opened before its copy was complete.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "copied.h"
#include "hook.h"
#include "marks.h"
#include "place.h"
#include "real.h"
#include "watch.h"

// Allocators map memory before anything is ready: not by a function that must be looked up.
static void* map_plain(void* at, size_t length, int protection, int flags, int fd, off_t offset) {
  return map_header() ? real_mmap()(at, length, protection, flags, fd, offset)
                      : raw_mmap(at, length, protection, flags, fd, offset);
}

// A descriptor of the complete copy of a watched source, or -1. The mapping outlives it.
static int open_complete(int fd, uint64_t watch) {
  struct stoker_entry entry;
  if (!copied_entry(fd, &watch, &entry)) return -1;
  if (entry_state(&entry) != STOKER_PLACED && entry.source_size > map_header()->small_bytes)
    return -1;
  if (!copied_reaches(fd, watch, entry.source_size, &entry)) return -1;
  if (entry_state(&entry) != STOKER_PLACED) return -1;
  return place_open_copy(watch_entry(watch), &entry, O_RDONLY | O_CLOEXEC);
}

void* hook_mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset)
    HOOK(mmap);
void* hook_mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset) {
  const uint64_t watch = copied_watch(fd);
  // Writes through the mapping cannot be seen, not even by the file's time, and neither can their
  // end.
  if (watch & WATCH_WRITER && flags & MAP_SHARED) mark_writing_for_ever(watch_mark(watch));
  if (!watch_is_source(watch)) return map_plain(at, length, protection, flags, fd, offset);
  const int saved = errno;
  const int copy = open_complete(fd, watch);
  errno = saved;
  void* address = map_plain(at, length, protection, flags, copy >= 0 ? copy : fd, offset);
  if (copy >= 0) raw_close(copy);
  return address;
}
void* hook_mmap64(void*, size_t, int, int, int, off_t) HOOK_ALIAS(mmap64, mmap);
