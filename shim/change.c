// Calls that change files other than by writing to them: from then on no program
// of the run is served the copies of what was there before.
//
// Directories that are made or removed are of no interest: no file is in them.
#include "change.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <utime.h>

#include "copied.h"
#include "hook.h"
#include "marks.h"
#include "paths.h"
#include "real.h"
#include "watch.h"

static void add(struct change* change, uint32_t mark) {
  mark_changed(mark);
  change->marks[change->count++] = mark;
}

static void add_all(struct change* change) {
  mark_all_changed();
  change->all = true;
}

// What the path is a descriptor's number for, if that is a copy, is the source from now on.
static void leave_copy(const char* path) {
  static const char prefix[] = "/proc/self/fd/";
  const char* digits = path + sizeof(prefix) - 1;
  if (strncmp(path, prefix, sizeof(prefix) - 1) != 0 || digits[0] < '0' || digits[0] > '9') return;
  int number = 0;  // not by atoi, which is not in older C libraries when compiled with a newer one
  for (; *digits >= '0' && *digits <= '9' && number < 1 << 24; ++digits) {
    number = 10 * number + (*digits - '0');
  }
  copied_leave(number);
}

// Marks are set as long as there is a table: a daemon that is silent may speak again.
static bool is_to_be_marked(const char* path) {
  map_attach();
  if (!map_header() || !path || path[0] == '\0') return false;
  leave_copy(path);
  return true;
}

static bool add_name(struct change* change, int dirfd, const char* path) {
  uint32_t hash;
  if (!path_hash(dirfd, path, &hash)) return false;
  add(change, mark_of_name(hash));
  return true;
}

// The name, and the file that it leads to; of a directory all that is below, with `below`.
static void add_file(struct change* change, int dirfd, const char* path, bool below) {
  struct stat status;
  const int saved = errno;
  if (is_to_be_marked(path)) {
    const bool named = add_name(change, dirfd, path);
    if (raw_fstatat(dirfd, path, &status, 0) == 0 &&
        (named || map_is_source_device(status.st_dev))) {
      if (S_ISREG(status.st_mode)) add(change, mark_of_inode(status.st_ino));
      if (below && S_ISDIR(status.st_mode) && (named || path_leads_under_source(dirfd, path))) {
        add_all(change);
      }
    }
  }
  errno = saved;
}

static struct change change_of(int dirfd, const char* path) {
  struct change change = {.count = 0};
  add_file(&change, dirfd, path, true);
  return change;
}

static struct change change_of_both(int from_dir, const char* from, int to_dir, const char* to) {
  struct change change = {.count = 0};
  add_file(&change, from_dir, from, true);
  add_file(&change, to_dir, to, true);
  return change;
}

struct change change_of_name(int dirfd, const char* path) {
  struct change change = {.count = 0};
  const int saved = errno;
  if (is_to_be_marked(path)) (void)add_name(&change, dirfd, path);
  errno = saved;
  return change;
}

int change_made(const struct change* change, int result) {
  map_look_again();
  for (int i = 0; i < change->count; ++i) mark_changed(change->marks[i]);
  if (change->all) mark_all_changed();
  return result;
}

int change_by_writer(const struct change* change, int fd) {
  struct stat status;
  const int saved = errno;
  if (fd >= 0 && map_header() && raw_fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
      (change->count > 0 || map_is_source_device(status.st_dev))) {
    const uint32_t mark = mark_of_inode(status.st_ino);
    const bool will_end = mark_writing(mark);
    watch_set(fd, watch_of_writer(mark));
    if (will_end) watch_set_alone(fd, watch_of_writer(mark));
  }
  errno = saved;
  return change_made(change, fd);
}

// --- names ---

int hook_rename(const char* from, const char* to) HOOK(rename);
int hook_rename(const char* from, const char* to) {
  const struct change change = change_of_both(AT_FDCWD, from, AT_FDCWD, to);
  return change_made(&change, real_rename()(from, to));
}

int hook_renameat(int from_dir, const char* from, int to_dir, const char* to) HOOK(renameat);
int hook_renameat(int from_dir, const char* from, int to_dir, const char* to) {
  const struct change change = change_of_both(from_dir, from, to_dir, to);
  return change_made(&change, real_renameat()(from_dir, from, to_dir, to));
}

int hook_renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags)
    HOOK(renameat2);
int hook_renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  const struct change change = change_of_both(from_dir, from, to_dir, to);
  real_renameat2_type* real = real_renameat2();  // since glibc 2.28
  return change_made(&change, real ? real(from_dir, from, to_dir, to, flags)
                                   : raw_renameat2(from_dir, from, to_dir, to, flags));
}

int hook_link(const char* from, const char* to) HOOK(link);
int hook_link(const char* from, const char* to) {
  const struct change change = change_of_both(AT_FDCWD, from, AT_FDCWD, to);
  return change_made(&change, real_link()(from, to));
}

int hook_linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) HOOK(linkat);
int hook_linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) {
  if (flags & AT_EMPTY_PATH) copied_leave(from_dir);
  const struct change change = change_of_both(from_dir, from, to_dir, to);
  return change_made(&change, real_linkat()(from_dir, from, to_dir, to, flags));
}

int hook_symlink(const char* target, const char* path) HOOK(symlink);
int hook_symlink(const char* target, const char* path) {
  const struct change change = change_of_name(AT_FDCWD, path);
  return change_made(&change, real_symlink()(target, path));
}

int hook_symlinkat(const char* target, int dirfd, const char* path) HOOK(symlinkat);
int hook_symlinkat(const char* target, int dirfd, const char* path) {
  const struct change change = change_of_name(dirfd, path);
  return change_made(&change, real_symlinkat()(target, dirfd, path));
}

int hook_unlink(const char* path) HOOK(unlink);
int hook_unlink(const char* path) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_unlink()(path));
}

int hook_unlinkat(int dirfd, const char* path, int flags) HOOK(unlinkat);
int hook_unlinkat(int dirfd, const char* path, int flags) {
  if (flags & AT_REMOVEDIR) return real_unlinkat()(dirfd, path, flags);
  const struct change change = change_of(dirfd, path);
  return change_made(&change, real_unlinkat()(dirfd, path, flags));
}

int hook_remove(const char* path) HOOK(remove);
int hook_remove(const char* path) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_remove()(path));
}

// The forms with a version are what there was before glibc 2.33.
int hook_mknod(const char* path, mode_t mode, dev_t dev) HOOK(mknod);
int hook_mknod(const char* path, mode_t mode, dev_t dev) {
  const struct change change = change_of_name(AT_FDCWD, path);
  return change_made(&change, raw_mknodat(AT_FDCWD, path, mode, dev));
}

int hook_mknodat(int dirfd, const char* path, mode_t mode, dev_t dev) HOOK(mknodat);
int hook_mknodat(int dirfd, const char* path, mode_t mode, dev_t dev) {
  const struct change change = change_of_name(dirfd, path);
  return change_made(&change, raw_mknodat(dirfd, path, mode, dev));
}

int hook_xmknod(int version, const char* path, mode_t mode, dev_t* dev) HOOK(__xmknod);
int hook_xmknod(int version, const char* path, mode_t mode, dev_t* dev) {
  const struct change change = change_of_name(AT_FDCWD, path);
  return change_made(&change, real___xmknod()(version, path, mode, dev));
}

int hook_xmknodat(int version, int dirfd, const char* path, mode_t mode, dev_t* dev)
    HOOK(__xmknodat);
int hook_xmknodat(int version, int dirfd, const char* path, mode_t mode, dev_t* dev) {
  const struct change change = change_of_name(dirfd, path);
  return change_made(&change, real___xmknodat()(version, dirfd, path, mode, dev));
}

int hook_mkfifo(const char* path, mode_t mode) HOOK(mkfifo);
int hook_mkfifo(const char* path, mode_t mode) {
  const struct change change = change_of_name(AT_FDCWD, path);
  return change_made(&change, real_mkfifo()(path, mode));
}

int hook_mkfifoat(int dirfd, const char* path, mode_t mode) HOOK(mkfifoat);
int hook_mkfifoat(int dirfd, const char* path, mode_t mode) {
  const struct change change = change_of_name(dirfd, path);
  return change_made(&change, real_mkfifoat()(dirfd, path, mode));
}

// --- content and status ---

int hook_truncate(const char* path, off_t length) HOOK(truncate);
int hook_truncate(const char* path, off_t length) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_truncate()(path, length));
}
int hook_truncate64(const char*, off_t) HOOK_ALIAS(truncate64, truncate);

int hook_chmod(const char* path, mode_t mode) HOOK(chmod);
int hook_chmod(const char* path, mode_t mode) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_chmod()(path, mode));
}

int hook_chown(const char* path, uid_t user, gid_t group) HOOK(chown);
int hook_chown(const char* path, uid_t user, gid_t group) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_chown()(path, user, group));
}

int hook_lchown(const char* path, uid_t user, gid_t group) HOOK(lchown);
int hook_lchown(const char* path, uid_t user, gid_t group) {
  const struct change change = change_of(AT_FDCWD, path);
  return change_made(&change, real_lchown()(path, user, group));
}

// A descriptor of a copy would change that: it is the source's from now on.
static struct change change_of_descriptor(int fd) {
  struct change change = {.count = 0};
  struct stat status;
  const int saved = errno;
  map_attach();
  if (map_header()) {
    copied_leave(fd);
    if (raw_fstat(fd, &status) == 0 && map_is_source_device(status.st_dev)) {
      if (S_ISREG(status.st_mode)) add(&change, mark_of_inode(status.st_ino));
      if (S_ISDIR(status.st_mode) && path_leads_under_source(fd, "")) add_all(&change);
    }
  }
  errno = saved;
  return change;
}

static struct change change_of_either(int dirfd, const char* path) {
  return path && path[0] != '\0' ? change_of(dirfd, path) : change_of_descriptor(dirfd);
}

int hook_fchmod(int fd, mode_t mode) HOOK(fchmod);
int hook_fchmod(int fd, mode_t mode) {
  const struct change change = change_of_descriptor(fd);
  return change_made(&change, real_fchmod()(fd, mode));
}

int hook_fchmodat(int dirfd, const char* path, mode_t mode, int flags) HOOK(fchmodat);
int hook_fchmodat(int dirfd, const char* path, mode_t mode, int flags) {
  const struct change change = change_of_either(dirfd, path);
  return change_made(&change, real_fchmodat()(dirfd, path, mode, flags));
}

int hook_fchown(int fd, uid_t user, gid_t group) HOOK(fchown);
int hook_fchown(int fd, uid_t user, gid_t group) {
  const struct change change = change_of_descriptor(fd);
  return change_made(&change, real_fchown()(fd, user, group));
}

int hook_fchownat(int dirfd, const char* path, uid_t user, gid_t group, int flags) HOOK(fchownat);
int hook_fchownat(int dirfd, const char* path, uid_t user, gid_t group, int flags) {
  const struct change change = change_of_either(dirfd, path);
  return change_made(&change, real_fchownat()(dirfd, path, user, group, flags));
}

// A directory's own times do not concern the files below it.
static struct change change_of_times(int dirfd, const char* path) {
  struct change change = {.count = 0};
  if (!path || path[0] == '\0') return change_of_descriptor(dirfd);
  add_file(&change, dirfd, path, false);
  return change;
}

int hook_utime(const char* path, const struct utimbuf* times) HOOK(utime);
int hook_utime(const char* path, const struct utimbuf* times) {
  const struct change change = change_of_times(AT_FDCWD, path);
  return change_made(&change, real_utime()(path, times));
}

int hook_utimes(const char* path, const struct timeval times[2]) HOOK(utimes);
int hook_utimes(const char* path, const struct timeval times[2]) {
  const struct change change = change_of_times(AT_FDCWD, path);
  return change_made(&change, real_utimes()(path, times));
}

int hook_futimesat(int dirfd, const char* path, const struct timeval times[2]) HOOK(futimesat);
int hook_futimesat(int dirfd, const char* path, const struct timeval times[2]) {
  const struct change change = change_of_times(dirfd, path);
  return change_made(&change, real_futimesat()(dirfd, path, times));
}

int hook_utimensat(int dirfd, const char* path, const struct timespec times[2], int flags)
    HOOK(utimensat);
int hook_utimensat(int dirfd, const char* path, const struct timespec times[2], int flags) {
  const struct change change = change_of_times(dirfd, path);
  return change_made(&change, real_utimensat()(dirfd, path, times, flags));
}

int hook_futimes(int fd, const struct timeval times[2]) HOOK(futimes);
int hook_futimes(int fd, const struct timeval times[2]) {
  const struct change change = change_of_descriptor(fd);
  return change_made(&change, real_futimes()(fd, times));
}

int hook_futimens(int fd, const struct timespec times[2]) HOOK(futimens);
int hook_futimens(int fd, const struct timespec times[2]) {
  const struct change change = change_of_descriptor(fd);
  return change_made(&change, real_futimens()(fd, times));
}

// --- files of a name that the C library finds ---

static int made_by_template(const char* path, int fd) {
  const struct change change = fd >= 0 ? change_of_name(AT_FDCWD, path) : (struct change){0};
  return change_by_writer(&change, fd);
}

int hook_mkstemp(char* path) HOOK(mkstemp);
int hook_mkstemp(char* path) { return made_by_template(path, real_mkstemp()(path)); }
int hook_mkstemp64(char*) HOOK_ALIAS(mkstemp64, mkstemp);

int hook_mkostemp(char* path, int flags) HOOK(mkostemp);
int hook_mkostemp(char* path, int flags) {
  return made_by_template(path, real_mkostemp()(path, flags));
}
int hook_mkostemp64(char*, int) HOOK_ALIAS(mkostemp64, mkostemp);

int hook_mkstemps(char* path, int suffix) HOOK(mkstemps);
int hook_mkstemps(char* path, int suffix) {
  return made_by_template(path, real_mkstemps()(path, suffix));
}
int hook_mkstemps64(char*, int) HOOK_ALIAS(mkstemps64, mkstemps);

int hook_mkostemps(char* path, int suffix, int flags) HOOK(mkostemps);
int hook_mkostemps(char* path, int suffix, int flags) {
  return made_by_template(path, real_mkostemps()(path, suffix, flags));
}
int hook_mkostemps64(char*, int, int) HOOK_ALIAS(mkostemps64, mkostemps);
