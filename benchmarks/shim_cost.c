// Times calls of the C library by the preloaded functions and by the real ones, in turns.
//   shim_cost ROUNDS CALLS OUTSIDE REFUSED PLACED COPY
// runs in the folder of OUTSIDE. Prints a line per case: its name, the median nanoseconds of the
// real call, and the median over the rounds of what the intercepted one takes more.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int open_type(const char*, int, ...);
typedef int openat_type(int, const char*, int, ...);
typedef ssize_t read_type(int, void*, size_t);
typedef ssize_t pread_type(int, void*, size_t, off_t);
typedef int fstat_type(int, struct stat*);

struct calls {
  open_type* open;
  openat_type* openat;
  read_type* read;
  pread_type* pread;
  fstat_type* fstat;
};

static int calls;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static void* checked(void* pointer, const char* what) {
  if (!pointer) {
    fprintf(stderr, "%s: %s\n", what, dlerror());
    exit(1);
  }
  return pointer;
}

static double time_open(const struct calls* by, const char* path, int fd) {
  (void)fd;
  double total = 0;
  for (int i = 0; i < calls; ++i) {
    const double begin = now();
    const int opened = by->open(path, O_RDONLY);
    total += now() - begin;
    if (opened < 0) exit(3);
    close(opened);
  }
  return total / calls;
}

static double time_openat(const struct calls* by, const char* path, int folder) {
  double total = 0;
  for (int i = 0; i < calls; ++i) {
    const double begin = now();
    const int opened = by->openat(folder, path, O_RDONLY);
    total += now() - begin;
    if (opened < 0) exit(3);
    close(opened);
  }
  return total / calls;
}

static double time_read(const struct calls* by, const char* path, int fd) {
  (void)path;
  char byte;
  const double begin = now();
  for (int i = 0; i < calls; ++i) {
    if (by->read(fd, &byte, 1) != 1) exit(4);
  }
  return (now() - begin) / calls;
}

static double time_pread(const struct calls* by, const char* path, int fd) {
  (void)path;
  char byte;
  const double begin = now();
  for (int i = 0; i < calls; ++i) {
    if (by->pread(fd, &byte, 1, i % 4096) != 1) exit(4);
  }
  return (now() - begin) / calls;
}

static double time_fstat(const struct calls* by, const char* path, int fd) {
  (void)path;
  struct stat status;
  const double begin = now();
  for (int i = 0; i < calls; ++i) {
    if (by->fstat(fd, &status) != 0) exit(5);
  }
  return (now() - begin) / calls;
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values, int count) {
  qsort(values, (size_t)count, sizeof(*values), ascending);
  return values[count / 2];
}

typedef double timed(const struct calls*, const char*, int);

static void compare(const char* name, timed* time, const struct calls* real, const char* real_path,
                    const struct calls* hooked, const char* path, int rounds) {
  double* plain = malloc((size_t)rounds * sizeof(double));
  double* more = malloc((size_t)rounds * sizeof(double));
  const int fd = hooked->open(time == time_openat ? "." : path, O_RDONLY);
  for (int round = -2; round < rounds; ++round) {
    double both[2];
    for (int turn = 0; turn < 2; ++turn) {
      const int hook = (turn + round) & 1;
      if (time == time_read) lseek(fd, 0, SEEK_SET);
      both[hook] = hook ? time(hooked, path, fd) : time(real, real_path, fd);
    }
    if (round < 0) continue;
    plain[round] = both[0];
    more[round] = both[1] - both[0];
  }
  close(fd);
  printf("%s\t%.1f\t%.1f\n", name, median(plain, rounds), median(more, rounds));
  free(plain);
  free(more);
}

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const int rounds = atoi(argv[1]);
  calls = atoi(argv[2]);
  const char *outside = argv[3], *refused = argv[4], *placed = argv[5], *copy = argv[6];
  void* libc = checked(dlopen("libc.so.6", RTLD_LAZY), "libc.so.6");
  struct calls real;
  void** slots[] = {(void**)&real.open, (void**)&real.openat, (void**)&real.read,
                    (void**)&real.pread, (void**)&real.fstat};
  const char* names[] = {"open", "openat", "read", "pread", "fstat"};
  for (int i = 0; i < 5; ++i) *slots[i] = checked(dlsym(libc, names[i]), names[i]);
  const struct calls hooked = {open, openat, read, pread, fstat};
  if (hooked.open == real.open) {
    fprintf(stderr, "the library is not preloaded\n");
    return 1;
  }
  const char* relative = strrchr(outside, '/') + 1;
  compare("open, outside", time_open, &real, outside, &hooked, outside, rounds);
  compare("open, outside, relative", time_open, &real, relative, &hooked, relative, rounds);
  compare("openat, outside", time_openat, &real, relative, &hooked, relative, rounds);
  compare("open, refused", time_open, &real, refused, &hooked, refused, rounds);
  compare("open, placed, to open of the copy", time_open, &real, copy, &hooked, placed, rounds);
  compare("read, outside", time_read, &real, outside, &hooked, outside, rounds);
  compare("pread, outside", time_pread, &real, outside, &hooked, outside, rounds);
  compare("read, refused", time_read, &real, refused, &hooked, refused, rounds);
  compare("pread, refused", time_pread, &real, refused, &hooked, refused, rounds);
  compare("read, placed", time_read, &real, placed, &hooked, placed, rounds);
  compare("pread, placed", time_pread, &real, placed, &hooked, placed, rounds);
  compare("fstat, outside", time_fstat, &real, outside, &hooked, outside, rounds);
  compare("fstat, placed", time_fstat, &real, placed, &hooked, placed, rounds);
  return 0;
}
