#include "stoker/rooms.h"

#include <utility>

#include "stoker/racy_copy.h"

namespace stoker {

Rooms::Rooms(std::shared_ptr<Arena> arena, Arena::Ids ids, std::vector<std::uint64_t> sizes,
             const Arena::Placing& placing)
    : arena_(std::move(arena)),
      ids_(ids.begin(), ids.end()),
      sizes_(std::move(sizes)),
      reserved_(std::make_unique<bool[]>(ids.size())) {
  std::vector<Sample> samples(ids_.size());
  for (std::size_t i = 0; i < ids_.size(); ++i) samples[i] = {nullptr, sizes_[i]};
  arena_->reserve_rooms(ids_, samples.data(), placing, reserved_.get());
}

Rooms::~Rooms() {
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (reserved_[i]) arena_->settle(ids_[i], false);
  }
}

Rooms::Parts Rooms::parts(std::size_t index) {
  return reserved_[index] ? arena_->room_of(ids_[index]) : Parts{};
}

bool Rooms::fill(std::size_t index, std::span<const unsigned char> bytes) {
  if (!reserved_[index] || bytes.size() != sizes_[index]) return false;
  for (const auto& part : parts(index)) {
    racy_write(part.data(), bytes.data(), part.size());
    bytes = bytes.subspan(part.size());
  }
  return bytes.empty();
}

void Rooms::settle(const bool* whole, bool* there) {
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    there[i] = std::exchange(reserved_[i], false) && arena_->settle(ids_[i], whole[i]);
  }
}

}  // namespace stoker
