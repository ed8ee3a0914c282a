// Preloaded by the fault campaign: moves the wall clock of a process by the seconds that the file
// $CAMPAIGN_CLOCK holds as a double, read at each call. Monotonic clocks stay as they are.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double* offset;

__attribute__((constructor)) static void attach(void) {
  const char* path = getenv("CAMPAIGN_CLOCK");
  int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  void* found = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
  if (found != MAP_FAILED) offset = found;
  close(fd);
}

static time_t moved_by(void) { return offset == NULL ? 0 : (time_t)*offset; }

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(clock, now);
  if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    now->tv_sec += moved_by();
  }
  return status;
}

int gettimeofday(struct timeval* now, void* zone) {
  (void)zone;
  struct timespec exact;
  int status = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return status;
}

time_t time(time_t* result) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (result != NULL) *result = exact.tv_sec;
  return exact.tv_sec;
}

// Deadlines by the wall clock, as a program got them from the moved one, are the kernel's again.
// What is far from today is monotonic.
static struct timespec unmoved(const struct timespec* deadline) {
  struct timespec back = *deadline;
  if (back.tv_sec - moved_by() > 1000000000) back.tv_sec -= moved_by();
  return back;
}

int sem_timedwait(sem_t* semaphore, const struct timespec* deadline) {
  static int (*real)(sem_t*, const struct timespec*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec back = unmoved(deadline);
  return real(semaphore, &back);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const struct timespec* deadline) {
  static int (*real)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec back = unmoved(deadline);
  return real(condition, mutex, &back);
}

int pthread_mutex_timedlock(pthread_mutex_t* mutex, const struct timespec* deadline) {
  static int (*real)(pthread_mutex_t*, const struct timespec*);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
  struct timespec back = unmoved(deadline);
  return real(mutex, &back);
}
