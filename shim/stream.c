// fopen and freopen: the descriptor under a stream opened for reading may be that of a copy.
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "change.h"
#include "copied.h"
#include "hook.h"
#include "map.h"
#include "marks.h"
#include "open.h"
#include "place.h"
#include "real.h"
#include "watch.h"

static bool is_for_reading(const char* mode) { return mode[0] == 'r' && !strchr(mode, '+'); }

static int flags_of(const char* mode) { return O_RDONLY | (strchr(mode, 'e') ? O_CLOEXEC : 0); }

// A new stream, or an old one that is to be another file's.
static FILE* open_writer(const char* path, const char* mode, FILE* old) {
  const struct change change = change_of_name(AT_FDCWD, path);
  FILE* stream = old ? real_freopen()(path, mode, old) : real_fopen()(path, mode);
  if (stream) (void)change_by_writer(&change, fileno(stream));
  return stream;
}

FILE* hook_fopen(const char* path, const char* mode) HOOK(fopen);
FILE* hook_fopen(const char* path, const char* mode) {
  map_attach();
  if (!is_for_reading(mode)) return open_writer(path, mode, NULL);
  // fdopen knows neither `,ccs=` nor the C library's own `c`.
  if (!map_live() || strpbrk(mode, ",c")) return real_fopen()(path, mode);
  const int fd = open_for_stream(path, flags_of(mode));
  if (fd < 0) return NULL;
  FILE* stream = fdopen(fd, mode);
  if (!stream) raw_close(fd);
  return stream;
}
FILE* hook_fopen64(const char*, const char*) HOOK_ALIAS(fopen64, fopen);

static FILE* reopen_reader(const char* path, const char* mode, FILE* old) {
  struct opening opening = {.dirfd = AT_FDCWD,
                            .path = path,
                            .flags = flags_of(mode),
                            .stream = true,
                            .moment = mark_moment()};
  FILE* stream = real_freopen()(path, mode, old);
  const int saved = errno;
  // Nothing was read yet. Without a path it is the file that it was.
  if (stream && path && map_live()) place_settle(fileno(stream), NULL, &opening);
  errno = saved;
  return stream;
}

FILE* hook_freopen(const char* path, const char* mode, FILE* stream) HOOK(freopen);
FILE* hook_freopen(const char* path, const char* mode, FILE* stream) {
  map_attach();
  const int fd = fileno(stream);
  const uint64_t before = watch_get(fd);
  const bool reads = is_for_reading(mode);
  if (!path && !reads && map_header()) copied_leave(fd);  // it is reopened by its number
  FILE* opened = reads ? reopen_reader(path, mode, stream) : open_writer(path, mode, stream);
  watch_closed(before);
  return opened;
}
FILE* hook_freopen64(const char*, const char*, FILE*) HOOK_ALIAS(freopen64, freopen);
