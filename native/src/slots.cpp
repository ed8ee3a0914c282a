#include "stoker/slots.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <initializer_list>
#include <mutex>
#include <string>
#include <utility>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr off_t kLockBase = off_t{1} << 40;  // beyond any byte of the segment
constexpr std::size_t kPage = 4096;

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

bool try_lock(const OwnDescriptor& file, std::uint32_t slot) {
  struct flock lock = byte_lock(F_WRLCK, slot);
  return fcntl(file.number(), F_OFD_SETLK, &lock) == 0;
}

}  // namespace

Slots::Slots(const OwnDescriptor& segment, Slot* table, std::function<void(std::uint32_t)> adopt)
    : segment_(segment), table_(table), adopt_(std::move(adopt)) {
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

std::uint32_t Slots::mine() {
  const std::uint32_t known = slot_.load(std::memory_order_acquire);
  if (known != kNone) return known;
  const std::lock_guard guard(fork_mutex);
  if (slot_.load() != kNone) return slot_.load();
  // A new open file description: a lock on an inherited one would belong to the parent too.
  const OwnDescriptor own = segment_.reopen();
  if (!own.is_open()) throw SegmentError(describe_errno("reopen the segment", errno));
  for (const bool unclean : {false, true}) {
    for (std::uint32_t slot = 0; slot < kMaxSlots; ++slot) {
      if ((table_[slot].in_use.load() != 0) != unclean || !try_lock(own, slot)) continue;
      void* hold = mmap(nullptr, kPage, PROT_NONE, MAP_PRIVATE, own.number(), 0);
      if (hold == MAP_FAILED) throw SegmentError(describe_errno("map an owner slot", errno));
      hold_ = hold;
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
  throw SegmentError("all " + std::to_string(kMaxSlots) +
                     " owner slots of the segment are taken: use fewer processes on one cache");
}

bool Slots::alive(std::uint32_t slot) const {
  if (slot == slot_.load(std::memory_order_acquire)) return true;
  struct flock lock = byte_lock(F_WRLCK, slot);
  const bool told = segment_.is_ours() && fcntl(segment_.number(), F_OFD_GETLK, &lock) == 0;
  return !told || lock.l_type != F_UNLCK;  // unknown: take nothing away
}

bool Slots::seize(std::uint32_t slot) {
  if (slot == mine() || alive(slot)) return false;
  if (!seizing_.is_open()) seizing_ = segment_.reopen();
  return try_lock(seizing_, slot);
}

void Slots::let_go() { seizing_.reset(); }

void Slots::forget() {
  if (hold_ != nullptr) munmap(hold_, kPage);
  hold_ = nullptr;
  seizing_.reset();
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
