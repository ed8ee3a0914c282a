// A lock shared by processes whose owner is a slot: its wait is bounded, and it is taken over when
// the owner is dead. (A pthread robust mutex names its owner by thread id, which two pid namespaces
// may share.)
#pragma once

#include <atomic>
#include <cstdint>

#include "stoker/slots.h"

namespace stoker {

class SlotLock {
 public:
  enum class Result { kTaken, kTakenFromDead, kTimedOut };

  SlotLock(std::atomic<std::uint32_t>* word, const Slots& slots) : word_(word), slots_(slots) {}
  Result acquire(std::uint32_t slot, std::int64_t timeout_ns);
  void release();
  // Takes the lock when a former owner of this slot died with it.
  bool inherit(std::uint32_t slot);

 private:
  // The word: {contended:1, times taken:20, owner slot + 1:11}. The count tells a dead owner's lock
  // from one taken since by the process that has its slot now.
  static constexpr std::uint32_t kContended = 0x80000000;
  static constexpr std::uint32_t kOwner = 0x7ff;
  static_assert(kMaxSlots < kOwner);

  static constexpr std::uint32_t taken_by(std::uint32_t seen, std::uint32_t slot) {
    return ((seen + kOwner + 1) & ~(kContended | kOwner)) | (slot + 1);
  }

  std::atomic<std::uint32_t>* word_;
  const Slots& slots_;
};

}  // namespace stoker
