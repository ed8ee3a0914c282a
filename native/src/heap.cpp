#include "stoker/heap.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace stoker {
namespace {

constexpr std::uint32_t kMostLeft = 4096;  // places without a member, on top of as many as members
constexpr std::uint32_t kLookAhead = 16;   // members looked up before they are needed

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
    if (!before(node, this->node(parent))) break;
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
  const Node* const brothers = &node(least);
  if (first + 4 <= region_->size) {
    // One of their children is next: all arrive while these are compared.
    const std::uint64_t below = 4 * first + 1;
    if (below < region_->size) {
      const Node* const later = &node(static_cast<std::uint32_t>(below));
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
    if (!before(this->node(least), node)) break;
    place(pos, lift(least));
    pos = least;
  }
  place(pos, node);
}

void Heap::settle(std::uint32_t pos, Node node) {
  if (pos > 0 && before(node, this->node((pos - 1) / 4))) {
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
  if (is_line()) {
    const bool is_last =
        line_->length == 0 || key > nodes_[line_index(place_of(line_->length - 1))].key;
    if ((is_last && append(id, key)) || (!is_last && put_back(id, key))) {
      ++region_->size;
      enter(id);
      return true;
    }
    become_heap();
  }
  const std::uint32_t pos = region_->size;
  if (begins_chunk(pos)) {
    if (header_->free_chunks == 0) return false;
    table_[chunk(pos)] = free_[--header_->free_chunks];
  }
  ++region_->size;
  const std::uint32_t seat = this->seat(index(pos));
  ranks_[id].seat.store(seat, std::memory_order_relaxed);
  enter(id);
  sift_up(pos, {key, turn_of(id), seat});
  return true;
}

void Heap::take_out(std::uint32_t id) {
  const std::uint32_t pos = find(id);
  if (!is_line()) return remove(pos);
  leave(id);
  --region_->size;
  if (pos == 0) advance();
}

void Heap::remove(std::uint32_t pos) {
  if (is_line()) return take_out(at(pos).id());
  const Node gone = lift(pos);
  const std::uint32_t end = --region_->size;
  const Node last = lift(end);
  leave(gone.id());
  take_seat(index(end), gone.seat);
  if (begins_chunk(end)) free_[header_->free_chunks++] = table_[chunk(end)];
  if (pos < end) settle(pos, last);
}

void Heap::replace(std::uint32_t pos, std::uint32_t id, double key) {
  const Node gone = lift(pos);
  leave(gone.id());
  ranks_[id].key.store(key, std::memory_order_relaxed);
  ranks_[id].seat.store(gone.seat, std::memory_order_relaxed);
  enter(id);
  settle(pos, {key, turn_of(id), gone.seat});
}

void Heap::update(std::uint32_t pos, double key) {
  if (is_line()) {
    const std::uint32_t id = at(pos).id();
    ranks_[id].key.store(key, std::memory_order_relaxed);
    remove(pos);
    insert(id, key);  // cannot fail: it had a node
    return;
  }
  Node node = lift(pos);
  ranks_[node.id()].key.store(key, std::memory_order_relaxed);
  if (node.key == key) return;
  node.key = key;
  settle(pos, node);
}

bool Heap::in_order() const {
  if (!is_line()) {
    for (std::uint32_t pos = 1; pos < size(); ++pos) {
      if (node((pos - 1) / 4).key > node(pos).key) return false;
    }
    return true;
  }
  std::uint32_t members = 0;
  double latest = -std::numeric_limits<double>::infinity();
  for (std::uint32_t pos = 0; pos < line_->length; ++pos) {
    if (at(pos).key < latest) return false;
    latest = at(pos).key;
    members += static_cast<std::uint32_t>(holds(pos));
  }
  return members == size() && (size() == 0 || holds(0));
}

// --- lines ---

void Heap::touched(std::uint32_t id, double key) {
  if (!is_line()) return;
  const bool is_first = find(id) == 0;
  if (!append(id, key)) {
    become_heap();
  } else if (is_first) {
    advance();
  }
}

bool Heap::stands(std::uint32_t place) const {
  const Rank& rank = ranks_[nodes_[line_index(place)].id()];
  return rank.seat.load(std::memory_order_relaxed) == place &&
         rank.region.load(std::memory_order_relaxed) == tag_;
}

// What was removed last, or not long ago, has its place still; at the front, which has moved on, as
// long as its chunk is there. False where it has none.
bool Heap::put_back(std::uint32_t id, double key) {
  const std::uint32_t seat = ranks_[id].seat.load(std::memory_order_relaxed);
  if (seat >= ring()) return false;
  const bool was_first = seat < line_->front && seat / kChunkNodes == line_->front / kChunkNodes;
  if (!was_first && find(id) >= line_->length) return false;
  const Node& node = nodes_[line_index(seat)];
  if (node.id() != id || node.key != key) return false;
  if (was_first) {
    line_->length += line_->front - seat;
    line_->front = seat;
  }
  return true;
}

// False when no node is left for it.
bool Heap::append(std::uint32_t id, double key) {
  if (line_->length > 2 * region_->size + kMostLeft) close_ranks();
  std::uint32_t place = place_of(line_->length);
  if (place % kChunkNodes == 0 || line_->length == 0) {
    if (header_->free_chunks == 0 || line_->length > ring() - 2 * kChunkNodes) return false;
    if (line_->length == 0) place = line_->front = 0;
    table_[place / kChunkNodes] = free_[--header_->free_chunks];
  }
  Node& node = nodes_[line_index(place)];
  node.key = key;
  node.turn = turn_of(id);
  ranks_[id].seat.store(place, std::memory_order_relaxed);
  ++line_->length;
  return true;
}

// Moves the front, whose member left, to the first place that has one.
void Heap::advance() {
  if (region_->size == 0) return shorten(0);
  do {
    if ((line_->front + 1) % kChunkNodes == 0) {
      free_[header_->free_chunks++] = table_[line_->front / kChunkNodes];
    }
    line_->front = place_of(1);
    --line_->length;
    // Each place is looked at once, here.
    if (line_->length > kLookAhead) __builtin_prefetch(&ranks_[at(kLookAhead).id()], 1);
  } while (!stands(line_->front));
}

// Gives up the places from `length` on, which have no members.
void Heap::shorten(std::uint32_t length) {
  while (line_->length > length) {
    const std::uint32_t last = place_of(line_->length - 1);
    const std::uint32_t within = last % kChunkNodes;
    const std::uint32_t dropped = std::min(within + 1, line_->length - length);
    line_->length -= dropped;
    if (dropped == within + 1 || line_->length == 0) {
      free_[header_->free_chunks++] = table_[last / kChunkNodes];
    }
  }
}

// Has members stand one behind the other again, without places of those that left.
void Heap::close_ranks() {
  std::uint32_t kept = 0;
  for (std::uint32_t pos = 0; pos < line_->length; ++pos) {
    if (pos + kLookAhead < line_->length) __builtin_prefetch(&ranks_[at(pos + kLookAhead).id()]);
    if (!holds(pos)) continue;
    const Node& from = at(pos);
    const std::uint32_t place = place_of(kept++);
    Node& to = nodes_[line_index(place)];
    to.key = from.key;
    to.turn = from.turn;
    ranks_[to.id()].seat.store(place, std::memory_order_relaxed);
  }
  shorten(kept);
}

void Heap::become_heap() {
  std::vector<std::pair<std::uint32_t, double>> members;
  members.reserve(region_->size);
  for (std::uint32_t pos = 0; pos < line_->length; ++pos) {
    if (holds(pos)) members.emplace_back(at(pos).id(), at(pos).key);
  }
  region_->size = 0;
  shorten(0);
  line_->is_used = false;
  for (const auto& [id, key] : members) insert(id, key);
}

}  // namespace stoker
