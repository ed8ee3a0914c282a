#include "real.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8 && sizeof(long) == 8, "64-bit machines only");

// dlsym moved into libc.so in 2.34; the old version runs everywhere.
#if defined(__x86_64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
#else
#error "the shim knows x86-64 and aarch64"
#endif

#define DEFINE_REAL(type, name, arguments)                                             \
  real_##name##_type* real_##name(void) {                                              \
    static _Atomic(real_##name##_type*) found;                                         \
    real_##name##_type* function = atomic_load_explicit(&found, memory_order_relaxed); \
    if (function) return function;                                                     \
    void* symbol = dlsym(RTLD_NEXT, #name);                                            \
    memcpy(&function, &symbol, sizeof(symbol));                                        \
    atomic_store_explicit(&found, function, memory_order_relaxed);                     \
    return function;                                                                   \
  }
STOKER_REAL_FUNCTIONS(DEFINE_REAL)

#define RESOLVE(type, name, arguments) (void)real_##name();
void real_resolve_all(void) { STOKER_REAL_FUNCTIONS(RESOLVE) }

int raw_openat(int dirfd, const char* path, int flags) {
  return (int)syscall(SYS_openat, dirfd, path, flags, 0);
}

int raw_renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
#ifdef SYS_renameat2
  return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
#else
  return (int)syscall(-1L, from_dir, from, to_dir, to, flags);
#endif
}

int raw_mknodat(int dirfd, const char* path, mode_t mode, dev_t dev) {
  return (int)syscall(SYS_mknodat, dirfd, path, mode, (unsigned)dev);
}

int raw_close(int fd) { return (int)syscall(SYS_close, fd); }

int raw_dup3(int from, int to, int flags) { return (int)syscall(SYS_dup3, from, to, flags); }

long raw_fcntl(int fd, int command, long argument) {
  return syscall(SYS_fcntl, fd, command, argument);
}

int raw_fstat(int fd, struct stat* status) { return (int)syscall(SYS_fstat, fd, status); }

int raw_fstatat(int dirfd, const char* path, struct stat* status, int flags) {
  return (int)syscall(SYS_newfstatat, dirfd, path, status, flags);
}

int raw_statx(int dirfd, const char* path, int flags, unsigned mask, struct statx* status) {
#ifdef SYS_statx
  return (int)syscall(SYS_statx, dirfd, path, flags, mask, status);
#else
  return (int)syscall(-1L, dirfd, path, flags, mask, status);
#endif
}

bool raw_find_directory(const char* path, uint64_t* dev, uint64_t* ino) {
  const int saved = errno;
  struct stat status;
  bool found = false, asked = false;
#ifdef AT_STATX_DONT_SYNC
  struct statx more;
  found = raw_statx(AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_INO, &more) == 0;
  asked = found || errno != ENOSYS;
  if (found) {
    *dev = makedev(more.stx_dev_major, more.stx_dev_minor);
    *ino = more.stx_ino;
  }
#endif
  if (!asked && raw_fstatat(AT_FDCWD, path, &status, 0) == 0) {
    found = true;
    *dev = status.st_dev;
    *ino = status.st_ino;
  }
  errno = saved;
  return found;
}

int raw_find_lock(int fd, struct flock* lock) {
  enum { OFD_GETLK = 36 };  // F_OFD_GETLK, which old headers lack
  return (int)syscall(SYS_fcntl, fd, OFD_GETLK, lock);
}

off_t raw_lseek(int fd, off_t offset, int whence) { return syscall(SYS_lseek, fd, offset, whence); }

ssize_t raw_preadv(int fd, const struct iovec* parts, int count, off_t offset) {
  return syscall(SYS_preadv, fd, parts, (long)count, offset, 0L);
}

ssize_t raw_preadv2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
#ifdef SYS_preadv2
  return syscall(SYS_preadv2, fd, parts, (long)count, offset, 0L, flags);
#else
  return syscall(-1L, fd, parts, (long)count, offset, 0L, flags);
#endif
}

ssize_t raw_readlink(const char* path, char* target, size_t size) {
  return syscall(SYS_readlinkat, -100L, path, target, size);
}

ssize_t raw_getcwd(char* path, size_t size) { return syscall(SYS_getcwd, path, size); }

void* raw_mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset) {
  return (void*)syscall(SYS_mmap, at, length, protection, flags, fd, offset);
}
