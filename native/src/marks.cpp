#include "stoker/marks.h"

#include <atomic>
#include <string>

#include "stoker/error.h"

namespace stoker {
namespace {

using Mark = std::atomic_ref<std::uint32_t>;
static_assert(Mark::is_always_lock_free, "processes share no lock here");

// Before anything is marked: a batch is rejected as a whole.
void check(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
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

void mark_once(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
               std::uint32_t stamp, bool* first) {
  check(marks, ids, stamp);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const Mark mark(marks[ids[i]]);
    std::uint32_t last = mark.load(std::memory_order_acquire);
    while (last < stamp && !mark.compare_exchange_weak(last, stamp, std::memory_order_acq_rel)) {
    }
    first[i] = last < stamp;
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
