#include "stoker/blocks.h"

#include <random>
#include <vector>

#include "check.h"

using stoker::Blocks;
using stoker::Extent;
using stoker::Header;

namespace {

struct Pool {
  explicit Pool(std::uint32_t count)
      : bitmap(Blocks::words(count)), blocks(&header, bitmap.data()) {
    header.num_blocks = header.usable_blocks = count;
    blocks.clear();
  }
  Header header{};
  std::vector<std::uint64_t> bitmap;
  Blocks blocks;
};

std::uint32_t total(const std::vector<Extent>& extents) {
  std::uint32_t sum = 0;
  for (const Extent extent : extents) sum += extent.count;
  return sum;
}

void nothing_lies_beyond_the_end() {
  for (const std::uint32_t count : {1u, 63u, 64u, 65u, 130u}) {
    Pool pool(count);
    std::vector<Extent> extents;
    CHECK(pool.blocks.allocate(count, 1, extents));
    CHECK(extents.size() == 1 && extents[0].first == 0 && extents[0].count == count);
    CHECK(!pool.blocks.allocate(1, 1, extents) && extents.empty());
    CHECK(pool.blocks.allocate(0, 1, extents) && extents.empty());
  }
}

void pieces_only_as_many_as_allowed() {
  Pool pool(256);
  std::vector<Extent> all;
  CHECK(pool.blocks.allocate(256, 1, all));
  for (std::uint32_t block = 0; block < 256; block += 8) pool.blocks.release({block, 4});
  std::vector<Extent> extents;
  CHECK(!pool.blocks.allocate(5, 1, extents) && pool.header.free_blocks == 128);
  CHECK(pool.blocks.allocate(5, 2, extents) && extents.size() == 2 && total(extents) == 5);
  CHECK(!pool.blocks.allocate(100, 8, extents) && pool.header.free_blocks == 123);
  CHECK(pool.blocks.allocate(123, 64, extents) && total(extents) == 123);
  CHECK(pool.header.free_blocks == 0);
}

void mark_refuses_what_is_used_or_beyond() {
  Pool pool(100);
  CHECK(pool.blocks.mark({10, 5}));
  CHECK(!pool.blocks.mark({14, 1}) && !pool.blocks.mark({8, 3}));
  CHECK(!pool.blocks.mark({98, 3}) && !pool.blocks.mark({101, 1}));
  CHECK(!pool.blocks.mark({5, 0xffffffff}) && !pool.blocks.mark({0xffffffff, 2}));
  CHECK(pool.header.free_blocks == 95);
}

// Random allocations and releases against one flag a block.
void same_as_a_model() {
  constexpr std::uint32_t kBlocks = 1000;
  Pool pool(kBlocks);
  std::vector<bool> used(kBlocks, false);
  std::vector<std::vector<Extent>> held;
  std::mt19937 random(7);
  std::uint32_t free = kBlocks;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0 && !held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      for (const Extent extent : held.back()) {
        pool.blocks.release(extent);
        free += extent.count;
        for (std::uint32_t i = 0; i < extent.count; ++i) used[extent.first + i] = false;
      }
      held.pop_back();
    } else {
      const std::uint32_t count = random() % 60;
      const std::uint32_t most = 1 + random() % 8;
      std::vector<Extent> extents;
      if (pool.blocks.allocate(count, most, extents)) {
        CHECK(total(extents) == count && extents.size() <= most);
        for (const Extent extent : extents) {
          for (std::uint32_t i = 0; i < extent.count; ++i) {
            CHECK(extent.first + i < kBlocks && !used[extent.first + i]);
            used[extent.first + i] = true;
          }
        }
        free -= count;
        held.push_back(extents);
      } else {
        CHECK(most < 60 && extents.empty());
      }
    }
    CHECK(pool.header.free_blocks == free);
  }
  for (std::uint32_t block = 0; block < kBlocks; ++block)
    CHECK(pool.blocks.used(block) == used[block]);
}

}  // namespace

int main() {
  nothing_lies_beyond_the_end();
  pieces_only_as_many_as_allowed();
  mark_refuses_what_is_used_or_beyond();
  same_as_a_model();
  return check::failures();
}
