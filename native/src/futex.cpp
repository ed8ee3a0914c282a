#include "stoker/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace stoker {

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected,
                std::int64_t timeout_ns) {
  timeout_ns = std::max<std::int64_t>(timeout_ns, 0);
  timespec timeout{};
  timeout.tv_sec = timeout_ns / 1'000'000'000;
  timeout.tv_nsec = timeout_ns % 1'000'000'000;
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake(const std::atomic<std::uint32_t>* word, int waiters) {
  syscall(SYS_futex, word, FUTEX_WAKE, waiters, nullptr, nullptr, 0);
}

}  // namespace stoker
