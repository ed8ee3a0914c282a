// Owner slots: who holds a claim, a reservation, a lease or the lock.
//
// A process (again after fork) owns one slot, kept by an open-file-description lock on one byte of
// the segment's descriptor. The kernel drops that lock when the process is gone, in whatever pid
// namespace it lived, and never before: a stopped process keeps what it owns.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "stoker/layout.h"

namespace stoker {

class Slots {
 public:
  // `adopt` puts a slot in order whose owner died without leaving it, before anyone uses it.
  Slots(int descriptor, Slot* table, std::function<void(std::uint32_t)> adopt);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // This process's slot; taken at first use. Throws SegmentError when all are taken.
  std::uint32_t mine();
  bool taken() const { return slot_.load() != kNone; }
  // Whether some living process owns the slot.
  bool alive(std::uint32_t slot) const;
  // Takes the slot of a dead process away from everybody until it is let go, so that none can move
  // in while it is cleared; false while a process lives there.
  bool seize(std::uint32_t slot);
  void let_go(std::uint32_t slot);
  // Gives the slot back in good order.
  void leave();

  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  bool try_lock(std::uint32_t slot);
  void forget();

  int descriptor_;
  Slot* table_;
  int own_descriptor_ = -1;
  std::atomic<std::uint32_t> slot_{kNone};
  std::function<void(std::uint32_t)> adopt_;
  Slots* next_ = nullptr;  // the list that fork walks
};

}  // namespace stoker
