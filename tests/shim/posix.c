// Makes calls that it reads from standard input, one a line, and prints what each returned:
//   PROCESS CALL ARGUMENTS...
// PROCESS is A, this process; B, a child of it by fork; C, one by fork and exec: both live from
// their first line to the end. An open file goes by the number of its slot, which a fork inherits.
// Files have relative names, or, with a `/` before them, absolute ones below the working directory.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utime.h>

// What there was before glibc 2.33.
int __xmknod(int, const char*, mode_t, dev_t*);
int __xmknodat(int, int, const char*, mode_t, dev_t*);
enum { XMKNOD_VERSION = 0 };

enum { SLOTS = 10, WORDS = 8, SIZE = 1 << 16 };

static int files[SLOTS];
static FILE* streams[SLOTS];
static char* maps[SLOTS];
static char temporary[PATH_MAX];
static void* volatile nowhere = (void*)1;
static char said[SIZE];  // what the line is answered with

static void say(const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  const size_t used = strlen(said);
  vsnprintf(said + used, sizeof(said) - used, format, rest);
  va_end(rest);
}

// The result of a call that returns -1 with errno.
static void result(long value) {
  if (value < 0) {
    say(" error %d", errno);
  } else {
    say(" %ld", value);
  }
}

// As result, where numbers may differ.
static void done(bool good) {
  if (good) {
    say(" ok");
  } else {
    result(-1);
  }
}

static void bytes(const char* data, ssize_t count) {
  result(count);
  say(" [");
  for (ssize_t i = 0; i < count; ++i) say(data[i] >= ' ' ? "%c" : "\\%02x", data[i]);
  say("]");
}

static const char* path_of(const char* word) {
  static char paths[2][2 * PATH_MAX];
  static int turn;
  char* path = paths[turn ^= 1];
  if (strcmp(word, "NULL") == 0) return NULL;
  if (strcmp(word, "EMPTY") == 0) return "";
  if (strcmp(word, "LONG") == 0) return memset(path, 'l', 300);
  if (strcmp(word, "TEMPORARY") == 0) return temporary;
  if (word[0] == 'F' && word[1] == 'D') {  // a slot's other name
    snprintf(path, PATH_MAX, "/proc/self/fd/%d", files[atoi(word + 2) % SLOTS]);
    return path;
  }
  if (word[0] != '/') return word;
  snprintf(path, sizeof(paths[0]), "%s%s", getcwd(path, PATH_MAX), word);
  return path;
}

static int flags_of(const char* names) {
  static const struct {
    const char* name;
    int flag;
  } known[] = {{"r", O_RDONLY},
               {"w", O_WRONLY},
               {"rw", O_RDWR},
               {"creat", O_CREAT},
               {"excl", O_EXCL},
               {"trunc", O_TRUNC},
               {"append", O_APPEND},
               {"nofollow", O_NOFOLLOW},
               {"directory", O_DIRECTORY},
               {"path", O_PATH},
               {"cloexec", O_CLOEXEC},
               {"noatime", O_NOATIME},
               {"follow", AT_SYMLINK_FOLLOW},
               {"removedir", AT_REMOVEDIR},
               {"noreplace", 1},
               {"exchange", 2},
               {"none", 0},
               {"linkitself", AT_SYMLINK_NOFOLLOW}};
  int flags = 0;
  char copy[100];
  snprintf(copy, sizeof(copy), "%s", names);
  for (char* name = strtok(copy, ","); name; name = strtok(NULL, ",")) {
    bool found = false;
    for (size_t i = 0; i < sizeof(known) / sizeof(*known); ++i) {
      if (strcmp(name, known[i].name) != 0) continue;
      flags |= known[i].flag;
      found = true;
    }
    if (!found) abort();
  }
  return flags;
}

static void status(int failed, const struct stat* s) {
  if (failed) {
    result(-1);
    return;
  }
  say(" %o %ju", s->st_mode, (uintmax_t)(S_ISDIR(s->st_mode) ? 0 : s->st_nlink));
  if (S_ISREG(s->st_mode)) say(" size %jd", (intmax_t)s->st_size);
}

static void list(const char* path) {
  struct dirent** names;
  const int count = scandir(path, &names, NULL, alphasort);
  result(count);
  for (int i = 0; i < count; ++i) say(" %s", names[i]->d_name);
}

static void read_whole(int fd) {
  char data[SIZE];
  ssize_t count = 0, more = 1;
  if (fd < 0) {
    result(-1);
    return;
  }
  while (more > 0) {
    more = read(fd, data + count, sizeof(data) - (size_t)count);
    if (more > 0) count += more;
  }
  bytes(data, more < 0 ? more : count);
  close(fd);
}

static void map_whole(int fd) {
  struct stat s;
  if (fd < 0 || fstat(fd, &s)) {
    result(-1);
    return;
  }
  char* at = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (at == MAP_FAILED) {
    result(-1);
  } else {
    bytes(at, s.st_size);
    munmap(at, (size_t)s.st_size);
  }
  close(fd);
}

static void stream_whole(const char* path) {
  char data[SIZE];
  FILE* stream = fopen(path, "r");
  if (!stream) {
    result(-1);
    return;
  }
  bytes(data, (ssize_t)fread(data, 1, sizeof(data), stream));
  if (ferror(stream)) say(" error");
  fclose(stream);
}

// Whether the descriptor and the name are one file, and say the same of it.
static void same(int fd, const char* path) {
  struct stat a, b;
  if (fstat(fd, &a) || stat(path, &b)) {
    result(-1);
    return;
  }
  say(" %d %d %d %d", a.st_ino == b.st_ino && a.st_dev == b.st_dev, a.st_size == b.st_size,
      a.st_mode == b.st_mode && a.st_nlink == b.st_nlink,
      a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_ctim.tv_nsec == b.st_ctim.tv_nsec);
}

static void make_temporary(const char* call, const char* path) {
  const bool suffixed = strchr(call, 's') != strrchr(call, 's');  // of `mkstemps`, not of `mkstemp`
  snprintf(temporary, sizeof(temporary), "%sXXXXXX%s", path, suffixed ? ".x" : "");
  int fd = -1;
  if (strcmp(call, "mkstemp") == 0) fd = mkstemp(temporary);
  if (strcmp(call, "mkstemp64") == 0) fd = mkstemp64(temporary);
  if (strcmp(call, "mkostemp") == 0) fd = mkostemp(temporary, O_CLOEXEC);
  if (strcmp(call, "mkostemp64") == 0) fd = mkostemp64(temporary, O_CLOEXEC);
  if (strcmp(call, "mkstemps") == 0) fd = mkstemps(temporary, 2);
  if (strcmp(call, "mkstemps64") == 0) fd = mkstemps64(temporary, 2);
  if (strcmp(call, "mkostemps") == 0) fd = mkostemps(temporary, 2, O_CLOEXEC);
  if (strcmp(call, "mkostemps64") == 0) fd = mkostemps64(temporary, 2, O_CLOEXEC);
  files[0] = fd;
  done(fd >= 0);
}

static bool is(const char* call, const char* name) { return strcmp(call, name) == 0; }

static bool call_names(const char* call, char** w) {
  const char* a = w[0] ? path_of(w[0]) : NULL;
  const char* b = w[0] && w[1] ? path_of(w[1]) : NULL;
  const struct timeval times[2] = {{5, 0}, {7, 0}};
  const struct timespec exact[2] = {{5, 0}, {7, 0}};
  if (is(call, "rename"))
    result(rename(a, b));
  else if (is(call, "renameat"))
    result(renameat(AT_FDCWD, a, AT_FDCWD, b));
  else if (is(call, "renameat2"))
    result(renameat2(AT_FDCWD, a, AT_FDCWD, b, (unsigned)flags_of(w[2])));
  else if (is(call, "link"))
    result(link(a, b));
  else if (is(call, "linkat"))
    result(linkat(AT_FDCWD, a, AT_FDCWD, b, flags_of(w[2])));
  else if (is(call, "symlink"))
    result(symlink(w[0], b));
  else if (is(call, "symlinkat"))
    result(symlinkat(w[0], AT_FDCWD, b));
  else if (is(call, "unlink"))
    result(unlink(a));
  else if (is(call, "unlinkat"))
    result(unlinkat(AT_FDCWD, a, flags_of(w[1])));
  else if (is(call, "remove"))
    result(remove(a));
  else if (is(call, "rmdir"))
    result(rmdir(a));
  else if (is(call, "mkdir"))
    result(mkdir(a, 0755));
  else if (is(call, "mkfifo"))
    result(mkfifo(a, 0644));
  else if (is(call, "mkfifoat"))
    result(mkfifoat(AT_FDCWD, a, 0644));
  else if (is(call, "mknod"))
    result(mknod(a, S_IFREG | 0644, 0));
  else if (is(call, "mknodat"))
    result(mknodat(AT_FDCWD, a, S_IFREG | 0644, 0));
  else if (is(call, "truncate"))
    result(truncate(a, atol(w[1])));
  else if (is(call, "truncate64"))
    result(truncate64(a, atol(w[1])));
  else if (is(call, "chmod"))
    result(chmod(a, (mode_t)strtol(w[1], NULL, 8)));
  else if (is(call, "fchmodat"))
    result(fchmodat(AT_FDCWD, a, (mode_t)strtol(w[1], NULL, 8), 0));
  else if (is(call, "chown"))
    result(chown(a, (uid_t)atol(w[1]), (gid_t)-1));
  else if (is(call, "lchown"))
    result(lchown(a, (uid_t)atol(w[1]), (gid_t)-1));
  else if (is(call, "fchownat"))
    result(fchownat(AT_FDCWD, a, (uid_t)atol(w[1]), (gid_t)-1, 0));
  else if (is(call, "utime"))
    result(utime(a, &(struct utimbuf){5, 7}));
  else if (is(call, "utimes"))
    result(utimes(a, times));
  else if (is(call, "futimesat"))
    result(futimesat(AT_FDCWD, a, times));
  else if (is(call, "utimensat"))
    result(utimensat(AT_FDCWD, a, exact, 0));
  else if (is(call, "access"))
    result(access(a, R_OK));
  else if (is(call, "stat") || is(call, "lstat")) {
    struct stat s;
    status(is(call, "stat") ? stat(a, &s) : lstat(a, &s), &s);
  } else if (is(call, "ls"))
    list(a);
  else if (is(call, "cat"))
    read_whole(open(a, O_RDONLY));
  else if (is(call, "catat"))
    read_whole(openat(AT_FDCWD, a, O_RDONLY | O_CLOEXEC));
  else if (is(call, "catmap"))
    map_whole(open(a, O_RDONLY));
  else if (is(call, "catstream"))
    stream_whole(a);
  else if (is(call, "put") || is(call, "add")) {
    const int fd = open(a, O_WRONLY | O_CREAT | (is(call, "put") ? O_TRUNC : O_APPEND), 0644);
    if (fd < 0)
      result(-1);
    else
      result(write(fd, w[1], strlen(w[1])));
    if (fd >= 0) close(fd);
  } else if (is(call, "__xmknod") || is(call, "__xmknodat")) {
    dev_t none = 0;
    result(is(call, "__xmknod") ? __xmknod(XMKNOD_VERSION, a, S_IFREG | 0644, &none)
                                : __xmknodat(XMKNOD_VERSION, AT_FDCWD, a, S_IFREG | 0644, &none));
  } else if (strncmp(call, "mk", 2) == 0)
    make_temporary(call, a);
  else
    return false;
  return true;
}

static bool call_open(const char* call, char** w) {
  const int slot = w[0] ? atoi(w[0]) % SLOTS : 0;
  const char* a = w[0] && w[1] ? path_of(w[1]) : NULL;
  if (is(call, "open"))
    files[slot] = open(a, flags_of(w[2]), 0644);
  else if (is(call, "openat"))
    files[slot] = openat(AT_FDCWD, a, flags_of(w[2]), 0644);
  else if (is(call, "creat"))
    files[slot] = creat(a, 0644);
  else if (is(call, "creat64"))
    files[slot] = creat64(a, 0644);
  else if (is(call, "fopen") || is(call, "fopen64") || is(call, "freopen")) {
    streams[slot] = is(call, "fopen")     ? fopen(a, w[2])
                    : is(call, "fopen64") ? fopen64(a, w[2])
                                          : freopen(a, w[2], streams[slot]);
    done(streams[slot] != NULL);
    return true;
  } else
    return false;
  done(files[slot] >= 0);
  return true;
}

static bool call_stream(const char* call, char** w) {
  FILE* stream = w[0] ? streams[atoi(w[0]) % SLOTS] : NULL;
  char data[SIZE];
  if (is(call, "fread"))
    bytes(data, (ssize_t)fread(data, 1, (size_t)atol(w[1]), stream));
  else if (is(call, "fwrite"))
    result((long)fwrite(w[1], 1, strlen(w[1]), stream));
  else if (is(call, "fflush"))
    result(fflush(stream));
  else if (is(call, "fclose"))
    result(fclose(stream));
  else
    return false;
  return true;
}

static int whence_of(const char* name) {
  return is(name, "set") ? SEEK_SET : is(name, "cur") ? SEEK_CUR : is(name, "end") ? SEEK_END : 77;
}

static pid_t spawned;
static int to_spawned;

// Starts a shell that writes to the file the word that it is told.
static void spawn(const char* call, int fd) {
  int words[2];
  posix_spawn_file_actions_t actions;
  char* arguments[] = {"sh", "-c", "read word; echo $word", NULL};
  if (pipe2(words, O_CLOEXEC)) abort();
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, words[0], 0);
  posix_spawn_file_actions_adddup2(&actions, fd, 1);
  errno = is(call, "posix_spawn")
              ? posix_spawn(&spawned, "/bin/sh", &actions, NULL, arguments, environ)
              : posix_spawnp(&spawned, "sh", &actions, NULL, arguments, environ);
  done(errno == 0);
  posix_spawn_file_actions_destroy(&actions);
  close(words[0]);
  to_spawned = words[1];
}

static void tell(const char* word) {
  result(write(to_spawned, word, strlen(word)));
  close(to_spawned);
  waitpid(spawned, NULL, 0);
}

static bool call_file(const char* call, char** w) {
  const int slot = w[0] ? atoi(w[0]) % SLOTS : 0, fd = files[slot];
  const long n = w[0] && w[1] ? atol(w[1]) : 0, at = n && w[2] ? atol(w[2]) : 0;
  const struct timespec exact[2] = {{5, 0}, {7, 0}};
  const struct timeval times[2] = {{5, 0}, {7, 0}};
  char data[SIZE];
  struct iovec parts[2] = {{data, (size_t)n / 2}, {data + n / 2, (size_t)(n - n / 2)}};
  struct stat s;
  if (is(call, "read"))
    bytes(data, read(fd, data, (size_t)n));
  else if (is(call, "readnowhere"))
    result(read(fd, nowhere, 4));
  else if (is(call, "pread"))
    bytes(data, pread(fd, data, (size_t)n, at));
  else if (is(call, "readv"))
    bytes(data, readv(fd, parts, 2));
  else if (is(call, "preadv"))
    bytes(data, preadv(fd, parts, 2, at));
  else if (is(call, "preadv2"))
    bytes(data, preadv2(fd, parts, 2, at, 0));
  else if (is(call, "write"))
    result(write(fd, w[1], strlen(w[1])));
  else if (is(call, "pwrite"))
    result(pwrite(fd, w[1], strlen(w[1]), atol(w[2])));
  else if (is(call, "lseek"))
    result(lseek(fd, n, whence_of(w[2])));
  else if (is(call, "lseek64"))
    result(lseek64(fd, n, whence_of(w[2])));
  else if (is(call, "ftruncate"))
    result(ftruncate(fd, n));
  else if (is(call, "fstat"))
    status(fstat(fd, &s), &s);
  else if (is(call, "same"))
    same(fd, path_of(w[1]));
  else if (is(call, "fchmod"))
    result(fchmod(fd, (mode_t)strtol(w[1], NULL, 8)));
  else if (is(call, "fchown"))
    result(fchown(fd, (uid_t)n, (gid_t)-1));
  else if (is(call, "futimens"))
    result(futimens(fd, exact));
  else if (is(call, "futimes"))
    result(futimes(fd, times));
  else if (is(call, "close"))
    result(close(fd));
  else if (is(call, "dup"))
    done((files[n] = dup(fd)) >= 0);
  else if (is(call, "dup2"))
    done((files[n] = dup2(fd, 100 + (int)n)) >= 0);
  else if (is(call, "fdupfd"))
    done((files[n] = fcntl(fd, F_DUPFD_CLOEXEC, 200)) >= 0);
  else if (is(call, "getfl"))
    result(fcntl(fd, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK));
  else if (is(call, "map")) {
    maps[slot] =
        mmap(NULL, 4096, is(w[1], "rw") ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    done(maps[slot] != MAP_FAILED);
  } else if (is(call, "poke"))
    memcpy(maps[slot], w[1], strlen(w[1]));
  else if (is(call, "posix_spawn") || is(call, "posix_spawnp"))
    spawn(call, fd);
  else if (is(call, "tell"))
    tell(w[0]);
  else if (is(call, "peek"))
    bytes(maps[slot], n);
  else
    return false;
  return true;
}

static void answer(char* line) {
  char* words[WORDS + 1] = {NULL};
  int count = 0;
  for (char* word = strtok(line, " \n"); word && count < WORDS; word = strtok(NULL, " \n")) {
    words[count++] = word;
  }
  char** rest = words + 1;
  errno = 0;
  said[0] = '\0';
  if (is(words[0], "nobody"))
    done(geteuid() != 0 || seteuid(65534) == 0);
  else if (is(words[0], "chdir"))
    result(chdir(path_of(rest[0])));
  else if (!call_open(words[0], rest) && !call_stream(words[0], rest) &&
           !call_file(words[0], rest) && !call_names(words[0], rest))
    say(" UNKNOWN CALL");
}

struct child {
  FILE *to, *from;
};

static void serve(FILE* in, FILE* out) {
  char line[SIZE];
  while (fgets(line, sizeof(line), in)) {
    answer(line);
    fprintf(out, "%s\n", said);
    fflush(out);
  }
}

static struct child start(const char* program, bool execs) {
  int down[2], up[2];
  if (pipe(down) || pipe(up)) abort();
  if (fork() == 0) {
    close(down[1]);
    close(up[0]);
    if (execs) {
      dup2(down[0], 0);
      dup2(up[1], 1);
      execl(program, program, "serve", NULL);
      _exit(9);
    }
    serve(fdopen(down[0], "r"), fdopen(up[1], "w"));
    _exit(0);
  }
  close(down[0]);
  close(up[1]);
  return (struct child){fdopen(down[1], "w"), fdopen(up[0], "r")};
}

int main(int argc, char** argv) {
  if (argc > 1) {
    serve(stdin, stdout);
    return 0;
  }
  struct child children[2] = {{0}};
  char line[SIZE];
  while (fgets(line, sizeof(line), stdin)) {
    printf("%.*s:", (int)strcspn(line, "\n"), line);
    fflush(stdout);  // before a fork
    if (line[0] == 'A') {
      answer(line + 2);
    } else {
      struct child* child = &children[line[0] - 'B'];
      if (!child->to) *child = start(argv[0], line[0] == 'C');
      fputs(line + 2, child->to);
      fflush(child->to);
      if (!fgets(said, sizeof(said), child->from)) snprintf(said, sizeof(said), " DIED");
      said[strcspn(said, "\n")] = '\0';
    }
    puts(said);
  }
  for (int i = 0; i < 2; ++i) {
    if (children[i].to) fclose(children[i].to);
  }
  while (wait(NULL) > 0) continue;
  return 0;
}
