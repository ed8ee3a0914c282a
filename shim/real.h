// The C library's own functions behind the interposed ones, and system calls that nobody
// interposes.
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

struct flock;
struct statx;

#define STOKER_REAL_FUNCTIONS(X)                                   \
  X(int, openat, (int, const char*, int, ...))                     \
  X(int, __open_2, (const char*, int))                             \
  X(int, __openat_2, (int, const char*, int))                      \
  X(void*, mmap, (void*, size_t, int, int, int, off_t))            \
  X(int, chdir, (const char*))                                     \
  X(int, fchdir, (int))                                            \
  X(int, dup, (int))                                               \
  X(int, dup2, (int, int))                                         \
  X(int, dup3, (int, int, int))                                    \
  X(int, close, (int))                                             \
  X(FILE*, fopen, (const char*, const char*))                      \
  X(FILE*, freopen, (const char*, const char*, FILE*))             \
  X(ssize_t, read, (int, void*, size_t))                           \
  X(ssize_t, pread, (int, void*, size_t, off_t))                   \
  X(ssize_t, readv, (int, const struct iovec*, int))               \
  X(ssize_t, preadv, (int, const struct iovec*, int, off_t))       \
  X(ssize_t, preadv2, (int, const struct iovec*, int, off_t, int)) \
  X(ssize_t, __read_chk, (int, void*, size_t, size_t))             \
  X(ssize_t, __pread_chk, (int, void*, size_t, off_t, size_t))     \
  X(int, fstat, (int, struct stat*))                               \
  X(int, fstatat, (int, const char*, struct stat*, int))           \
  X(int, __fxstat, (int, int, struct stat*))                       \
  X(int, __fxstatat, (int, int, const char*, struct stat*, int))   \
  X(int, statx, (int, const char*, int, unsigned, struct statx*))

// real_NAME() is the next definition of NAME after this library's, or NULL where the C library has
// none. Resolved when the library is loaded; a call from an earlier constructor resolves its own.
#define STOKER_DECLARE_REAL(type, name, arguments) \
  typedef type real_##name##_type arguments;       \
  real_##name##_type* real_##name(void);
STOKER_REAL_FUNCTIONS(STOKER_DECLARE_REAL)

void real_resolve_all(void);

// These set errno as the C library does, are no cancellation points and see the real file.
int raw_openat(int dirfd, const char* path, int flags);
int raw_close(int fd);
int raw_dup3(int from, int to, int flags);
int raw_fstat(int fd, struct stat* status);
int raw_fstatat(int dirfd, const char* path, struct stat* status, int flags);
int raw_statx(int dirfd, const char* path, int flags, unsigned mask, struct statx* status);
// fcntl(F_OFD_GETLK): who holds a lock that stands against this one.
int raw_find_lock(int fd, struct flock* lock);
off_t raw_lseek(int fd, off_t offset, int whence);
ssize_t raw_preadv(int fd, const struct iovec* parts, int count, off_t offset);
ssize_t raw_preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags);
ssize_t raw_readlink(const char* path, char* target, size_t size);
ssize_t raw_getcwd(char* path, size_t size);
void* raw_mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset);
