#include "real.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
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

int raw_close(int fd) { return (int)syscall(SYS_close, fd); }

int raw_dup3(int from, int to, int flags) { return (int)syscall(SYS_dup3, from, to, flags); }

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
