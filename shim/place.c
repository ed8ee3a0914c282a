#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>

#include "marks.h"
#include "paths.h"
#include "real.h"
#include "report.h"
#include "wait.h"
#include "watch.h"

static bool append(char path[PATH_MAX], size_t* end, const char* bytes, size_t length) {
  if (!bytes || *end + 1 + length >= PATH_MAX) return false;
  if (*end > 0) path[(*end)++] = '/';
  memcpy(path + *end, bytes, length);
  *end += length;
  path[*end] = '\0';
  return true;
}

static bool name_part(uint32_t number, const struct stoker_entry* entry, char path[PATH_MAX]) {
  char digits[12];
  size_t first = sizeof(digits), end = 0;
  do {
    digits[--first] = (char)('0' + number % 10);
  } while ((number /= 10) > 0);
  const struct stoker_string folder = map_header()->tiers[entry->tier].part_dir;
  return append(path, &end, map_string(folder), folder.length) &&
         append(path, &end, digits + first, sizeof(digits) - first);
}

static bool name_copy(const struct stoker_entry* entry, char path[PATH_MAX]) {
  size_t end = 0;
  const struct stoker_string folder = map_header()->copy_dirs[entry->source][entry->tier];
  const struct stoker_string name = {entry->path_offset, entry->path_length, 0};
  return append(path, &end, map_string(folder), folder.length) &&
         append(path, &end, map_string(name), name.length);
}

static bool name_source(const struct stoker_entry* entry, char path[PATH_MAX]) {
  size_t end = 0;
  const struct stoker_table* table = map_header();
  const struct stoker_string name = {entry->path_offset, entry->path_length, 0};
  for (uint32_t row = 0; row < table->source_count; ++row) {
    const struct stoker_source* source = &table->sources[row];
    if (source->number != entry->source) continue;
    return append(path, &end, map_string(source->path), source->path.length) &&
           append(path, &end, map_string(name), name.length);
  }
  return false;
}

int place_open_source(const struct stoker_entry* entry, int flags) {
  char path[PATH_MAX];
  return name_source(entry, path) ? raw_openat(AT_FDCWD, path, flags) : -1;
}

bool place_stat_source(const struct stoker_entry* entry, struct stat* status) {
  char path[PATH_MAX];
  return name_source(entry, path) && raw_fstatat(AT_FDCWD, path, status, 0) == 0;
}

static bool is_copy(const struct stat* status, const struct stoker_entry* entry) {
  if (status->st_ino != entry->copy_ino || status->st_dev != map_header()->tiers[entry->tier].dev) {
    return false;
  }
  return entry_state(entry) == STOKER_COPYING ||
         ((uint64_t)status->st_size == entry->source_size &&
          time_ns(status->st_mtim) == entry->source_mtime_ns);
}

static int open_path_of(bool named, const char* path, int flags) {
  if (named) return raw_openat(AT_FDCWD, path, flags);
  errno = ENAMETOOLONG;
  return -1;
}

int place_open_copy(uint32_t number, const struct stoker_entry* entry, int flags) {
  char path[PATH_MAX];
  int fd = -1;
  const bool copying = entry_state(entry) == STOKER_COPYING;
  if (copying) fd = open_path_of(name_part(number, entry, path), path, flags);
  // The copier renames its file a moment before the entry says so.
  if (!copying || (fd < 0 && errno == ENOENT)) {
    fd = open_path_of(name_copy(entry, path), path, flags);
  }
  struct stat status;
  if (fd < 0 || (raw_fstat(fd, &status) == 0 && is_copy(&status, entry))) return fd;
  raw_close(fd);
  errno = ESTALE;
  return -1;
}

// The daemon looks for changes; programs have to look themselves in few cases only.
static bool is_check_due(const struct stoker_entry* entry) {
  return is_in_doubt(entry) || map_is_other_namespace();
}

// Tells the daemon when a look at the source showed another file, or was needed because of a
// doubt, which the daemon ends by looking itself; NULL: there is no file.
static bool report_check(const struct named_file* file, uint32_t number,
                         const struct stoker_entry* entry, const struct stat* status) {
  const bool unchanged = status && map_is_source(entry, status);
  count_event(COUNT_CHECKS);
  if (!unchanged) count_event(COUNT_CHANGES);
  if (!unchanged || is_in_doubt(entry)) (void)leave_request(STOKER_CHANGED, file, number);
  return unchanged;
}

// Whether the copy may be used in place of what the path leads to now.
static bool check_source(const struct named_file* file, uint32_t number,
                         const struct stoker_entry* entry, struct opening* opening) {
  struct stat status;
  if (!map_is_source_here(file->row)) {
    count_event(COUNT_ELSEWHERE);
    opening->refuted = true;
  } else if (is_being_written(mark_of_inode(entry->source_ino))) {
    opening->refuted = true;
  } else if (is_check_due(entry)) {
    const bool there = raw_fstatat(opening->dirfd, opening->path, &status, 0) == 0;
    opening->refuted = !report_check(file, number, entry, there ? &status : NULL);
  }
  return !opening->refuted;
}

// The copy's descriptor, counted; -1, and the daemon told, when it is not what it should be.
static int open_placed(const struct named_file* file, uint32_t number,
                       const struct stoker_entry* entry, struct opening* opening) {
  const int fd = place_open_copy(number, entry, opening->flags);
  if (fd >= 0) {
    count_open(1u + entry->tier);
  } else if (errno == ENOENT || errno == ESTALE) {
    opening->refuted = true;
    (void)leave_request(STOKER_CHANGED, file, number);
  }
  return fd;
}

static void watch_copy(int fd, const struct stoker_entry* entry, const struct opening* opening) {
  const uint32_t mark = mark_of_inode(entry->source_ino);
  watch_set(fd, opening->stream ? 0 : watch_of_copy(entry->tier + 1u, mark, opening->moment));
}

static void watch_source(int fd, uint64_t watch, const struct opening* opening) {
  count_open(SOURCE_ROW);
  if (opening->stream) {
    watch_set(fd, 0);
  } else {
    watch_set_alone(fd, watch);
  }
}

// Only a large file is read from its copy while that is made: a small one is read before.
static uint64_t watch_of(const struct named_file* file, uint32_t number, uint64_t size) {
  if (size <= map_header()->large_bytes) return WATCH_PLAIN;
  return number < WATCH_ENTRY - 1 ? number + 1 : (uint64_t)file->hash << 32 | WATCH_ENTRY;
}

// Empty files are left alone: programs lock them, and some file systems do not know a length.
static bool is_placed(const struct stoker_entry* entry) {
  return entry_state(entry) == STOKER_PLACED && entry->source_size > 0;
}

static bool waits_for_whole(uint64_t size) { return size <= map_header()->small_bytes; }

// Where opens wait: asks for a file that has no entry, before the source is opened, which the
// storage then need not do. A status it often has at hand.
static uint32_t ask(const struct named_file* file, struct opening* opening,
                    struct stoker_entry* entry) {
  struct stat status;
  if (map_header()->small_bytes == 0 ||
      raw_fstatat(opening->dirfd, opening->path, &status, 0) != 0 || !S_ISREG(status.st_mode) ||
      status.st_size == 0 || !waits_for_whole((uint64_t)status.st_size)) {
    return NO_ENTRY;
  }
  opening->asked = opening->waited = true;
  return send_opened(file, -1) ? wait_for_entry(file, true, entry) : NO_ENTRY;
}

int place_open(const struct named_file* file, struct opening* opening) {
  struct stoker_entry entry;
  uint32_t number = map_find(file);
  if (number == NO_ENTRY) {
    number = ask(file, opening, &entry);
    if (number == NO_ENTRY) return -1;
  } else if (!map_read(number, &entry) || entry_state(&entry) == STOKER_DROPPED) {
    return -1;
  }
  if (entry.link && (opening->flags & O_NOFOLLOW)) return -1;
  if (!opening->waited && entry_state(&entry) != STOKER_PLACED &&
      entry_state(&entry) != STOKER_REFUSED && waits_for_whole(entry.source_size)) {
    number = wait_for_entry(file, true, &entry);
    opening->waited = true;
  }
  if (number == NO_ENTRY || !is_placed(&entry)) {
    opening->refused = number != NO_ENTRY && entry_state(&entry) == STOKER_REFUSED;
    return -1;
  }
  if (!check_source(file, number, &entry, opening)) return -1;
  const int fd = open_placed(file, number, &entry, opening);
  if (fd >= 0) watch_copy(fd, &entry, opening);
  return fd;
}

// Puts the copy under the number of a descriptor that the program has not seen yet.
static bool replace(int fd, const struct named_file* file, uint32_t number,
                    const struct stoker_entry* entry, struct opening* opening) {
  const int copy = open_placed(file, number, entry, opening);
  if (copy < 0) return false;
  const bool replaced = raw_dup3(copy, fd, opening->flags & O_CLOEXEC) >= 0;
  raw_close(copy);
  return replaced;
}

// A file that opened slowly lies far away: the daemon gets it open. A large one it reads by itself,
// in large requests past the page cache; but not one whose reads go unseen, because those cannot be
// served from the copy, and only the page cache keeps the storage from being read twice.
static bool tell_opened(int fd, const struct stat* status, const struct named_file* file,
                        const struct opening* opening) {
  const bool large = (uint64_t)status->st_size > map_header()->large_bytes;
  if (large && !opening->stream) return send_opened(file, -1);
  return opening->slow ? send_opened(file, fd) : leave_request(STOKER_OPENED, file, NO_ENTRY);
}

// The file's entry, after asking and waiting for it where that is wanted.
static uint32_t settled_entry(int fd, const struct stat* status, const struct named_file* file,
                              struct opening* opening, struct stoker_entry* entry) {
  const uint32_t number = map_find(file);
  const unsigned state = map_state(number);
  if (!opening->asked && !opening->refuted && (state == 0 || state == STOKER_DROPPED)) {
    opening->asked = tell_opened(fd, status, file, opening);
  }
  const bool known = number != NO_ENTRY && map_read(number, entry);
  if (opening->waited || status->st_size == 0 || !waits_for_whole((uint64_t)status->st_size) ||
      (number == NO_ENTRY && !opening->asked)) {
    return known ? number : NO_ENTRY;
  }
  return wait_for_entry(file, true, entry);
}

static void settle_named(int fd, const struct stat* status, const struct named_file* file,
                         struct opening* opening) {
  struct stoker_entry entry;
  const uint32_t number = settled_entry(fd, status, file, opening, &entry);
  bool usable = number != NO_ENTRY && is_placed(&entry) && !opening->refuted &&
                !is_being_written(mark_of_inode(entry.source_ino));
  if (usable && !map_is_source(&entry, status)) usable = report_check(file, number, &entry, status);
  if (usable && replace(fd, file, number, &entry, opening)) {
    watch_copy(fd, &entry, opening);
  } else {
    watch_source(fd, watch_of(file, number, (uint64_t)status->st_size), opening);
  }
}

// A function of its own, because its frame holds a path.
static __attribute__((noinline)) void settle_unnamed(int fd, const struct stat* status,
                                                     struct opening* opening) {
  char path[PATH_MAX];
  struct named_file file;
  if (!path_of_descriptor(fd, path)) return;
  if (path_is_under_source(path, &file)) {
    settle_named(fd, status, &file, opening);
  } else if (opening->known_as.path) {
    path_remember_outside(opening->known_as, path);
  }
}

void place_settle(int fd, const struct named_file* file, struct opening* opening) {
  struct stat status;
  if (file && opening->refused) {
    watch_source(fd, WATCH_PLAIN, opening);
    return;
  }
  watch_set(fd, 0);
  if (!file && opening->outside) return;
  if (raw_fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return;
  if (file) {
    settle_named(fd, &status, file, opening);
  } else if (map_is_source_device(status.st_dev) && status.st_nlink > 0) {
    settle_unnamed(fd, &status, opening);
  }
}
