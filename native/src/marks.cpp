#include "stoker/marks.h"

#include <atomic>
#include <string>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;  // marks looked up before they are needed

using Mark = std::atomic_ref<std::uint32_t>;
static_assert(Mark::is_always_lock_free, "processes share no lock here");

// Before anything is marked: a batch is rejected as a whole.
void check(std::span<const std::uint32_t> marks, std::span<const std::uint32_t> ids,
           std::uint32_t stamp) {
  if (stamp == 0) throw ConfigError("stamp=0 is invalid, it means no mark: count from 1");
  for (const std::uint32_t id : ids) {
    if (id >= marks.size()) {
      throw ConfigError("id " + std::to_string(id) + " is out of range: there are " +
                        std::to_string(marks.size()) + " marks");
    }
  }
}

}  // namespace

namespace {

bool mark(std::uint32_t& where, std::uint32_t stamp) {
  const Mark mark(where);
  std::uint32_t last = mark.load(std::memory_order_acquire);
  while (last < stamp && !mark.compare_exchange_weak(last, stamp, std::memory_order_acq_rel)) {
  }
  return last < stamp;
}

}  // namespace

void mark_once(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
               std::uint32_t stamp, bool* first) {
  check(marks, ids, stamp);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    first[i] = mark(marks[ids[i]], stamp);
  }
}

std::vector<std::int64_t> find_marked(std::span<const std::uint32_t> marks,
                                      std::span<const bool> wanted,
                                      std::span<const std::uint32_t> ids, std::uint32_t stamp) {
  check(marks, ids, stamp);
  if (wanted.size() != marks.size()) throw ConfigError("give as many marks as wanted ones");
  std::vector<std::int64_t> found;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) {
      __builtin_prefetch(&marks[ids[i + kAhead]]);
      __builtin_prefetch(&wanted[ids[i + kAhead]]);
    }
    if (is_marked(marks, ids[i], stamp) || !wanted[ids[i]]) {
      found.push_back(static_cast<std::int64_t>(i));
    }
  }
  return found;
}

void take_turns(std::span<std::uint32_t> marks, std::span<std::uint64_t> displaced,
                std::span<const std::uint32_t> ids, std::uint32_t stamp, std::uint32_t longest,
                std::uint32_t* turns, bool* told) {
  check(marks, ids, stamp);
  if (displaced.size() != marks.size()) throw ConfigError("give as many marks as displaced ones");
  using Note = std::atomic_ref<std::uint64_t>;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    turns[i] = ids[i];
    told[i] = true;
    std::uint32_t last = ids[i];
    for (std::uint32_t link = 0; link < longest; ++link) {
      const std::uint64_t noted = Note(displaced[last]).load(std::memory_order_acquire);
      const auto next = static_cast<std::uint32_t>(noted);
      if (noted >> 32 != stamp) {
        told[i] = noted >> 32 > stamp;  // then the epoch is over elsewhere
        break;
      }
      if (next == last || next >= marks.size()) break;
      last = next;
      if (mark(marks[last], stamp)) {
        Note(displaced[last]).store(std::uint64_t{stamp} << 32 | last, std::memory_order_release);
        turns[i] = last;
        break;
      }
    }
  }
}

void unmark(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
            std::uint32_t stamp) {
  check(marks, ids, stamp);
  for (const std::uint32_t id : ids) {
    std::uint32_t expected = stamp;
    Mark(marks[id]).compare_exchange_strong(expected, 0, std::memory_order_acq_rel);
  }
}

}  // namespace stoker
