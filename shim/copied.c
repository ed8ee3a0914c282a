#include "copied.h"

#include <errno.h>
#include <fcntl.h>

#include "marks.h"
#include "place.h"
#include "real.h"
#include "wait.h"
#include "watch.h"

// The entry that the daemon has made since the file was opened.
static bool find_entry(int fd, uint64_t* watch, struct stoker_entry* entry) {
  struct stat status;
  if (raw_fstat(fd, &status) != 0) return false;
  const uint32_t number = map_find_source((uint32_t)(*watch >> 32), &status, entry);
  if (number >= WATCH_ENTRY - 1) return false;
  *watch = (*watch & WATCH_ALONE) | (number + 1);
  watch_set(fd, *watch);
  return entry_state(entry) != STOKER_REFUSED && entry_state(entry) != STOKER_DROPPED;
}

bool copied_entry(int fd, uint64_t* watch, struct stoker_entry* entry) {
  if (*watch & WATCH_PLAIN || !map_live()) return false;
  if (watch_is_nameless(*watch)) return find_entry(fd, watch, entry);
  const uint32_t number = watch_entry(*watch);
  const unsigned state = map_state(number);
  if (state == 0 || state == STOKER_REFUSED || state == STOKER_DROPPED) return false;
  struct stat status;
  if (!map_read(number, entry)) return false;
  // Its number may be another file's by now.
  if (raw_fstat(fd, &status) == 0 && map_is_source(entry, &status)) {
    return !is_being_written(mark_of_inode(entry->source_ino));
  }
  watch_set(fd, 0);
  return false;
}

bool copied_reaches(int fd, uint64_t watch, uint64_t end, struct stoker_entry* entry) {
  if (entry_state(entry) == STOKER_PLACED) return true;
  if (entry_state(entry) == STOKER_COPYING && entry->copied >= end) return true;
  if (watch & WATCH_IMPATIENT) return false;
  if (wait_for_bytes(watch_entry(watch), end, entry)) return true;
  // Not for a jump far ahead of the copier, which costs no wait.
  if (entry_state(entry) == STOKER_COPYING && end - entry->copied <= map_header()->ahead_bytes)
    watch_set(fd, watch | WATCH_IMPATIENT);
  return false;
}

static bool closes_on_exec(int fd) { return raw_fcntl(fd, F_GETFD, 0) & FD_CLOEXEC; }

// Flags of open that are the open file's, not the descriptor's.
static int flags_of(int fd) {
  const long flags = raw_fcntl(fd, F_GETFL, 0);
  return flags < 0 ? 0 : (int)flags & (O_NONBLOCK | O_NOATIME);
}

// Puts another file under the number of a descriptor, at the same offset. How far another thread
// has moved that in the meantime is corrected afterwards.
static bool become(int fd, int other) {
  const int before = (int)raw_fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (before < 0) return false;
  const off_t offset = raw_lseek(before, 0, SEEK_CUR);
  const bool became = offset >= 0 && raw_lseek(other, offset, SEEK_SET) == offset &&
                      raw_dup3(other, fd, closes_on_exec(fd) ? O_CLOEXEC : 0) >= 0;
  const off_t moved = raw_lseek(before, 0, SEEK_CUR) - offset;
  if (became && moved != 0) (void)raw_lseek(fd, moved, SEEK_CUR);
  raw_close(before);
  return became;
}

bool copied_become(int fd, uint64_t watch, const struct stoker_entry* entry) {
  // A program that is started with it, by posix_spawn say, would share the offset unseen.
  if (!(watch & WATCH_ALONE) || !closes_on_exec(fd)) return false;
  const uint32_t moment = mark_moment();
  const int copy = place_open_copy(watch_entry(watch), entry, O_CLOEXEC | flags_of(fd));
  if (copy < 0) return false;
  const bool became = become(fd, copy);
  raw_close(copy);
  if (became) {
    watch_set(fd, watch_of_copy(entry->tier + 1u, mark_of_inode(entry->source_ino), moment));
  }
  return became;
}

// Whether the source could be opened and is the entry's file, changed or not.
static bool leave(int fd, const struct stoker_entry* entry) {
  struct stat status;
  const int source = place_open_source(entry, O_CLOEXEC | flags_of(fd));
  if (source < 0) return false;
  const bool left = raw_fstat(source, &status) == 0 && status.st_ino == entry->source_ino &&
                    status.st_dev == entry->source_dev && become(fd, source);
  raw_close(source);
  return left;
}

// The entry whose copy is open as the descriptor.
static bool find_copy(int fd, struct stoker_entry* entry) {
  struct stat status;
  return raw_fstat(fd, &status) == 0 && map_find_copy(&status, entry);
}

void copied_leave(int fd) {
  struct stoker_entry entry;
  const int saved = errno;
  if (find_copy(fd, &entry) && leave(fd, &entry)) watch_set(fd, WATCH_PLAIN);
  errno = saved;
}

// Whether the source is the file that was copied, or another one is in its place: either way the
// copy is what the program opened.
static bool is_still_right(const struct stoker_entry* entry) {
  struct stat status;
  if (!place_stat_source(entry, &status) || status.st_ino != entry->source_ino ||
      status.st_dev != entry->source_dev) {
    return true;
  }
  return map_is_source(entry, &status) && !is_being_written(mark_of_inode(entry->source_ino));
}

static __attribute__((noinline)) void follow(int fd, uint64_t watch) {
  struct stoker_entry entry;
  const int saved = errno;
  const uint32_t moment = mark_moment();
  if (!find_copy(fd, &entry)) {
    watch_set(fd, 0);
  } else if (is_still_right(&entry)) {
    watch_set(fd, watch_of_copy(watch_row(watch), watch_mark(watch), moment));
  } else {
    watch_set(fd, leave(fd, &entry) ? WATCH_PLAIN : watch | WATCH_PLAIN);
  }
  errno = saved;
}

uint64_t copied_watch(int fd) {
  const uint64_t watch = watch_get(fd);
  if (!(watch & WATCH_COPY) || watch & WATCH_PLAIN) return watch;
  if (!is_marked_since(watch_mark(watch), watch_moment(watch))) return watch;
  follow(fd, watch);
  return watch_get(fd);
}
