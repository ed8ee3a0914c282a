// fopen and freopen: the descriptor under a stream opened for reading may be that of a copy.
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "hook.h"
#include "map.h"
#include "open.h"
#include "place.h"
#include "real.h"

static bool is_for_reading(const char* mode) { return mode[0] == 'r' && !strchr(mode, '+'); }

static int flags_of(const char* mode) { return O_RDONLY | (strchr(mode, 'e') ? O_CLOEXEC : 0); }

FILE* hook_fopen(const char* path, const char* mode) HOOK(fopen);
FILE* hook_fopen(const char* path, const char* mode) {
  map_attach();
  // fdopen knows neither `,ccs=` nor the C library's own `c`.
  if (!map_live() || strpbrk(mode, ",c")) return real_fopen()(path, mode);
  if (!is_for_reading(mode)) {
    open_for_writing(path);
    return real_fopen()(path, mode);
  }
  const int fd = open_for_stream(path, flags_of(mode));
  if (fd < 0) return NULL;
  FILE* stream = fdopen(fd, mode);
  if (!stream) raw_close(fd);
  return stream;
}
FILE* hook_fopen64(const char*, const char*) HOOK_ALIAS(fopen64, fopen);

FILE* hook_freopen(const char* path, const char* mode, FILE* stream) HOOK(freopen);
FILE* hook_freopen(const char* path, const char* mode, FILE* stream) {
  map_attach();
  const bool reads = is_for_reading(mode);
  if (path && !reads) open_for_writing(path);
  FILE* opened = real_freopen()(path, mode, stream);
  if (!opened || !path || !reads || !map_live()) return opened;
  const int saved = errno;
  struct opening opening = {
      .dirfd = AT_FDCWD, .path = path, .flags = flags_of(mode), .stream = true};
  place_settle(fileno(opened), NULL, &opening);  // nothing was read yet
  errno = saved;
  return opened;
}
FILE* hook_freopen64(const char*, const char*, FILE*) HOOK_ALIAS(freopen64, freopen);
