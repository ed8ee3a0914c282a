// Which blocks are free: a bitmap with a next-fit cursor. Only used under the lock.
#pragma once

#include <cstdint>
#include <vector>

#include "stoker/layout.h"

namespace stoker {

class Blocks {
 public:
  Blocks(Header* header, std::uint64_t* bitmap) : header_(header), bitmap_(bitmap) {}

  static std::uint64_t words(std::uint32_t num_blocks) { return (num_blocks + 63ull) / 64; }
  void clear();
  // Takes `count` blocks in one extent when a run is long enough, else in at most `max_extents`.
  // False when that is not possible; then nothing is taken.
  bool allocate(std::uint32_t count, std::uint32_t max_extents, std::vector<Extent>& extents);
  void release(Extent extent);
  // Marks an extent as used; false when one of its blocks was used already or is out of range.
  bool mark(Extent extent);
  // From now on only the first so many are given out; those behind stay taken until released.
  void bound(std::uint32_t usable);
  // How many are free from `begin` to before `end`.
  std::uint32_t free(std::uint32_t begin, std::uint32_t end) const;
  bool used(std::uint32_t block) const { return (bitmap_[block / 64] >> (block % 64)) & 1; }

 private:
  Extent next_run(std::uint32_t from, std::uint32_t to, std::uint32_t enough) const;
  bool reuse(std::uint32_t count, std::uint32_t max_extents, std::vector<Extent>& extents);
  bool best_fit(std::uint32_t count, std::vector<Extent>& extents);
  bool collect(std::uint32_t count, std::uint32_t least, std::uint32_t max_extents,
               std::uint32_t max_runs, std::vector<Extent>& extents);
  void set(Extent extent, bool used);
  std::uint32_t usable(Extent extent) const;

  Header* header_;
  std::uint64_t* bitmap_;
};

}  // namespace stoker
