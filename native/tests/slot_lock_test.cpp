#include "stoker/slot_lock.h"

#include <thread>

#include "kit.h"
#include "stoker/segment.h"

using stoker::Segment;
using stoker::Slot;
using stoker::SlotLock;
using stoker::Slots;
using Result = stoker::SlotLock::Result;

namespace {

constexpr std::int64_t kMillisecond = 1'000'000;

// A segment's lock, and this process's view of it.
struct Locked {
  Locked()
      : segment(Segment::create(kit::geometry(4, 4096))),
        slots(segment.descriptor(), segment.at<Slot>(segment.header()->slots_at),
              [](std::uint32_t) {}),
        lock(&segment.header()->lock, slots) {}
  Result acquire(std::int64_t milliseconds) {
    return lock.acquire(slots.mine(), milliseconds * kMillisecond);
  }
  Segment segment;
  Slots slots;
  SlotLock lock;
};

void taken_and_released() {
  Locked here;
  for (int i = 0; i < 3'000'000; ++i) {  // beyond where the count wraps
    if (here.acquire(0) != Result::kTaken) CHECK(false);
    here.lock.release();
  }
  CHECK(here.acquire(0) == Result::kTaken);
  CHECK(here.acquire(5) == Result::kTimedOut);
  here.lock.release();
  CHECK(here.acquire(0) == Result::kTaken);
}

void threads_exclude_each_other() {
  Locked here;
  long counter = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20000; ++i) {
        while (here.acquire(1000) == Result::kTimedOut) {
        }
        ++counter;
        here.lock.release();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counter == 80000);
}

void a_dead_owner_is_taken_over_from() {
  Locked here;
  const pid_t child = kit::spawn([&] {
    CHECK(here.acquire(0) == Result::kTaken);
    raise(SIGKILL);
  });
  kit::ended(child);
  CHECK(here.acquire(50) == Result::kTakenFromDead);
  CHECK(here.acquire(1) == Result::kTimedOut);  // and it is really held
  here.lock.release();
  CHECK(here.acquire(0) == Result::kTaken);
}

void a_stopped_owner_keeps_it() {
  Locked here;
  const pid_t child = kit::spawn([&] {
    CHECK(here.acquire(0) == Result::kTaken);
    raise(SIGSTOP);
    here.lock.release();
  });
  CHECK(kit::stopped(child));
  const std::int64_t start = stoker::monotonic_ns();
  CHECK(here.acquire(50) == Result::kTimedOut);
  CHECK(kit::seconds_since(start) >= 0.05 && kit::seconds_since(start) < 1);
  kill(child, SIGCONT);
  CHECK(here.acquire(20000) == Result::kTaken);
  CHECK(kit::succeeded(child));
}

// The next process in a dead owner's slot takes the lock over, and only it.
void a_slot_inherits_its_lock_once() {
  Locked here;
  std::uint32_t slot = 0;
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  const pid_t child = kit::spawn([&] {
    slot = here.slots.mine();
    CHECK(write(pipes[1], &slot, sizeof(slot)) == sizeof(slot));
    here.acquire(0);
    raise(SIGKILL);
  });
  CHECK(read(pipes[0], &slot, sizeof(slot)) == sizeof(slot));
  kit::ended(child);
  const std::uint32_t dead = here.segment.header()->lock.load();
  CHECK(!here.lock.inherit(slot + 1));
  CHECK(here.lock.inherit(slot));
  // A process that saw the dead owner's word must no longer succeed with it.
  CHECK(here.segment.header()->lock.load() != dead);
  here.lock.release();
  CHECK(!here.lock.inherit(slot));
  close(pipes[0]);
  close(pipes[1]);
}

}  // namespace

int main() {
  taken_and_released();
  a_dead_owner_is_taken_over_from();
  a_stopped_owner_keeps_it();
  a_slot_inherits_its_lock_once();
  threads_exclude_each_other();
  return check::failures();
}
