#include "report.h"

#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "real.h"

// One shard for each processor (modulo their number), so that they do not share cache lines.
static struct stoker_shard* shard(void) {
  struct stoker_counters* counters = map_counters();
  return counters ? &counters->shards[(unsigned)sched_getcpu() % STOKER_SHARDS] : NULL;
}

static void add(uint64_t* counter, uint64_t amount) {
  __atomic_fetch_add(counter, amount, __ATOMIC_RELAXED);
}

void count_open(unsigned row) {
  struct stoker_shard* mine = shard();
  if (mine) add(&mine->rows[row].opens, 1);
}

void count_read(unsigned row, uint64_t bytes) {
  struct stoker_shard* mine = shard();
  if (!mine) return;
  add(&mine->rows[row].reads, 1);
  add(&mine->rows[row].bytes, bytes);
}

void count_event(enum counted_event event) {
  struct stoker_shard* mine = shard();
  if (mine) add(&mine->requests + event, 1);
}

static struct stoker_request request_of(enum stoker_request_kind kind,
                                        const struct named_file* file, uint32_t entry) {
  return (struct stoker_request){
      .magic = STOKER_REQUEST_MAGIC,
      .kind = (uint8_t)kind,
      .source = file->source,
      .path_length = (uint16_t)file->length,
      .entry = entry,
      .hash = file->hash,
  };
}

enum { RING_WORDS = STOKER_RING_BYTES / 8 };

// Takes `bytes` of the ring, of which the first is at `position`; false when they are not free.
static bool claim(struct stoker_ring* ring, uint64_t bytes, uint64_t* position) {
  *position = __atomic_load_n(&ring->head, __ATOMIC_RELAXED);
  do {
    const uint64_t used = *position - __atomic_load_n(&ring->tail, __ATOMIC_ACQUIRE);
    if (used > STOKER_RING_BYTES - bytes) return false;
  } while (!__atomic_compare_exchange_n(&ring->head, position, *position + bytes, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return true;
}

static bool leave(const struct stoker_request* request, const struct named_file* file) {
  enum { HEAD = sizeof(uint64_t) + sizeof(*request) };
  struct stoker_ring* ring = map_ring();
  const uint64_t words = (HEAD + file->length + 7) / 8;
  uint64_t position;
  if (!ring || !claim(ring, words * 8, &position)) return false;
  const uint64_t first = position / 8;
  uint64_t* stamp = ring->words + first % RING_WORDS;
  for (uint64_t i = 1; i < words; ++i) {
    uint64_t word = 0;
    const uint64_t at = i * 8;
    const uint64_t left = HEAD + file->length - at;
    if (at < HEAD) {
      memcpy(&word, (const char*)request + at - sizeof(uint64_t), sizeof(word));
    } else {
      memcpy(&word, file->path + at - HEAD, left < sizeof(word) ? left : sizeof(word));
    }
    __atomic_store_n(ring->words + (first + i) % RING_WORDS, word, __ATOMIC_RELAXED);
  }
  __atomic_store_n(stamp, position + 1, __ATOMIC_RELEASE);
  return true;
}

static bool deliver(const struct stoker_request* request, const struct named_file* file, int fd) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (map_socket_path()[0] == '\0') return false;
  strcpy(address.sun_path, map_socket_path());
  struct iovec parts[2] = {{(void*)request, sizeof(*request)}, {(void*)file->path, file->length}};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
  } rights = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)),
                       .cmsg_level = SOL_SOCKET,
                       .cmsg_type = SCM_RIGHTS}};
  memcpy(CMSG_DATA(&rights.head), &fd, sizeof(fd));
  const struct msghdr message = {.msg_name = &address,
                                 .msg_namelen = sizeof(address),
                                 .msg_iov = parts,
                                 .msg_iovlen = 2,
                                 .msg_control = fd >= 0 ? &rights : NULL,
                                 .msg_controllen = fd >= 0 ? sizeof(rights) : 0};
  // A short-lived socket: one kept open could be closed or replaced by the program.
  const int to = (int)syscall(SYS_socket, AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (to < 0) return false;
  const long sent = syscall(SYS_sendmsg, to, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  raw_close(to);
  return sent >= 0;
}

static bool counted(bool left) {
  count_event(left ? COUNT_REQUESTS : COUNT_REQUESTS_LOST);
  return left;
}

bool leave_request(enum stoker_request_kind kind, const struct named_file* file, uint32_t entry) {
  const struct stoker_request request = request_of(kind, file, entry);
  return counted(leave(&request, file));
}

bool send_opened(const struct named_file* file, int fd) {
  const struct stoker_request request = request_of(STOKER_OPENED, file, NO_ENTRY);
  return counted(deliver(&request, file, fd) || leave(&request, file));
}
