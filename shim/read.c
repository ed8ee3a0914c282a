// Reads of a large file whose copy came, or is coming, after the program opened the source: what is
// copied already is read from the copy. The program's own descriptor keeps the offset; it becomes
// the copy's once that is complete, unless others share it.
//
// `read` takes its range of the file by moving the offset first, which the kernel does atomically
// for all who share it (threads, parent and child), and reads that range afterwards; what it could
// not read it gives back by a second, relative move. So no two of them get the same bytes.
#include <errno.h>
#include <fcntl.h>
#include <limits.h>

#include "copied.h"
#include "hook.h"
#include "place.h"
#include "real.h"
#include "report.h"
#include "watch.h"

enum { ATTEMPTS = 3 };

struct reading {
  int fd;
  const struct iovec* parts;
  int count;
  bool own_offset;  // the descriptor's own, which moves; else `offset`
  off_t offset;
  uint64_t watch;
};

static uint64_t total_of(const struct reading* reading) {
  uint64_t total = 0;
  for (int i = 0; i < reading->count; ++i) {
    if (__builtin_add_overflow(total, reading->parts[i].iov_len, &total)) return UINT64_MAX;
  }
  return total;
}

// Reads exactly [offset, offset + length) from the copy, or nothing.
static bool read_copy(const struct reading* reading, uint64_t offset, uint64_t length,
                      struct stoker_entry* entry) {
  const uint32_t number = watch_entry(reading->watch);
  for (int attempt = 0; attempt < ATTEMPTS; ++attempt) {
    if (!copied_reaches(reading->fd, reading->watch, offset + length, entry)) return false;
    const int fd = place_open_copy(number, entry, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
      const ssize_t done = raw_preadv(fd, reading->parts, reading->count, (off_t)offset);
      raw_close(fd);
      if (done >= 0 && (uint64_t)done == length && map_unchanged(number, entry)) return true;
    }
    if (!map_read(number, entry)) return false;  // it may have been renamed into its place
  }
  return false;
}

static ssize_t read_at(const struct reading* reading, uint64_t offset, uint64_t length,
                       struct stoker_entry* entry) {
  if (read_copy(reading, offset, length, entry)) {
    count_read(1u + entry->tier, length);
    return (ssize_t)length;
  }
  const ssize_t done = raw_preadv(reading->fd, reading->parts, reading->count, (off_t)offset);
  if (done >= 0) count_read(SOURCE_ROW, (uint64_t)done);
  return done;
}

// Reads at the descriptor's own offset, and moves it.
static ssize_t read_along(const struct reading* reading, uint64_t wanted,
                          struct stoker_entry* entry) {
  const off_t end = raw_lseek(reading->fd, (off_t)wanted, SEEK_CUR);
  if (end < 0) return -1;
  const uint64_t offset = (uint64_t)end - wanted;
  const uint64_t rest = offset < entry->source_size ? entry->source_size - offset : 0;
  const ssize_t done =
      rest == 0 ? 0 : read_at(reading, offset, wanted < rest ? wanted : rest, entry);
  const off_t back = (done < 0 ? 0 : done) - (off_t)wanted;
  const int saved = errno;
  if (back != 0) (void)raw_lseek(reading->fd, back, SEEK_CUR);
  errno = saved;
  return done;
}

// Serves a read of a watched source; false when it is to be left to the real function.
static bool serve(struct reading* reading, ssize_t* result) {
  struct stoker_entry entry;
  if (!copied_entry(reading->fd, &reading->watch, &entry)) return false;
  if (entry_state(&entry) == STOKER_PLACED && copied_become(reading->fd, reading->watch, &entry)) {
    return false;
  }
  const uint64_t size = entry.source_size;
  const uint64_t total = total_of(reading);
  const uint64_t wanted = total < size ? total : size;
  if (wanted == 0) return false;
  if (reading->own_offset) {
    *result = read_along(reading, wanted, &entry);
    return true;
  }
  if (reading->offset < 0 || (uint64_t)reading->offset >= size) return false;
  const uint64_t offset = (uint64_t)reading->offset;
  *result = read_at(reading, offset, wanted < size - offset ? wanted : size - offset, &entry);
  return true;
}

static bool served(struct reading* reading, ssize_t* result) {
  if (!watch_is_source(reading->watch)) return false;
  const int saved = errno;
  const bool done = serve(reading, result);
  if (!done || *result >= 0) errno = saved;
  return done;
}

// Counts a read by the real function; the watch may have been found to be out of date.
static ssize_t counted(int fd, ssize_t done) {
  const uint64_t watch = watch_get(fd);
  if (watch != 0 && !(watch & WATCH_WRITER) && done >= 0) {
    count_read(watch_row(watch), (uint64_t)done);
  }
  return done;
}

static __attribute__((noinline)) ssize_t read_watched(int fd, void* buffer, size_t size) {
  const struct iovec part = {buffer, size};
  struct reading reading = {fd, &part, 1, true, 0, copied_watch(fd)};
  ssize_t result;
  return served(&reading, &result) ? result : counted(fd, real_read()(fd, buffer, size));
}

static __attribute__((noinline)) ssize_t pread_watched(int fd, void* buffer, size_t size,
                                                       off_t offset) {
  const struct iovec part = {buffer, size};
  struct reading reading = {fd, &part, 1, false, offset, copied_watch(fd)};
  ssize_t result;
  return served(&reading, &result) ? result : counted(fd, real_pread()(fd, buffer, size, offset));
}

ssize_t hook_read(int fd, void* buffer, size_t size) HOOK(read);
ssize_t hook_read(int fd, void* buffer, size_t size) {
  return watch_get(fd) == 0 ? real_read()(fd, buffer, size) : read_watched(fd, buffer, size);
}
ssize_t hook___read(int, void*, size_t) HOOK_ALIAS(__read, read);

ssize_t hook_pread(int fd, void* buffer, size_t size, off_t offset) HOOK(pread);
ssize_t hook_pread(int fd, void* buffer, size_t size, off_t offset) {
  return watch_get(fd) == 0 ? real_pread()(fd, buffer, size, offset)
                            : pread_watched(fd, buffer, size, offset);
}
ssize_t hook_pread64(int, void*, size_t, off_t) HOOK_ALIAS(pread64, pread);
ssize_t hook___pread64(int, void*, size_t, off_t) HOOK_ALIAS(__pread64, pread);

// The fortified forms end a program that reads beyond its buffer: the C library does that.
ssize_t hook_read_chk(int fd, void* buffer, size_t size, size_t room) HOOK(__read_chk);
ssize_t hook_read_chk(int fd, void* buffer, size_t size, size_t room) {
  return size > room ? real___read_chk()(fd, buffer, size, room) : hook_read(fd, buffer, size);
}

ssize_t hook_pread_chk(int fd, void* buffer, size_t size, off_t offset, size_t room)
    HOOK(__pread_chk);
ssize_t hook_pread_chk(int fd, void* buffer, size_t size, off_t offset, size_t room) {
  return size > room ? real___pread_chk()(fd, buffer, size, offset, room)
                     : hook_pread(fd, buffer, size, offset);
}
ssize_t hook_pread64_chk(int, void*, size_t, off_t, size_t) HOOK_ALIAS(__pread64_chk, __pread_chk);

ssize_t hook_readv(int fd, const struct iovec* parts, int count) HOOK(readv);
ssize_t hook_readv(int fd, const struct iovec* parts, int count) {
  struct reading reading = {fd, parts, count, true, 0, copied_watch(fd)};
  ssize_t result;
  return served(&reading, &result) ? result : counted(fd, real_readv()(fd, parts, count));
}

ssize_t hook_preadv(int fd, const struct iovec* parts, int count, off_t offset) HOOK(preadv);
ssize_t hook_preadv(int fd, const struct iovec* parts, int count, off_t offset) {
  struct reading reading = {fd, parts, count, false, offset, copied_watch(fd)};
  ssize_t result;
  return served(&reading, &result) ? result : counted(fd, real_preadv()(fd, parts, count, offset));
}
ssize_t hook_preadv64(int, const struct iovec*, int, off_t) HOOK_ALIAS(preadv64, preadv);

ssize_t hook_preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags)
    HOOK(preadv2);
ssize_t hook_preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
  struct reading reading = {fd, parts, count, offset == -1, offset, copied_watch(fd)};
  ssize_t result;
  if (flags == 0 && served(&reading, &result)) return result;
  real_preadv2_type* real = real_preadv2();  // since glibc 2.26
  return counted(fd, real ? real(fd, parts, count, offset, flags)
                          : raw_preadv2(fd, parts, count, offset, flags));
}
ssize_t hook_preadv64v2(int, const struct iovec*, int, off_t, int) HOOK_ALIAS(preadv64v2, preadv2);

off_t hook_lseek(int fd, off_t offset, int whence) HOOK(lseek);
off_t hook_lseek(int fd, off_t offset, int whence) {
  (void)copied_watch(fd);
  return real_lseek()(fd, offset, whence);
}
off_t hook_lseek64(int, off_t, int) HOOK_ALIAS(lseek64, lseek);
