#include "stoker/slot_lock.h"

#include <algorithm>

#include "stoker/futex.h"

namespace stoker {
namespace {
constexpr int kSpins = 64;
constexpr std::int64_t kSlice = 2'000'000;  // between two looks at whether the owner lives
}  // namespace

SlotLock::Result SlotLock::acquire(std::uint32_t slot, std::int64_t timeout_ns) {
  const std::uint32_t me = slot + 1;
  for (int spin = 0; spin < kSpins; ++spin) {
    std::uint32_t expected = 0;
    if (word_->compare_exchange_weak(expected, me, std::memory_order_acquire)) {
      return Result::kTaken;
    }
  }
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  for (;;) {
    std::uint32_t seen = word_->load(std::memory_order_relaxed);
    if (seen == 0) {
      // Others may sleep too, so from here on the lock is taken as contended.
      if (word_->compare_exchange_strong(seen, me | kContended, std::memory_order_acquire)) {
        return Result::kTaken;
      }
      continue;
    }
    if ((seen & kContended) == 0 &&
        !word_->compare_exchange_strong(seen, seen | kContended, std::memory_order_relaxed)) {
      continue;
    }
    const std::int64_t left = deadline - monotonic_ns();
    if (left <= 0) return Result::kTimedOut;
    futex_wait(word_, seen | kContended, std::min(left, kSlice));
    seen = word_->load(std::memory_order_relaxed);
    const std::uint32_t owner = seen & ~kContended;
    if (owner == 0 || owner == me || slots_.alive(owner - 1)) continue;
    if (word_->compare_exchange_strong(seen, me | kContended, std::memory_order_acquire)) {
      return Result::kTakenFromDead;
    }
  }
}

void SlotLock::release() {
  if (word_->exchange(0, std::memory_order_release) & kContended) futex_wake(word_, 1);
}

bool SlotLock::inherit(std::uint32_t slot) {
  std::uint32_t seen = word_->load();
  return (seen & ~kContended) == slot + 1 &&
         word_->compare_exchange_strong(seen, (slot + 1) | kContended, std::memory_order_acquire);
}

}  // namespace stoker
