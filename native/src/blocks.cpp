#include "stoker/blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace stoker {
namespace {
constexpr std::uint32_t kGlance = 64;  // runs
constexpr std::uint32_t kLarge = 16;   // blocks, from which a free run is worth remembering
constexpr std::uint32_t kFew = 8;      // extents
}  // namespace

void Blocks::clear() {
  const std::uint64_t count = words(header_->num_blocks);
  std::memset(bitmap_, 0, count * sizeof(std::uint64_t));
  const std::uint32_t tail = header_->num_blocks % 64;
  if (tail != 0) bitmap_[count - 1] = ~0ull << tail;  // beyond the end is never free
  header_->free_blocks = header_->usable_blocks;
  header_->cursor = 0;
}

// The first run of free blocks at or after `from`, no longer than `enough`, begun before `to`.
Extent Blocks::next_run(std::uint32_t from, std::uint32_t to, std::uint32_t enough) const {
  while (from < to) {
    const std::uint64_t free = ~bitmap_[from / 64] >> (from % 64);
    if (free == 0) {
      from = (from / 64 + 1) * 64;
      continue;
    }
    from += static_cast<std::uint32_t>(std::countr_zero(free));
    if (from >= to) break;
    std::uint32_t end = from;
    while (end < header_->usable_blocks && end - from < enough) {
      const std::uint64_t taken = bitmap_[end / 64] >> (end % 64);
      const std::uint32_t room = 64 - end % 64;
      const auto run = taken == 0 ? room : static_cast<std::uint32_t>(std::countr_zero(taken));
      end += run;
      if (run < room) break;
    }
    return {from, std::min(std::min(end, header_->usable_blocks) - from, enough)};
  }
  return {to, 0};
}

void Blocks::set(Extent extent, bool used) {
  std::uint32_t block = extent.first;
  const std::uint32_t end = extent.first + extent.count;
  while (block < end) {
    const std::uint32_t bits = std::min(64 - block % 64, end - block);
    const std::uint64_t mask = (bits == 64 ? ~0ull : ((1ull << bits) - 1)) << (block % 64);
    if (used) {
      bitmap_[block / 64] |= mask;
    } else {
      bitmap_[block / 64] &= ~mask;
    }
    block += bits;
  }
}

// Gathers runs of at least `least` blocks, from the cursor on and once around, looking at
// `max_runs` runs at most.
bool Blocks::collect(std::uint32_t count, std::uint32_t least, std::uint32_t max_extents,
                     std::uint32_t max_runs, std::vector<Extent>& extents) {
  extents.clear();
  std::uint32_t missing = count;
  const std::uint32_t start = header_->cursor;
  const std::uint32_t ends[2] = {header_->usable_blocks, start};
  std::uint32_t from = start;
  for (const std::uint32_t end : ends) {
    for (; from < end && missing > 0 && extents.size() < max_extents && max_runs > 0; --max_runs) {
      Extent run = next_run(from, end, missing);
      if (run.count == 0) break;
      run.count = std::min(run.count, end - run.first);  // what lies behind was gathered already
      if (run.count >= std::min(least, missing)) {
        extents.push_back(run);
        missing -= run.count;
      }
      from = run.first + run.count;
    }
    if (missing == 0) return true;
    if (max_runs == 0 || extents.size() == max_extents) break;
    from = 0;
  }
  extents.clear();
  return false;
}

// The run that `count` blocks fit best into, of those that a glance from the cursor on meets: large
// runs are left for large samples.
bool Blocks::best_fit(std::uint32_t count, std::vector<Extent>& extents) {
  Extent best{0, kNone};
  std::uint32_t from = header_->cursor;
  for (std::uint32_t seen = 0; seen < kGlance && best.count != count; ++seen) {
    const Extent run = next_run(from, header_->usable_blocks, 8 * count);
    if (run.count == 0) break;
    if (run.count >= count && run.count < best.count) best = run;
    from = run.first + run.count;
  }
  extents.clear();
  if (best.count == kNone) return false;
  extents.push_back({best.first, count});
  return true;
}

// Puts a large sample into runs that were freed lately: the one it fits best, else the largest
// ones.
bool Blocks::reuse(std::uint32_t count, std::uint32_t max_extents, std::vector<Extent>& extents) {
  extents.clear();
  std::uint32_t missing = count;
  while (missing > 0 && extents.size() < std::min(kFew, max_extents)) {
    Extent best{0, 0};
    std::uint32_t* used = nullptr;
    for (std::uint32_t& hint : header_->hints) {
      if (hint >= header_->usable_blocks) continue;
      const Extent run = next_run(hint, hint + 1, 8 * count);
      const bool better = best.count < missing ? run.count > best.count
                                               : run.count >= missing && run.count < best.count;
      if (run.count == 0) hint = kNone;
      if (run.count != 0 && better) {
        best = run;
        used = &hint;
      }
    }
    if (used == nullptr) break;
    best.count = std::min(best.count, missing);
    *used += best.count;
    set(best, true);
    extents.push_back(best);
    missing -= best.count;
  }
  for (const Extent extent : extents) set(extent, false);  // the caller takes them, or not
  return missing == 0;
}

// A sample like the others finds one run at once, or a few large ones. One that is much larger
// than the holes around is put together from many; only when that fails too is all looked at.
bool Blocks::allocate(std::uint32_t count, std::uint32_t max_extents,
                      std::vector<Extent>& extents) {
  extents.clear();
  if (count == 0) return true;
  if (count > header_->free_blocks) return false;
  const bool found = (count >= kLarge && reuse(count, max_extents, extents)) ||
                     best_fit(count, extents) ||
                     collect(count, count / 4, max_extents, 128, extents) ||
                     collect(count, count / 16, max_extents, 256, extents) ||
                     collect(count, count / 64, max_extents, 512, extents) ||
                     collect(count, count / max_extents, max_extents, kNone, extents) ||
                     collect(count, 1, max_extents, kNone, extents);
  if (!found) return false;
  for (const Extent extent : extents) set(extent, true);
  header_->free_blocks -= count;
  const Extent last = extents.back();
  header_->cursor = (last.first + last.count) % header_->usable_blocks;
  return true;
}

void Blocks::release(Extent extent) {
  set(extent, false);
  if (extent.count >= kLarge) header_->hints[header_->next_hint++ % kHints] = extent.first;
  header_->free_blocks += usable(extent);
}

bool Blocks::mark(Extent extent) {
  if (extent.first > header_->num_blocks || extent.count > header_->num_blocks - extent.first) {
    return false;
  }
  for (std::uint32_t i = 0; i < extent.count; ++i) {
    if (used(extent.first + i)) return false;
  }
  set(extent, true);
  header_->free_blocks -= usable(extent);
  return true;
}

void Blocks::bound(std::uint32_t usable) {
  const std::uint32_t was = header_->usable_blocks;
  const std::uint32_t changed = free(std::min(was, usable), std::max(was, usable));
  header_->usable_blocks = usable;
  header_->free_blocks += usable > was ? changed : 0 - changed;
  if (header_->cursor >= usable) header_->cursor = 0;
}

std::uint32_t Blocks::free(std::uint32_t begin, std::uint32_t end) const {
  std::uint32_t count = 0;
  for (std::uint32_t at = begin; at < end;) {
    const std::uint32_t bits = std::min(64 - at % 64, end - at);
    const std::uint64_t mask = (bits == 64 ? ~0ull : ((1ull << bits) - 1)) << (at % 64);
    count += static_cast<std::uint32_t>(std::popcount(~bitmap_[at / 64] & mask));
    at += bits;
  }
  return count;
}

std::uint32_t Blocks::usable(Extent extent) const {
  const std::uint32_t end = std::min(extent.first + extent.count, header_->usable_blocks);
  return end - std::min(extent.first, end);
}

}  // namespace stoker
