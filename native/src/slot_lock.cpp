#include "stoker/slot_lock.h"

#include <algorithm>

#include "stoker/futex.h"

namespace stoker {
namespace {
constexpr int kSpins = 64;
constexpr std::int64_t kSlice = 2'000'000;  // between two looks at whether the owner lives
}  // namespace

SlotLock::Result SlotLock::acquire(std::uint32_t slot, std::int64_t timeout_ns) {
  for (int spin = 0; spin < kSpins; ++spin) {
    std::uint32_t seen = word_->load(std::memory_order_relaxed);
    if ((seen & kOwner) == 0 &&
        word_->compare_exchange_weak(seen, taken_by(seen, slot), std::memory_order_acquire)) {
      return Result::kTaken;
    }
  }
  const std::int64_t deadline = monotonic_ns() + timeout_ns;
  for (;;) {
    std::uint32_t seen = word_->load(std::memory_order_relaxed);
    if ((seen & kOwner) == 0) {
      // Others may sleep too, so from here on the lock is taken as contended.
      if (word_->compare_exchange_strong(seen, taken_by(seen, slot) | kContended,
                                         std::memory_order_acquire)) {
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
    const std::uint32_t owner = seen & kOwner;
    if (owner == 0 || owner == slot + 1 || slots_.alive(owner - 1)) continue;
    if (word_->compare_exchange_strong(seen, taken_by(seen, slot) | kContended,
                                       std::memory_order_acquire)) {
      return Result::kTakenFromDead;
    }
  }
}

void SlotLock::release() {
  const std::uint32_t seen = word_->fetch_and(~(kContended | kOwner), std::memory_order_release);
  if ((seen & kContended) != 0) futex_wake(word_, 1);
}

bool SlotLock::inherit(std::uint32_t slot) {
  std::uint32_t seen = word_->load();
  return (seen & kOwner) == slot + 1 &&
         word_->compare_exchange_strong(seen, taken_by(seen, slot) | kContended,
                                        std::memory_order_acquire);
}

}  // namespace stoker
