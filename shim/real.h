// The C library's own functions behind the interposed ones, and system calls that no code
// interposes.
#pragma once

#include <spawn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

struct flock;
struct timeval;
struct utimbuf;
struct statx;

#define STOKER_REAL_FUNCTIONS(X)                                                       \
  X(int, openat, (int, const char*, int, ...))                                         \
  X(int, __open_2, (const char*, int))                                                 \
  X(int, __openat_2, (int, const char*, int))                                          \
  X(void*, mmap, (void*, size_t, int, int, int, off_t))                                \
  X(int, chdir, (const char*))                                                         \
  X(int, fchdir, (int))                                                                \
  X(int, dup, (int))                                                                   \
  X(int, dup2, (int, int))                                                             \
  X(int, dup3, (int, int, int))                                                        \
  X(int, close, (int))                                                                 \
  X(int, fclose, (FILE*))                                                              \
  X(int, fcntl, (int, int, ...))                                                       \
  X(FILE*, fopen, (const char*, const char*))                                          \
  X(int, rename, (const char*, const char*))                                           \
  X(int, renameat, (int, const char*, int, const char*))                               \
  X(int, renameat2, (int, const char*, int, const char*, unsigned))                    \
  X(int, link, (const char*, const char*))                                             \
  X(int, linkat, (int, const char*, int, const char*, int))                            \
  X(int, symlink, (const char*, const char*))                                          \
  X(int, symlinkat, (const char*, int, const char*))                                   \
  X(int, unlink, (const char*))                                                        \
  X(int, unlinkat, (int, const char*, int))                                            \
  X(int, remove, (const char*))                                                        \
  X(int, __xmknod, (int, const char*, mode_t, dev_t*))                                 \
  X(int, __xmknodat, (int, int, const char*, mode_t, dev_t*))                          \
  X(int, mkfifo, (const char*, mode_t))                                                \
  X(int, mkfifoat, (int, const char*, mode_t))                                         \
  X(int, truncate, (const char*, off_t))                                               \
  X(int, chmod, (const char*, mode_t))                                                 \
  X(int, chown, (const char*, uid_t, gid_t))                                           \
  X(int, lchown, (const char*, uid_t, gid_t))                                          \
  X(int, fchmod, (int, mode_t))                                                        \
  X(int, fchmodat, (int, const char*, mode_t, int))                                    \
  X(int, fchown, (int, uid_t, gid_t))                                                  \
  X(int, fchownat, (int, const char*, uid_t, gid_t, int))                              \
  X(int, utime, (const char*, const struct utimbuf*))                                  \
  X(int, utimes, (const char*, const struct timeval*))                                 \
  X(int, futimesat, (int, const char*, const struct timeval*))                         \
  X(int, utimensat, (int, const char*, const struct timespec*, int))                   \
  X(int, futimes, (int, const struct timeval*))                                        \
  X(int, futimens, (int, const struct timespec*))                                      \
  X(int, mkstemp, (char*))                                                             \
  X(int, mkostemp, (char*, int))                                                       \
  X(int, mkstemps, (char*, int))                                                       \
  X(int, mkostemps, (char*, int, int))                                                 \
  X(int, posix_spawn,                                                                  \
    (pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, \
     char* const*, char* const*))                                                      \
  X(int, posix_spawnp,                                                                 \
    (pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, \
     char* const*, char* const*))                                                      \
  X(off_t, lseek, (int, off_t, int))                                                   \
  X(FILE*, freopen, (const char*, const char*, FILE*))                                 \
  X(ssize_t, read, (int, void*, size_t))                                               \
  X(ssize_t, pread, (int, void*, size_t, off_t))                                       \
  X(ssize_t, readv, (int, const struct iovec*, int))                                   \
  X(ssize_t, preadv, (int, const struct iovec*, int, off_t))                           \
  X(ssize_t, preadv2, (int, const struct iovec*, int, off_t, int))                     \
  X(ssize_t, __read_chk, (int, void*, size_t, size_t))                                 \
  X(ssize_t, __pread_chk, (int, void*, size_t, off_t, size_t))                         \
  X(int, fstat, (int, struct stat*))                                                   \
  X(int, fstatat, (int, const char*, struct stat*, int))                               \
  X(int, __fxstat, (int, int, struct stat*))                                           \
  X(int, __fxstatat, (int, int, const char*, struct stat*, int))                       \
  X(int, statx, (int, const char*, int, unsigned, struct statx*))

// real_NAME() is the next definition of NAME after this library's, or NULL where the C library has
// none. Resolved when the library is loaded; a call from an earlier constructor resolves its own.
#define STOKER_DECLARE_REAL(type, name, arguments) \
  typedef type real_##name##_type arguments;       \
  real_##name##_type* real_##name(void);
STOKER_REAL_FUNCTIONS(STOKER_DECLARE_REAL)

void real_resolve_all(void);

// These set errno as the C library does, are no cancellation points and see the real file.
int raw_renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags);
int raw_mknodat(int dirfd, const char* path, mode_t mode, dev_t dev);
int raw_openat(int dirfd, const char* path, int flags);
int raw_close(int fd);
int raw_dup3(int from, int to, int flags);
long raw_fcntl(int fd, int command, long argument);
int raw_fstat(int fd, struct stat* status);
int raw_fstatat(int dirfd, const char* path, struct stat* status, int flags);
// The numbers of the directory that a path leads to, as the kernel has them at hand: no question to
// the storage beyond those that finding the path may take. errno is not kept.
bool raw_find_directory(const char* path, uint64_t* dev, uint64_t* ino);
int raw_statx(int dirfd, const char* path, int flags, unsigned mask, struct statx* status);
// fcntl(F_OFD_GETLK): who holds a lock that stands against this one.
int raw_find_lock(int fd, struct flock* lock);
off_t raw_lseek(int fd, off_t offset, int whence);
ssize_t raw_preadv(int fd, const struct iovec* parts, int count, off_t offset);
ssize_t raw_preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags);
ssize_t raw_readlink(const char* path, char* target, size_t size);
ssize_t raw_getcwd(char* path, size_t size);
void* raw_mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset);
