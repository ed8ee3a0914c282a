// A C library whose openat takes a millisecond, as one on network storage does; preloaded behind
// the shim.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <unistd.h>

int openat(int dirfd, const char* path, int flags, ...) {
  int (*real)(int, const char*, int, ...) =
      (int (*)(int, const char*, int, ...))dlsym(RTLD_NEXT, "openat");
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);
  va_end(rest);
  usleep(1000);
  return real(dirfd, path, flags, mode);
}
