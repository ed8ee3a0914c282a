// Programs that share what they opened, or hold a lot of it.
//   reads share PATH N      N threads and N children read one descriptor of PATH by blocks of 1000
//                           bytes, in which each byte is the block's number; prints how often which
//                           block came
//   reads many PATH N       opens PATH N times, reads its first byte by each, prints their sum
//   reads vfork PATH        a child of vfork opens and reads PATH, the parent afterwards too
//   reads signal PATH       a signal's handler opens and reads PATH while the program does so too
//   reads stack PATH        opens PATH in a thread with the smallest stack there is
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 1000, MAX_BLOCKS = 1 << 16 };

static int shared_fd;
static unsigned* seen;
static const char* the_path;

static void fail(const char* what) {
  perror(what);
  _exit(1);
}

static void* read_blocks(void* unused) {
  (void)unused;
  unsigned block[BLOCK / 4];
  ssize_t count;
  while ((count = read(shared_fd, block, BLOCK)) == BLOCK) {
    for (int i = 1; i < BLOCK / 4; ++i) {
      if (block[i] != block[0]) _exit(3);
    }
    __atomic_fetch_add(&seen[block[0]], 1, __ATOMIC_RELAXED);
  }
  if (count != 0) fail("read");
  return NULL;
}

static void read_by_threads(int threads) {
  pthread_t ids[64];
  for (int i = 0; i < threads; ++i) pthread_create(&ids[i], NULL, read_blocks, NULL);
  for (int i = 0; i < threads; ++i) pthread_join(ids[i], NULL);
}

static void share(const char* path, int number) {
  shared_fd = open(path, O_RDONLY);
  seen = mmap(NULL, MAX_BLOCKS * sizeof(*seen), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
              -1, 0);
  puts("opened");
  fflush(stdout);
  char line;
  if (read(0, &line, 1) != 1) fail("standard input");
  for (int i = 0; i < number; ++i) {
    if (fork() == 0) {
      read_by_threads(number);
      _exit(0);
    }
  }
  read_by_threads(number);
  for (int i = 0, status; i < number; ++i) {
    if (wait(&status) < 0 || status != 0) exit(4);
  }
  for (int block = 0; block < MAX_BLOCKS; ++block) {
    if (seen[block] > 0) printf("%d %u\n", block, seen[block]);
  }
  printf("end %ld\n", (long)lseek(shared_fd, 0, SEEK_CUR));
}

static int first_byte(const char* path) {
  unsigned char byte;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0 || read(fd, &byte, 1) != 1) fail(path);
  close(fd);
  return byte;
}

static void many(const char* path, int number) {
  long sum = 0;
  int* fds = malloc((size_t)number * sizeof(*fds));
  for (int i = 0; i < number; ++i) {
    if ((fds[i] = open(path, O_RDONLY)) < 0) fail("open");
  }
  for (int i = 0; i < number; ++i) {
    unsigned char byte;
    if (read(fds[i], &byte, 1) != 1) fail("read");
    sum += byte;
  }
  printf("%ld\n", sum);
}

static volatile sig_atomic_t handled;

static void on_signal(int number) {
  (void)number;
  handled += first_byte(the_path) > 0;
}

static void interrupt(void) {
  const struct itimerval often = {{0, 200}, {0, 200}};
  signal(SIGALRM, on_signal);
  setitimer(ITIMER_REAL, &often, NULL);
  while (handled < 500) {
    const int fd = open(the_path, O_RDONLY);
    if (fd < 0) fail("open");
    close(fd);
  }
  puts("handled");
}

static void* open_one(void* result) {
  *(int*)result = first_byte(the_path);
  return NULL;
}

static void small_stack(void) {
  pthread_attr_t attributes;
  pthread_t id;
  int byte = 0;
  pthread_attr_init(&attributes);
  // The C library keeps part of the least for itself; a program needs some for its own frames.
  pthread_attr_setstacksize(&attributes, (size_t)PTHREAD_STACK_MIN + 16384);
  if (pthread_create(&id, &attributes, open_one, &byte) != 0) exit(5);
  pthread_join(id, NULL);
  printf("%d\n", byte);
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  the_path = argv[2];
  if (strcmp(argv[1], "share") == 0) {
    share(argv[2], atoi(argv[3]));
  } else if (strcmp(argv[1], "many") == 0) {
    many(argv[2], atoi(argv[3]));
  } else if (strcmp(argv[1], "vfork") == 0) {
    volatile int byte = -1;
    if (vfork() == 0) {
      byte = first_byte(argv[2]);
      _exit(0);
    }
    printf("%d %d\n", byte, first_byte(argv[2]));
  } else if (strcmp(argv[1], "signal") == 0) {
    interrupt();
  } else if (strcmp(argv[1], "stack") == 0) {
    small_stack();
  } else {
    return 2;
  }
  return 0;
}
