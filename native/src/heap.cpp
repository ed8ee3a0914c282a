#include "stoker/heap.h"

#include <algorithm>

namespace stoker {
namespace {

// Equal keys leave in the order of their ids. Without a branch: nobody could predict it.
bool before(const Node& a, const Node& b) {
  return static_cast<bool>(static_cast<int>(a.key < b.key) |
                           (static_cast<int>(a.key == b.key) & static_cast<int>(a.id < b.id)));
}

}  // namespace

void Heap::place(std::uint32_t pos, Node node) {
  at(pos) = node;
  ranks_[node.id].heap_pos.store(pos, std::memory_order_relaxed);
}

void Heap::sift_up(std::uint32_t pos, Node node) {
  while (pos > 0) {
    const std::uint32_t parent = (pos - 1) / 4;
    if (!before(node, at(parent))) break;
    place(pos, at(parent));
    pos = parent;
  }
  place(pos, node);
}

void Heap::sift_down(std::uint32_t pos, Node node) {
  for (;;) {
    const std::uint64_t first = 4ull * pos + 1;
    if (first >= region_->size) break;
    const auto last = static_cast<std::uint32_t>(std::min<std::uint64_t>(first + 4, region_->size));
    auto least = static_cast<std::uint32_t>(first);
    Node smallest = at(least);
    for (std::uint32_t child = least + 1; child < last; ++child) {
      const Node other = at(child);
      const bool less = before(other, smallest);
      least = less ? child : least;
      smallest.key = less ? other.key : smallest.key;
      smallest.id = less ? other.id : smallest.id;
    }
    if (!before(smallest, node)) break;
    place(pos, smallest);
    pos = least;
  }
  place(pos, node);
}

void Heap::settle(std::uint32_t pos, Node node) {
  if (pos > 0 && before(node, at((pos - 1) / 4))) {
    sift_up(pos, node);
  } else {
    sift_down(pos, node);
  }
}

bool Heap::push(std::uint32_t id, double key) {
  ranks_[id].key.store(key, std::memory_order_relaxed);
  return insert(id, key);
}

bool Heap::insert(std::uint32_t id, double key) {
  const std::uint32_t pos = region_->size;
  if (pos % kChunkNodes == 0) {
    if (header_->free_chunks == 0) return false;
    table_[pos / kChunkNodes] = free_[--header_->free_chunks];
  }
  ++region_->size;
  ranks_[id].region.store(tag_, std::memory_order_relaxed);
  sift_up(pos, {key, id, 0});
  return true;
}

void Heap::remove(std::uint32_t pos) {
  ranks_[at(pos).id].region.store(0, std::memory_order_relaxed);
  const Node last = at(--region_->size);
  if (region_->size % kChunkNodes == 0) {
    free_[header_->free_chunks++] = table_[region_->size / kChunkNodes];
  }
  if (pos < region_->size) settle(pos, last);
}

void Heap::update(std::uint32_t pos, double key) {
  Node node = at(pos);
  node.key = key;
  ranks_[node.id].key.store(key, std::memory_order_relaxed);
  settle(pos, node);
}

}  // namespace stoker
