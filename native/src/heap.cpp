#include "stoker/heap.h"

#include <algorithm>

namespace stoker {
namespace {

// Without a branch: no processor could predict it.
bool before(const Node& a, const Node& b) {
  return static_cast<bool>(static_cast<int>(a.key < b.key) |
                           (static_cast<int>(a.key == b.key) & static_cast<int>(a.turn < b.turn)));
}

}  // namespace

Node Heap::lift(std::uint32_t pos) const {
  const std::uint64_t from = index(pos);
  return {nodes_[from].key, nodes_[from].turn, seat(from)};
}

void Heap::place(std::uint32_t pos, Node node) {
  const std::uint64_t to = index(pos);
  nodes_[to] = {node.key, node.turn, node.seat ^ static_cast<std::uint32_t>(to)};
  positions_[node.seat] = pos;
}

void Heap::sift_up(std::uint32_t pos, Node node) {
  while (pos > 0) {
    const std::uint32_t parent = (pos - 1) / 4;
    if (!before(node, at(parent))) break;
    place(pos, lift(parent));
    pos = parent;
  }
  place(pos, node);
}

// 0 where there are none.
std::uint32_t Heap::least_child(std::uint32_t pos) const {
  const std::uint64_t first = 4ull * pos + 1;
  if (first >= region_->size) return 0;
  const auto least = static_cast<std::uint32_t>(first);
  const Node* const brothers = &at(least);
  if (first + 4 <= region_->size) {
    // One of their children is next: all arrive while these are compared.
    const std::uint64_t below = 4 * first + 1;
    if (below < region_->size) {
      const Node* const later = &at(static_cast<std::uint32_t>(below));
      for (int line = 0; line < 4; ++line) __builtin_prefetch(later + 4 * line, 1);
    }
    const int left = before(brothers[1], brothers[0]);
    const int right = 2 + before(brothers[3], brothers[2]);
    const bool is_right = before(brothers[right], brothers[left]);
    return least + static_cast<std::uint32_t>(is_right ? right : left);
  }
  std::uint32_t found = 0;
  for (std::uint32_t i = 1; least + i < region_->size; ++i) {
    if (before(brothers[i], brothers[found])) found = i;
  }
  return least + found;
}

void Heap::sift_down(std::uint32_t pos, Node node) {
  while (const std::uint32_t least = least_child(pos)) {
    if (!before(at(least), node)) break;
    place(pos, lift(least));
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
  if (begins_chunk(pos)) {
    if (header_->free_chunks == 0) return false;
    table_[chunk(pos)] = free_[--header_->free_chunks];
  }
  ++region_->size;
  const std::uint32_t seat = this->seat(index(pos));
  ranks_[id].seat.store(seat, std::memory_order_relaxed);
  ranks_[id].region.store(tag_, std::memory_order_relaxed);
  sift_up(pos, {key, turn_of(id), seat});
  return true;
}

void Heap::remove(std::uint32_t pos) {
  const Node gone = lift(pos);
  const std::uint32_t end = --region_->size;
  const Node last = lift(end);
  ranks_[gone.id()].region.store(0, std::memory_order_relaxed);
  take_seat(index(end), gone.seat);
  if (begins_chunk(end)) free_[header_->free_chunks++] = table_[chunk(end)];
  if (pos < end) settle(pos, last);
}

void Heap::update(std::uint32_t pos, double key) {
  Node node = lift(pos);
  node.key = key;
  ranks_[node.id()].key.store(key, std::memory_order_relaxed);
  settle(pos, node);
}

}  // namespace stoker
