// Room in an arena for samples that are on their way.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "stoker/arena.h"

namespace stoker {

// Any thread may fill a room; one of them settles all, at the end.
class Rooms {
 public:
  using Parts = std::vector<std::span<unsigned char>>;

  // Reserves as Arena::reserve_rooms() does.
  Rooms(std::shared_ptr<Arena> arena, Arena::Ids ids, std::vector<std::uint64_t> sizes,
        const Arena::Placing& placing);
  // Gives up what was not settled.
  ~Rooms();
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;

  std::size_t count() const { return ids_.size(); }
  bool has(std::size_t index) const { return reserved_[index]; }
  std::uint64_t size_of(std::size_t index) const { return sizes_[index]; }
  // Where the bytes of a sample go; empty where there is no room for it.
  Parts parts(std::size_t index);
  // Copies a sample to its room; false where it has none or is of another size.
  bool fill(std::size_t index, std::span<const unsigned char> bytes);
  // Publishes those that are whole, gives up the others; there[i]: whether it is cached now.
  void settle(const bool* whole, bool* there);

 private:
  const std::shared_ptr<Arena> arena_;
  const std::vector<std::uint32_t> ids_;
  const std::vector<std::uint64_t> sizes_;
  std::unique_ptr<bool[]> reserved_;
};

}  // namespace stoker
