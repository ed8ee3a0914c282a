#include "marks.h"

#include "table.h"

// A mark counts for as long beyond its own time: for a call that it announces and that takes effect
// a little later, even if its program is killed before the mark that follows.
#define MARGIN_NS 1000000000ull

enum { MOMENT_SHIFT = 20 };

uint32_t mark_of_name(uint32_t hash) { return hash % STOKER_MARKS; }

uint32_t mark_of_inode(uint64_t ino) {
  return (uint32_t)(ino * 0x9E3779B97F4A7C15ull >> 32) % STOKER_MARKS;
}

static void raise_mark(uint64_t* mark, uint64_t flags) {
  const uint64_t time = (now_ns() + MARGIN_NS) & ~(uint64_t)STOKER_MARK_FLAGS;
  uint64_t before = __atomic_load_n(mark, __ATOMIC_RELAXED);
  uint64_t after;
  do {
    const uint64_t last = before & ~(uint64_t)STOKER_MARK_FLAGS;
    after = (last > time ? last : time) | (before & STOKER_MARK_FLAGS) | flags;
    if (before & flags & STOKER_WRITING) after |= STOKER_WRITING_FOR_EVER;
  } while (
      !__atomic_compare_exchange_n(mark, &before, after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
}

// Raises a mark, of all or of a slot, and says that there are marks.
static void set(uint64_t* mark, uint64_t flags) {
  raise_mark(mark, flags);
  __atomic_store_n(&map_counters()->marked, 1, __ATOMIC_SEQ_CST);
}

void mark_changed(uint32_t slot) {
  if (map_counters()) set(&map_counters()->marks[slot], 0);
}

void mark_all_changed(void) {
  if (map_counters()) set(&map_counters()->all, 0);
}

static uint64_t load(uint32_t slot) {
  return __atomic_load_n(&map_counters()->marks[slot], __ATOMIC_ACQUIRE);
}

bool mark_writing(uint32_t slot) {
  if (!map_counters()) return false;
  set(&map_counters()->marks[slot], STOKER_WRITING);
  return !(load(slot) & STOKER_WRITING_FOR_EVER);
}

void mark_writing_for_ever(uint32_t slot) {
  if (map_counters()) set(&map_counters()->marks[slot], STOKER_WRITING | STOKER_WRITING_FOR_EVER);
}

void mark_written(uint32_t slot) {
  if (!map_counters()) return;
  mark_changed(slot);
  uint64_t* mark = &map_counters()->marks[slot];
  uint64_t before = load(slot);
  while (!(before & STOKER_WRITING_FOR_EVER) &&
         !__atomic_compare_exchange_n(mark, &before, before & ~(uint64_t)STOKER_WRITING, true,
                                      __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
  }
}

// A program without marks can tell nothing, and looks each time.
static bool has_none(void) {
  return map_counters() && !__atomic_load_n(&map_counters()->marked, __ATOMIC_ACQUIRE);
}

bool is_in_doubt(const struct stoker_entry* entry) {
  if (has_none()) return false;
  if (!map_counters()) return true;
  const uint64_t seen = entry->validated_ns;
  return __atomic_load_n(&map_counters()->all, __ATOMIC_ACQUIRE) >= seen ||
         load(mark_of_name(entry->hash)) >= seen || load(mark_of_inode(entry->source_ino)) >= seen;
}

bool is_being_written(uint32_t slot) {
  return !has_none() && map_counters() && load(slot) & STOKER_WRITING;
}

uint32_t mark_moment(void) { return (uint32_t)(now_ns() >> MOMENT_SHIFT); }

bool is_marked_since(uint32_t slot, uint32_t moment) {
  if (has_none() || !map_counters()) return false;
  const uint64_t mark = load(slot);
  if (mark & STOKER_WRITING) return true;
  return mark != 0 && (int32_t)((uint32_t)(mark >> MOMENT_SHIFT) - moment) >= 0;
}
