// Owner slots: who holds a claim, a reservation, a lease or the lock.
//
// A process (again after fork) owns one slot, kept by an open-file-description lock on one byte of
// the segment's file. The kernel drops that lock when the process is gone, in whatever pid
// namespace it lived, and never before: a stopped process keeps what it owns, and so does one that
// has closed descriptors that are not its own, for it is a mapping that holds the description.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "stoker/layout.h"
#include "stoker/own_descriptor.h"

namespace stoker {

class Slots {
 public:
  // `adopt` puts a slot in order whose owner died without leaving it, before anyone uses it. The
  // segment's descriptor stays the caller's.
  Slots(const OwnDescriptor& segment, Slot* table, std::function<void(std::uint32_t)> adopt);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // This process's slot; taken at first use. Throws SegmentError when all are taken.
  std::uint32_t mine();
  bool taken() const { return slot_.load() != kNone; }
  // Whether some living process owns the slot.
  bool alive(std::uint32_t slot) const;
  // Takes the slot of a dead process away from everybody, so that none can move in while it is
  // cleared; false while a process lives there. Only under the arena's lock.
  bool seize(std::uint32_t slot);
  // Ends all seizures.
  void let_go();
  // Gives the slot back in good order.
  void leave();

  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  void forget();

  const OwnDescriptor& segment_;
  Slot* table_;
  void* hold_ = nullptr;  // a page of the description that has our slot's lock
  OwnDescriptor seizing_;
  std::atomic<std::uint32_t> slot_{kNone};
  std::function<void(std::uint32_t)> adopt_;
  Slots* next_ = nullptr;  // the list that fork walks
};

}  // namespace stoker
