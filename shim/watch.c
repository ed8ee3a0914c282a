// The calls that make a descriptor's number refer to another file.
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <unistd.h>

#include "hook.h"
#include "marks.h"
#include "real.h"

_Atomic(uint64_t) watched[WATCHED_DESCRIPTORS];

static _Atomic(int) alone_below;  // the numbers that may be alone
static pid_t process;

void watch_set_alone(int fd, uint64_t value) {
  if ((unsigned)fd >= WATCHED_DESCRIPTORS) return;
  int below = atomic_load(&alone_below);
  while (below <= fd && !atomic_compare_exchange_weak(&alone_below, &below, fd + 1)) continue;
  watch_set(fd, value | WATCH_ALONE);
}

static bool is_open_elsewhere(uint64_t watch) {
  for (int fd = 0; fd < atomic_load(&alone_below); ++fd) {
    if (watch_get(fd) == watch) return true;
  }
  return false;
}

void watch_closed(uint64_t watch) {
  if (!(watch & WATCH_WRITER) || !(watch & WATCH_ALONE)) return;
  // The child of a vfork closes numbers of its own, in its parent's memory.
  if (getpid() == process && !is_open_elsewhere(watch)) mark_written(watch_mark(watch));
}

static void share_all(void) {
  for (int fd = 0; fd < atomic_load(&alone_below); ++fd) {
    atomic_fetch_and(&watched[fd], ~(uint64_t)WATCH_ALONE);
  }
}

static void begin_process(void) {
  process = getpid();
  share_all();
}

// pthread_atfork, without a library of its own where the C library is old.
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void*);
extern void* __dso_handle;

void watch_forks(void) {
  begin_process();
  // Before and after, for another thread may open a file between.
  (void)__register_atfork(share_all, share_all, begin_process, __dso_handle);
}

int hook_close(int fd) HOOK(close);
int hook_close(int fd) {
  const uint64_t watch = watch_get(fd);
  watch_set(fd, 0);
  const int result = real_close()(fd);
  if (watch & WATCH_WRITER) watch_closed(watch);
  return result;
}
int hook___close(int) HOOK_ALIAS(__close, close);

int hook_fclose(FILE* stream) HOOK(fclose);
int hook_fclose(FILE* stream) {
  const int saved = errno;
  const int fd = fileno(stream);  // -1 of a stream in memory
  errno = saved;
  const uint64_t watch = watch_get(fd);
  watch_set(fd, 0);
  const int result = real_fclose()(stream);
  watch_closed(watch);
  return result;
}

// `to`, which was something else before, stands for what `from` does.
static int followed(int from, int to, uint64_t before) {
  if (to < 0 || to == from) return to;
  const uint64_t watch = watch_get(from);
  if (watch & WATCH_WRITER && watch & WATCH_ALONE) {
    watch_set_alone(to, watch);  // the last of them to be closed ends it
  } else {
    watch_set(from, watch & ~(uint64_t)WATCH_ALONE);
    watch_set(to, watch & ~(uint64_t)WATCH_ALONE);
  }
  watch_closed(before);
  return to;
}

int hook_dup(int from) HOOK(dup);
int hook_dup(int from) { return followed(from, real_dup()(from), 0); }

int hook_dup2(int from, int to) HOOK(dup2);
int hook_dup2(int from, int to) {
  const uint64_t before = watch_get(to);
  return followed(from, real_dup2()(from, to), before);
}
int hook___dup2(int, int) HOOK_ALIAS(__dup2, dup2);

int hook_dup3(int from, int to, int flags) HOOK(dup3);
int hook_dup3(int from, int to, int flags) {
  const uint64_t before = watch_get(to);
  return followed(from, real_dup3()(from, to, flags), before);
}

// The argument is an int, a pointer or nothing: as the C library does, it is handed on as it came.
int hook_fcntl(int fd, int command, ...) HOOK(fcntl);
int hook_fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* argument = va_arg(rest, void*);
  va_end(rest);
  const int result = real_fcntl()(fd, command, argument);
  return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? followed(fd, result, 0) : result;
}
int hook_fcntl64(int, int, ...) HOOK_ALIAS(fcntl64, fcntl);

// Its file actions duplicate numbers unseen.
int hook_posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions,
                     const posix_spawnattr_t* attributes, char* const arguments[],
                     char* const environment[]) HOOK(posix_spawn);
int hook_posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions,
                     const posix_spawnattr_t* attributes, char* const arguments[],
                     char* const environment[]) {
  share_all();
  return real_posix_spawn()(child, path, actions, attributes, arguments, environment);
}

int hook_posix_spawnp(pid_t* child, const char* name, const posix_spawn_file_actions_t* actions,
                      const posix_spawnattr_t* attributes, char* const arguments[],
                      char* const environment[]) HOOK(posix_spawnp);
int hook_posix_spawnp(pid_t* child, const char* name, const posix_spawn_file_actions_t* actions,
                      const posix_spawnattr_t* attributes, char* const arguments[],
                      char* const environment[]) {
  share_all();
  return real_posix_spawnp()(child, name, actions, attributes, arguments, environment);
}
