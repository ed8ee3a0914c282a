#include "stoker/blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace stoker {
namespace {
constexpr std::uint32_t kGlance = 1 << 16;  // blocks looked at for a run before extents are used
}

void Blocks::clear() {
  const std::uint64_t count = words(header_->num_blocks);
  std::memset(bitmap_, 0, count * sizeof(std::uint64_t));
  const std::uint32_t tail = header_->num_blocks % 64;
  if (tail != 0) bitmap_[count - 1] = ~0ull << tail;  // beyond the end is never free
  header_->free_blocks = header_->num_blocks;
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
    while (end < header_->num_blocks && end - from < enough) {
      const std::uint64_t taken = bitmap_[end / 64] >> (end % 64);
      const std::uint32_t room = 64 - end % 64;
      const auto run = taken == 0 ? room : static_cast<std::uint32_t>(std::countr_zero(taken));
      end += run;
      if (run < room) break;
    }
    return {from, std::min(end - from, enough)};
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

// Gathers runs of at least `least` blocks, from the cursor on and once around.
bool Blocks::collect(std::uint32_t count, std::uint32_t least, std::uint32_t max_extents,
                     std::vector<Extent>& extents) {
  extents.clear();
  std::uint32_t missing = count;
  const std::uint32_t start = header_->cursor;
  const std::uint32_t ends[2] = {header_->num_blocks, start};
  std::uint32_t from = start;
  for (const std::uint32_t end : ends) {
    while (from < end && missing > 0 && extents.size() < max_extents) {
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
    from = 0;
  }
  return false;
}

bool Blocks::allocate(std::uint32_t count, std::uint32_t max_extents,
                      std::vector<Extent>& extents) {
  extents.clear();
  if (count == 0) return true;
  if (count > header_->free_blocks) return false;
  const std::uint32_t limit =
      std::min(header_->num_blocks, header_->cursor + std::min(kGlance, header_->num_blocks));
  for (std::uint32_t from = header_->cursor; from < limit;) {
    const Extent run = next_run(from, limit, count);
    if (run.count == count) {
      extents.push_back(run);
      break;
    }
    from = std::max(run.first + run.count, from + 1);
  }
  for (std::uint32_t least = count; extents.empty(); least = std::max(least / 4, 1u)) {
    if (!collect(count, least, max_extents, extents)) extents.clear();
    if (least == 1) break;
  }
  if (extents.empty()) return false;
  for (const Extent extent : extents) set(extent, true);
  header_->free_blocks -= count;
  const Extent last = extents.back();
  header_->cursor = (last.first + last.count) % header_->num_blocks;
  return true;
}

void Blocks::release(Extent extent) {
  set(extent, false);
  header_->free_blocks += extent.count;
}

bool Blocks::mark(Extent extent) {
  if (extent.first > header_->num_blocks || extent.count > header_->num_blocks - extent.first) {
    return false;
  }
  for (std::uint32_t i = 0; i < extent.count; ++i) {
    if (used(extent.first + i)) return false;
  }
  set(extent, true);
  header_->free_blocks -= extent.count;
  return true;
}

}  // namespace stoker
