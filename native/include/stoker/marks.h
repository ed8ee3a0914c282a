// Marks in memory that processes share: one 32-bit stamp per id, set by the first process.
//
// Stateless and lock-free, safe in any thread of any process. The caller owns the memory. Stamps
// grow: a mark counts for its stamp and for all before, so that a straggler of an earlier stamp
// changes nothing. Ids are checked (ConfigError), and so is the stamp: 0 means no mark.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace stoker {

constexpr std::uint32_t kLongestChain = 1000;  // of samples that displaced one another

// Whether an id was marked with this stamp; `id` is not checked.
inline bool is_marked(std::span<const std::uint32_t> marks, std::uint32_t id, std::uint32_t stamp) {
  auto& mark = const_cast<std::uint32_t&>(marks[id]);  // the memory is writable; it is only read
  return std::atomic_ref<std::uint32_t>(mark).load(std::memory_order_acquire) >= stamp;
}

// first[i]: true where ids[i] had an earlier stamp until now. Of all who mark an id with one stamp,
// at most one sees true.
void mark_once(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
               std::uint32_t stamp, bool* first);

// Takes marks of this stamp back, so that the id can be marked once more; others stay.
void unmark(std::span<std::uint32_t> marks, std::span<const std::uint32_t> ids,
            std::uint32_t stamp);

// Where in `ids` those are that were marked with this stamp, or that are not among the `wanted` (by
// id).
std::vector<std::int64_t> find_marked(std::span<const std::uint32_t> marks,
                                      std::span<const bool> wanted,
                                      std::span<const std::uint32_t> ids, std::uint32_t stamp);

// Who is served on the turns of `ids`, which were all served already for others: the one at the
// end of the chain of those that displaced one another, marked now, or the id itself where that one
// had its turn or the chain has more than `longest` links. displaced[i] is a stamp, times 2^32,
// plus the id on whose turn i was served. told[i]: false where another process has not noted yet
// whom it displaced.
void take_turns(std::span<std::uint32_t> marks, std::span<std::uint64_t> displaced,
                std::span<const std::uint32_t> ids, std::uint32_t stamp, std::uint32_t longest,
                std::uint32_t* turns, bool* told);

}  // namespace stoker
