// The calls by which a descriptor's number comes to mean another file.
#include "watch.h"

#include "hook.h"
#include "real.h"

_Atomic(uint32_t) watched[WATCHED_DESCRIPTORS];

int hook_close(int fd) HOOK(close);
int hook_close(int fd) {
  watch_set(fd, 0);
  return real_close()(fd);
}
int hook___close(int) HOOK_ALIAS(__close, close);

static int followed(int from, int to) {
  if (to >= 0 && to != from) watch_set(to, watch_get(from));
  return to;
}

int hook_dup(int from) HOOK(dup);
int hook_dup(int from) { return followed(from, real_dup()(from)); }

int hook_dup2(int from, int to) HOOK(dup2);
int hook_dup2(int from, int to) { return followed(from, real_dup2()(from, to)); }
int hook___dup2(int, int) HOOK_ALIAS(__dup2, dup2);

int hook_dup3(int from, int to, int flags) HOOK(dup3);
int hook_dup3(int from, int to, int flags) { return followed(from, real_dup3()(from, to, flags)); }
