#include "stoker/slots.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <string>
#include <utility>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr off_t kLockBase = off_t{1} << 40;  // beyond any byte of the segment

std::mutex fork_mutex;  // held over fork, so that a child never inherits it locked
Slots* all_slots = nullptr;

void register_fork_handlers() {
  static const int once = pthread_atfork(&Slots::before_fork, &Slots::after_fork_in_parent,
                                         &Slots::after_fork_in_child);
  (void)once;
}

struct flock byte_lock(short type, std::uint32_t slot) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLockBase + slot;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Slots::Slots(int descriptor, Slot* table, std::function<void(std::uint32_t)> adopt)
    : descriptor_(descriptor), table_(table), adopt_(std::move(adopt)) {
  register_fork_handlers();
  const std::lock_guard guard(fork_mutex);
  next_ = all_slots;
  all_slots = this;
}

Slots::~Slots() {
  leave();
  const std::lock_guard guard(fork_mutex);
  Slots** link = &all_slots;
  while (*link != this) link = &(*link)->next_;
  *link = next_;
}

bool Slots::try_lock(std::uint32_t slot) {
  struct flock lock = byte_lock(F_WRLCK, slot);
  return fcntl(own_descriptor_, F_OFD_SETLK, &lock) == 0;
}

std::uint32_t Slots::mine() {
  const std::uint32_t known = slot_.load(std::memory_order_acquire);
  if (known != kNone) return known;
  const std::lock_guard guard(fork_mutex);
  if (slot_.load() != kNone) return slot_.load();
  // A new open file description: a lock on an inherited one would belong to the parent too.
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor_);
  own_descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own_descriptor_ < 0) throw SegmentError(describe_errno("open " + path, errno));
  for (const bool unclean : {false, true}) {
    for (std::uint32_t slot = 0; slot < kMaxSlots; ++slot) {
      if ((table_[slot].in_use.load() != 0) != unclean || !try_lock(slot)) continue;
      if (table_[slot].in_use.exchange(1) != 0) {
        try {
          adopt_(slot);
        } catch (...) {
          forget();
          throw;
        }
      }
      slot_.store(slot, std::memory_order_release);
      return slot;
    }
  }
  forget();
  throw SegmentError("all " + std::to_string(kMaxSlots) +
                     " owner slots of the segment are taken: use fewer processes on one cache");
}

bool Slots::alive(std::uint32_t slot) const {
  if (slot == slot_.load(std::memory_order_acquire)) return true;
  struct flock lock = byte_lock(F_WRLCK, slot);
  if (fcntl(descriptor_, F_OFD_GETLK, &lock) != 0) return true;  // unknown: take nothing away
  return lock.l_type != F_UNLCK;
}

bool Slots::seize(std::uint32_t slot) { return slot != mine() && try_lock(slot); }

void Slots::let_go(std::uint32_t slot) {
  struct flock lock = byte_lock(F_UNLCK, slot);
  fcntl(own_descriptor_, F_OFD_SETLK, &lock);
}

void Slots::forget() {
  if (own_descriptor_ >= 0) close(own_descriptor_);
  own_descriptor_ = -1;
  slot_.store(kNone);
}

void Slots::leave() {
  const std::lock_guard guard(fork_mutex);
  const std::uint32_t slot = slot_.load();
  // With anything left, the slot counts as a dead process's, and is cleared like one.
  if (slot != kNone && table_[slot].pending.load() == 0 && table_[slot].lease_head == 0) {
    table_[slot].in_use.store(0);
  }
  forget();
}

void Slots::before_fork() { fork_mutex.lock(); }
void Slots::after_fork_in_parent() { fork_mutex.unlock(); }
void Slots::after_fork_in_child() {
  for (Slots* slots = all_slots; slots != nullptr; slots = slots->next_) slots->forget();
  fork_mutex.unlock();
}

}  // namespace stoker
