// Waiting on a 32-bit word that other processes map too, and reading the clock for bounds.
#pragma once

#include <atomic>
#include <cstdint>

namespace stoker {

std::int64_t monotonic_ns();

// Returns when woken, when *word != expected, after timeout_ns, or spuriously.
void futex_wait(const std::atomic<std::uint32_t>* word, std::uint32_t expected,
                std::int64_t timeout_ns);
void futex_wake(const std::atomic<std::uint32_t>* word, int waiters);

}  // namespace stoker
