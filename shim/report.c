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

static uint8_t* written_byte(uint32_t hash) {
  struct stoker_counters* counters = map_counters();
  return counters ? &counters->written[hash % STOKER_WRITTEN_BITS / 8] : NULL;
}

void mark_written(uint32_t hash) {
  uint8_t* byte = written_byte(hash);
  if (byte) __atomic_fetch_or(byte, (uint8_t)(1u << hash % 8), __ATOMIC_RELEASE);
}

bool is_marked_written(uint32_t hash) {
  const uint8_t* byte = written_byte(hash);
  return byte && (__atomic_load_n(byte, __ATOMIC_ACQUIRE) >> hash % 8 & 1);
}

static bool deliver(const struct stoker_request* request, const struct named_file* file) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (map_socket_path()[0] == '\0') return false;
  strcpy(address.sun_path, map_socket_path());
  struct iovec parts[2] = {{(void*)request, sizeof(*request)}, {(void*)file->path, file->length}};
  const struct msghdr message = {
      .msg_name = &address, .msg_namelen = sizeof(address), .msg_iov = parts, .msg_iovlen = 2};
  // A socket of a moment: one that stayed could be closed or replaced by the program.
  const int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  const long sent = syscall(SYS_sendmsg, fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  raw_close(fd);
  return sent >= 0;
}

bool send_request(enum stoker_request_kind kind, const struct named_file* file, uint32_t entry) {
  const struct stoker_request request = {
      .magic = STOKER_REQUEST_MAGIC,
      .kind = (uint8_t)kind,
      .source = file->source,
      .path_length = (uint16_t)file->length,
      .time_ns = now_ns(),
      .entry = entry,
      .hash = file->hash,
  };
  const bool sent = deliver(&request, file);
  count_event(sent ? COUNT_REQUESTS : COUNT_REQUESTS_LOST);
  return sent;
}
