// open and openat in all their forms. Only opens for reading may end at a copy.
#include "open.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <time.h>

#include "change.h"
#include "hook.h"
#include "marks.h"
#include "paths.h"
#include "place.h"
#include "real.h"
#include "report.h"
#include "watch.h"

#define OTHER_THAN_READING \
  (O_ACCMODE | O_CREAT | O_TRUNC | O_EXCL | O_PATH | O_DIRECTORY | O_TMPFILE | O_DIRECT)

static bool is_for_writing(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC; }

static bool is_changing(int flags) {
  return !(flags & O_PATH) && (is_for_writing(flags) || flags & O_CREAT);
}

// Longer than a local disk's answer from memory, shorter than a network's.
#define SLOW_NS 100000u

static uint64_t exact_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time_ns(time);
}

static int open_source(struct opening* opening, const struct named_file* file) {
  const uint64_t began = opening->outside ? 0 : exact_ns();
  const int fd = real_openat()(opening->dirfd, opening->path, opening->flags);
  if (fd < 0) return fd;
  const int saved = errno;
  opening->slow = !opening->outside && exact_ns() - began > SLOW_NS;
  place_settle(fd, file, opening);
  errno = saved;
  return fd;
}

static int open_named(struct opening* opening, const struct named_file* file) {
  const int saved = errno;
  const int fd = place_open(file, opening);
  errno = saved;
  return fd >= 0 ? fd : open_source(opening, file);
}

// A function of its own, because its frame holds a path.
static __attribute__((noinline)) int open_joined(struct opening* opening) {
  char joined[PATH_MAX];
  struct named_file file;
  const int saved = errno;
  const bool complete = path_join(opening->dirfd, opening->path, joined);
  const bool found = complete && path_is_under_source(joined, &file);
  if (complete && !opening->known_as.path) {
    opening->known_as = (struct named_place){joined, 0};
    opening->outside = path_is_outside(opening->known_as);
  }
  errno = saved;
  return found ? open_named(opening, &file) : open_source(opening, NULL);
}

static int open_otherwise(int dirfd, const char* path, int flags, mode_t mode) {
  if (!is_changing(flags)) {
    const int fd = real_openat()(dirfd, path, flags, mode);
    watch_set(fd, 0);
    return fd;
  }
  const struct change change = change_of_name(dirfd, path);
  const int fd = real_openat()(dirfd, path, flags, mode);
  watch_set(fd, 0);
  return is_for_writing(flags) ? change_by_writer(&change, fd) : change_made(&change, fd);
}

// Whether the directory that the path is relative to can be a source's.
static bool directory_of(struct opening* opening) {
  struct stat status;
  const int saved = errno;
  const bool possible =
      raw_fstat(opening->dirfd, &status) == 0 && map_is_source_device(status.st_dev);
  errno = saved;
  // An inode's number, set apart from the numbers of working directories.
  if (possible) opening->known_as = (struct named_place){opening->path, ~status.st_ino};
  return possible;
}

static int open_at(int dirfd, const char* path, int flags, mode_t mode, bool stream) {
  map_attach();
  if (!path || flags & OTHER_THAN_READING || !map_live()) {
    return open_otherwise(dirfd, path, flags, mode);
  }
  struct opening opening = {
      .dirfd = dirfd, .path = path, .flags = flags, .stream = stream, .moment = mark_moment()};
  struct named_file file;
  if (path_is_under_source(path, &file)) return open_named(&opening, &file);
  const bool joins = path_needs_joining(path);
  if (path[0] == '/') {
    if (!joins) opening.known_as = (struct named_place){path, 0};
  } else if (dirfd == AT_FDCWD) {
    opening.known_as = (struct named_place){path, path_working_directory()};
  } else if (!directory_of(&opening)) {
    return open_source(&opening, NULL);
  }
  opening.outside = opening.known_as.path && path_is_outside(opening.known_as);
  return joins && !opening.outside ? open_joined(&opening) : open_source(&opening, NULL);
}

int open_for_stream(const char* path, int flags) {
  return open_at(AT_FDCWD, path, flags, 0666, true);
}

static bool wants_mode(int flags) { return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; }

int hook_open(const char* path, int flags, ...) HOOK(open);
int hook_open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = wants_mode(flags) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_at(AT_FDCWD, path, flags, mode, false);
}
int hook_open64(const char*, int, ...) HOOK_ALIAS(open64, open);
int hook___open(const char*, int, ...) HOOK_ALIAS(__open, open);
int hook___open64(const char*, int, ...) HOOK_ALIAS(__open64, open);

int hook_openat(int dirfd, const char* path, int flags, ...) HOOK(openat);
int hook_openat(int dirfd, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = wants_mode(flags) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_at(dirfd, path, flags, mode, false);
}
int hook_openat64(int, const char*, int, ...) HOOK_ALIAS(openat64, openat);

// The fortified forms end a program that creates a file without a mode: the C library does that.
int hook_open_2(const char* path, int flags) HOOK(__open_2);
int hook_open_2(const char* path, int flags) {
  return wants_mode(flags) ? real___open_2()(path, flags)
                           : open_at(AT_FDCWD, path, flags, 0, false);
}
int hook_open64_2(const char*, int) HOOK_ALIAS(__open64_2, __open_2);

int hook_openat_2(int dirfd, const char* path, int flags) HOOK(__openat_2);
int hook_openat_2(int dirfd, const char* path, int flags) {
  return wants_mode(flags) ? real___openat_2()(dirfd, path, flags)
                           : open_at(dirfd, path, flags, 0, false);
}
int hook_openat64_2(int, const char*, int) HOOK_ALIAS(__openat64_2, __openat_2);

int hook_creat(const char* path, mode_t mode) HOOK(creat);
int hook_creat(const char* path, mode_t mode) {
  return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, false);
}
int hook_creat64(const char*, mode_t) HOOK_ALIAS(creat64, creat);

static int moved(int result) {
  if (result == 0) path_working_directory_changed();
  return result;
}

int hook_chdir(const char* path) HOOK(chdir);
int hook_chdir(const char* path) { return moved(real_chdir()(path)); }

int hook_fchdir(int fd) HOOK(fchdir);
int hook_fchdir(int fd) { return moved(real_fchdir()(fd)); }
