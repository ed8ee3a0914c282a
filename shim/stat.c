// Status by descriptor: that of a copy is answered with the source's, so that programs which
// compare what they opened with what they found (cp, install, tar) see one file. A copy is known by
// its device and inode, which no dup, fork or exec can lose.
#include <fcntl.h>
#include <string.h>
#include <sys/sysmacros.h>

#include "copied.h"
#include "hook.h"
#include "map.h"
#include "real.h"

static struct timespec time_of(int64_t ns) {
  int64_t seconds = ns / 1000000000;
  int64_t rest = ns % 1000000000;
  if (rest < 0) {
    --seconds;
    rest += 1000000000;
  }
  return (struct timespec){.tv_sec = seconds, .tv_nsec = rest};
}

static void show_source(struct stat* status) {
  map_attach();
  struct stoker_entry entry;
  if (!map_find_copy(status, &entry)) return;
  status->st_dev = entry.source_dev;
  status->st_ino = entry.source_ino;
  status->st_mode = entry.source_mode;
  status->st_nlink = entry.source_nlink;
  status->st_uid = entry.source_uid;
  status->st_gid = entry.source_gid;
  status->st_blocks = (blkcnt_t)entry.source_blocks;
  status->st_blksize = (blksize_t)entry.source_blksize;
  status->st_atim = time_of(entry.source_atime_ns);
  status->st_mtim = time_of(entry.source_mtime_ns);
  status->st_ctim = time_of(entry.source_ctime_ns);
}

static int shown(int result, struct stat* status) {
  if (result == 0) show_source(status);
  return result;
}

static bool is_of_descriptor(const char* path, int flags) {
  return flags & AT_EMPTY_PATH && (!path || path[0] == '\0');
}

int hook_fstat(int fd, struct stat* status) HOOK(fstat);
int hook_fstat(int fd, struct stat* status) {
  (void)copied_watch(fd);
  real_fstat_type* real = real_fstat();  // before glibc 2.33 there was only __fxstat
  return shown(real ? real(fd, status) : raw_fstat(fd, status), status);
}
int hook_fstat64(int, struct stat*) HOOK_ALIAS(fstat64, fstat);

int hook_fxstat(int version, int fd, struct stat* status) HOOK(__fxstat);
int hook_fxstat(int version, int fd, struct stat* status) {
  (void)copied_watch(fd);
  real___fxstat_type* real = real___fxstat();
  return shown(real ? real(version, fd, status) : raw_fstat(fd, status), status);
}
int hook_fxstat64(int, int, struct stat*) HOOK_ALIAS(__fxstat64, __fxstat);

int hook_fstatat(int dirfd, const char* path, struct stat* status, int flags) HOOK(fstatat);
int hook_fstatat(int dirfd, const char* path, struct stat* status, int flags) {
  if (is_of_descriptor(path, flags)) (void)copied_watch(dirfd);
  real_fstatat_type* real = real_fstatat();
  const int result =
      real ? real(dirfd, path, status, flags) : raw_fstatat(dirfd, path, status, flags);
  return is_of_descriptor(path, flags) ? shown(result, status) : result;
}
int hook_fstatat64(int, const char*, struct stat*, int) HOOK_ALIAS(fstatat64, fstatat);

int hook_fxstatat(int version, int dirfd, const char* path, struct stat* status, int flags)
    HOOK(__fxstatat);
int hook_fxstatat(int version, int dirfd, const char* path, struct stat* status, int flags) {
  if (is_of_descriptor(path, flags)) (void)copied_watch(dirfd);
  real___fxstatat_type* real = real___fxstatat();
  const int result =
      real ? real(version, dirfd, path, status, flags) : raw_fstatat(dirfd, path, status, flags);
  return is_of_descriptor(path, flags) ? shown(result, status) : result;
}
int hook_fxstatat64(int, int, const char*, struct stat*, int) HOOK_ALIAS(__fxstatat64, __fxstatat);

#ifdef STATX_BASIC_STATS

static struct statx_timestamp timestamp_of(int64_t ns) {
  const struct timespec time = time_of(ns);
  return (struct statx_timestamp){.tv_sec = time.tv_sec, .tv_nsec = (uint32_t)time.tv_nsec};
}

static struct stat status_of(const struct statx* status) {
  return (struct stat){
      .st_dev = makedev(status->stx_dev_major, status->stx_dev_minor),
      .st_ino = status->stx_ino,
      .st_mode = status->stx_mode,
      .st_size = (off_t)status->stx_size,
      .st_mtim = {.tv_sec = status->stx_mtime.tv_sec, .tv_nsec = status->stx_mtime.tv_nsec},
  };
}

static void show_source_statx(struct statx* status) {
  map_attach();
  const unsigned needed = STATX_TYPE | STATX_INO | STATX_SIZE | STATX_MTIME;
  const struct stat plain = status_of(status);
  struct stoker_entry entry;
  if ((status->stx_mask & needed) != needed || !map_find_copy(&plain, &entry)) return;
  status->stx_mask &= ~(unsigned)STATX_BTIME;  // the table does not know the source's
  memset(&status->stx_btime, 0, sizeof(status->stx_btime));
  status->stx_dev_major = major(entry.source_dev);
  status->stx_dev_minor = minor(entry.source_dev);
  status->stx_ino = entry.source_ino;
  status->stx_mode = (uint16_t)entry.source_mode;
  status->stx_nlink = entry.source_nlink;
  status->stx_uid = entry.source_uid;
  status->stx_gid = entry.source_gid;
  status->stx_blocks = entry.source_blocks;
  status->stx_blksize = entry.source_blksize;
  status->stx_atime = timestamp_of(entry.source_atime_ns);
  status->stx_mtime = timestamp_of(entry.source_mtime_ns);
  status->stx_ctime = timestamp_of(entry.source_ctime_ns);
}

int hook_statx(int dirfd, const char* path, int flags, unsigned mask, struct statx* status)
    HOOK(statx);
int hook_statx(int dirfd, const char* path, int flags, unsigned mask, struct statx* status) {
  real_statx_type* real = real_statx();
  const bool by_descriptor = is_of_descriptor(path, flags);
  if (by_descriptor) (void)copied_watch(dirfd);
  // What tells a copy from another file is asked for even where the program does not want it.
  const unsigned wider = by_descriptor ? mask | STATX_BASIC_STATS : mask;
  const int result =
      real ? real(dirfd, path, flags, wider, status) : raw_statx(dirfd, path, flags, wider, status);
  if (result == 0 && by_descriptor) show_source_statx(status);
  return result;
}

#endif
