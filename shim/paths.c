#include "paths.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>

#include "real.h"

// The length of a relative path that needs no help, or 0.
static size_t plain_length(const char* path) {
  const char* part = path;
  for (;;) {
    const char* end = strchrnul(part, '/');
    const size_t length = (size_t)(end - part);
    if (length == 0 || (part[0] == '.' && (length == 1 || (length == 2 && part[1] == '.')))) {
      return 0;
    }
    if (*end == '\0') return (size_t)(end - path);
    part = end + 1;
  }
}

bool path_is_under_source(const char* path, struct named_file* file) {
  if (path[0] != '/') return false;
  const struct stoker_table* table = map_header();
  for (uint32_t row = 0; row < table->source_count; ++row) {
    const struct stoker_source* source = &table->sources[row];
    const size_t length = source->path.length;
    if (strncmp(path, map_string(source->path), length) != 0 || path[length] != '/') continue;
    const size_t rest = plain_length(path + length + 1);
    if (rest == 0 || rest >= PATH_MAX) return false;
    *file = map_name((uint8_t)row, path + length + 1, (uint32_t)rest);
    return true;
  }
  return false;
}

// What follows the name of the working directory, or NULL.
static const char* after_working_directory(const char* path) {
  static const char name[] = "/proc/self/cwd/";
  return strncmp(path, name, sizeof(name) - 1) == 0 ? path + sizeof(name) - 1 : NULL;
}

bool path_needs_joining(const char* path) {
  if (path[0] != '/') return path[0] != '\0';
  if (after_working_directory(path)) return true;
  for (const char* at = path; (at = strchr(at, '/')) != NULL; ++at) {
    if (at[1] == '/' || at[1] == '.') return true;
  }
  return false;
}

bool path_of_descriptor(int fd, char path[PATH_MAX]) {
  char link[32] = "/proc/self/fd/";
  char digits[12];
  int count = 0;
  for (unsigned rest = (unsigned)fd; count == 0 || rest > 0; rest /= 10) {
    digits[count++] = (char)('0' + rest % 10);
  }
  size_t end = strlen(link);
  while (count > 0) link[end++] = digits[--count];
  link[end] = '\0';
  const ssize_t length = raw_readlink(link, path, PATH_MAX);
  if (length <= 0 || length >= PATH_MAX || path[0] != '/') return false;
  path[length] = '\0';
  return true;
}

enum { REMEMBERED = 4096 };

static _Atomic(uint32_t) outside[REMEMBERED];  // keys of directories
static _Atomic(uint32_t) moves;

uint64_t path_working_directory(void) { return atomic_load(&moves) + 1u; }

void path_working_directory_changed(void) { atomic_fetch_add(&moves, 1); }

static const char* last_part(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// Never 0, and another one every 17 seconds.
static uint32_t directory_key(struct named_place place) {
  const uint32_t length = (uint32_t)(last_part(place.path) - place.path);
  const uint64_t name = map_name(0, place.path, length).hash;
  const uint64_t mixed = (name ^ place.from << 32 ^ now_ns() >> 34) * 0x9E3779B97F4A7C15ull;
  return (uint32_t)(mixed >> 32) | 1u;
}

static _Atomic(uint32_t)* room_of(uint32_t key) { return &outside[(key >> 1) % REMEMBERED]; }

bool path_is_outside(struct named_place place) {
  const uint32_t key = directory_key(place);
  return atomic_load_explicit(room_of(key), memory_order_relaxed) == key;
}

void path_remember_outside(struct named_place place, const char* found) {
  if (strcmp(last_part(place.path), last_part(found)) != 0) return;  // the last part is a link
  const uint32_t key = directory_key(place);
  atomic_store_explicit(room_of(key), key, memory_order_relaxed);
}

// The directory that relative paths begin at, without a symbolic link in it.
static bool begin_of(int dirfd, char path[PATH_MAX]) {
  if (dirfd != AT_FDCWD) return dirfd >= 0 && path_of_descriptor(dirfd, path);
  const ssize_t size = raw_getcwd(path, PATH_MAX);
  return size > 0 && path[0] == '/';
}

bool path_join(int dirfd, const char* path, char joined[PATH_MAX]) {
  size_t length = 0;
  const char* relative = after_working_directory(path);
  if (relative) {
    path = relative + strspn(relative, "/");
    dirfd = AT_FDCWD;
  }
  if (path[0] != '/') {
    if (!begin_of(dirfd, joined)) return false;
    length = strlen(joined);
    if (length == 1) length = 0;  // the root
  }
  bool named = false;
  for (const char* part = path; *part != '\0';) {
    const char* end = strchrnul(part, '/');
    const size_t size = (size_t)(end - part);
    const bool here = size == 0 || (size == 1 && part[0] == '.');
    if (size == 2 && part[0] == '.' && part[1] == '.') {
      if (named) return false;
      while (length > 0 && joined[--length] != '/') continue;
    } else if (!here) {
      if (length + 1 + size >= PATH_MAX) return false;
      joined[length] = '/';
      memcpy(joined + length + 1, part, size);
      length += 1 + size;
      named = true;
    }
    if (*end == '\0') {
      joined[length] = '\0';
      return !here && named;
    }
    part = end + 1;
  }
  return false;
}

// A function of its own, because its frame holds a path.
static __attribute__((noinline)) bool hash_joined(int dirfd, const char* path, uint32_t* hash) {
  char joined[PATH_MAX];
  struct named_file file;
  if (!path_join(dirfd, path, joined) || !path_is_under_source(joined, &file)) return false;
  *hash = file.hash;
  return true;
}

bool path_hash(int dirfd, const char* path, uint32_t* hash) {
  struct named_file file;
  if (!path_is_under_source(path, &file)) {
    return path_needs_joining(path) && hash_joined(dirfd, path, hash);
  }
  *hash = file.hash;
  return true;
}

bool path_leads_under_source(int dirfd, const char* path) {
  char parent[PATH_MAX + 2];
  struct named_file file;
  size_t length = strlen(path);
  while (length > 1 && path[length - 1] == '/') --length;
  while (length > 0 && path[length - 1] != '/') --length;
  if (length >= PATH_MAX) return false;
  memcpy(parent, path, length);
  strcpy(parent + length, ".");
  const int fd = raw_openat(dirfd, parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool known = path_of_descriptor(fd, parent);
  raw_close(fd);
  length = known ? strlen(parent) : 0;
  if (length == 0 || length + 2 >= PATH_MAX) return false;
  memcpy(parent + length, "/x", 3);  // any file of it
  return path_is_under_source(parent, &file);
}
