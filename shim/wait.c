#include "wait.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "report.h"

enum { IMPATIENCE = 10 };  // after a wait for nothing, none for this many times as long

static _Atomic(uint64_t) unanswered_until_ns;

// A wait that ends when nothing has changed for wait_ms, or the daemon is gone.
struct patience {
  const uint32_t* changes;
  uint32_t seen;
  uint64_t progress;
  uint64_t deadline_ns;
  bool waited;
};

static uint64_t wait_ns(void) { return map_header()->wait_ms * 1000000ull; }

static struct patience begin_patience(uint32_t hash) {
  return (struct patience){.changes = map_changes(hash), .deadline_ns = now_ns() + wait_ns()};
}

// To be called before the condition is looked at, so that no change after that is slept through.
static void look(struct patience* patience) {
  patience->seen = __atomic_load_n(patience->changes, __ATOMIC_ACQUIRE);
}

// Sleeps until something changes; false when it has been too long.
static bool sleep_on(struct patience* patience, uint64_t progress) {
  if (!patience->waited) count_event(COUNT_WAITS);
  patience->waited = true;
  const uint64_t now = now_ns();
  if (progress != patience->progress) patience->deadline_ns = now + wait_ns();
  patience->progress = progress;
  if (now >= patience->deadline_ns || !map_live()) {
    count_event(COUNT_WAITS_GIVEN_UP);
    return false;
  }
  const struct timespec look_again = {.tv_nsec = 1000000};
  syscall(SYS_futex, patience->changes, FUTEX_WAIT, patience->seen, &look_again, NULL, 0);
  return true;
}

static bool is_on_its_way(const struct stoker_entry* entry) {
  return entry_state(entry) == STOKER_WANTED || entry_state(entry) == STOKER_COPYING;
}

uint32_t wait_for_entry(const struct named_file* file, bool whole, struct stoker_entry* entry) {
  struct patience patience = begin_patience(file->hash);
  for (;;) {
    look(&patience);
    const uint32_t number = map_find(file);
    const bool found = number != NO_ENTRY && map_read(number, entry);
    if (found && (!whole || !is_on_its_way(entry))) return number;
    if (!found && now_ns() < atomic_load(&unanswered_until_ns)) return NO_ENTRY;
    if (sleep_on(&patience, found ? entry->word + entry->copied : 0)) continue;
    if (found) return number;
    atomic_store(&unanswered_until_ns, now_ns() + IMPATIENCE * wait_ns());
    return NO_ENTRY;
  }
}

bool wait_for_bytes(uint32_t number, uint64_t bytes, struct stoker_entry* entry) {
  struct patience patience = begin_patience(entry->hash);
  for (;;) {
    look(&patience);
    if (!map_read(number, entry)) return false;
    if (entry_state(entry) == STOKER_PLACED) return true;
    if (entry_state(entry) != STOKER_COPYING) return false;  // others may be copied before it
    if (entry->copied >= bytes) return true;
    if (bytes - entry->copied > map_header()->ahead_bytes) return false;
    if (!sleep_on(&patience, entry->word + entry->copied)) return false;
  }
}
