// One region's indexed 4-ary heap: the smallest key first, and of equal keys the
// smallest turn. Nodes live in chunks that all regions
// draw from one pool; the four children of a node lie in one cache line. Only used under the lock.
//
// Each node has a seat, from when it comes until it leaves: an index into `positions`, which say
// where the nodes are now. A node that moves writes there, and so into little memory, and not into
// the ranks of all ids. Nodes without an id have the free seats.
//
// In a blank arena, members that leave in the order in which they came stand in a line instead:
// what comes is appended, what leaves is not there any more when the front reaches it, and may
// come back to its place until then. A line becomes a heap where that order no longer holds.
#pragma once

#include <cstdint>
#include <vector>

#include "stoker/layout.h"

namespace stoker {

// Places of a region's line, in a ring of all chunks that there are. A place is its member's while
// the member's seat says so; the first one always is.
struct Line {
  bool is_used = false;  // else the region has a heap
  std::uint32_t front = 0;
  std::uint32_t length = 0;  // places, of members and of those that left
  // A bit for each id: whether it is a member, of a heap, too. So they are listed, by id, without a
  // look at each one's rank.
  std::vector<std::uint64_t> members;
};

class Heap {
 public:
  Heap(Header* header, std::uint32_t region, std::uint32_t* chunks, Node* nodes,
       std::uint32_t* positions, Ranks ranks, Line* line = nullptr)
      : line_(line),
        header_(header),
        region_(&header->regions[region]),
        tag_(static_cast<std::uint8_t>(region + 1)),
        free_(chunks),
        table_(chunks + static_cast<std::uint64_t>(region + 1) * header->num_chunks),
        nodes_(nodes),
        positions_(positions),
        ranks_(ranks) {}

  static std::uint64_t chunk_words(std::uint32_t num_chunks) {
    return static_cast<std::uint64_t>(kMaxRegions + 1) * num_chunks;
  }
  bool is_line() const { return line_ != nullptr && line_->is_used; }
  std::uint32_t size() const { return region_->size; }
  // Positions from 0 on, at which there are members or were some; the first has one.
  std::uint32_t length() const { return is_line() ? line_->length : region_->size; }
  const Node& at(std::uint32_t pos) const {
    return is_line() ? nodes_[line_index(place_of(pos))] : node(pos);
  }
  // Whether there is a member at this position.
  bool holds(std::uint32_t pos) const { return !is_line() || stands(place_of(pos)); }
  // Where an id of this heap is now.
  std::uint32_t find(std::uint32_t id) const {
    const std::uint32_t seat = ranks_[id].seat.load(std::memory_order_relaxed);
    if (!is_line()) return positions_[seat];
    return seat - line_->front + (seat < line_->front ? ring() : 0);
  }
  // Have what find() reads arrive, and later the node that it finds.
  void expect_position(std::uint32_t id) const {
    if (is_line()) return;
    __builtin_prefetch(&positions_[ranks_[id].seat.load(std::memory_order_relaxed)]);
  }
  void expect_node(std::uint32_t id) const {
    const std::uint32_t pos = find(id);
    __builtin_prefetch(&at(pos), 1);
    if (!is_line() && pos > 0) __builtin_prefetch(&node((pos - 1) / 4), 1);
  }
  // Moves a member to the end of the line; in a heap, eviction finds its new key by itself.
  void touched(std::uint32_t id, double key);
  // Adds an id and marks it as the region's; false when the pool of nodes is used up.
  bool push(std::uint32_t id, double key);
  // Puts an id back at its old place; its own key may have grown in the meantime and stays.
  bool insert(std::uint32_t id, double key);
  // Takes the node out; the id is in no region then.
  void remove(std::uint32_t pos);
  // The same for the node of an id.
  void take_out(std::uint32_t id);
  // What remove(pos) and push(id, key) do, in one way through a heap; not for a line.
  void replace(std::uint32_t pos, std::uint32_t id, double key);
  void update(std::uint32_t pos, double key);
  // Whether all members are in order.
  bool in_order() const;

 private:
  // --- lines ---
  std::uint32_t ring() const { return header_->num_chunks * kChunkNodes; }
  std::uint32_t place_of(std::uint32_t pos) const { return wrapped(line_->front, pos); }
  std::uint32_t wrapped(std::uint32_t place, std::uint32_t steps) const {
    const std::uint64_t sum = std::uint64_t{place} + steps;
    return static_cast<std::uint32_t>(sum < ring() ? sum : sum - ring());
  }
  std::uint64_t line_index(std::uint32_t place) const {
    return static_cast<std::uint64_t>(table_[place / kChunkNodes]) * kChunkNodes +
           place % kChunkNodes;
  }
  bool stands(std::uint32_t place) const;
  bool put_back(std::uint32_t id, double key);
  bool append(std::uint32_t id, double key);
  void advance();
  void shorten(std::uint32_t length);
  void close_ranks();
  void become_heap();

  // --- heaps ---
  static constexpr std::uint32_t kShift = 3;  // nodes left out, so that brothers share a line

  static std::uint32_t chunk(std::uint32_t pos) { return (pos + kShift) / kChunkNodes; }
  static bool begins_chunk(std::uint32_t pos) {
    return pos == 0 || (pos + kShift) % kChunkNodes == 0;
  }
  std::uint64_t index(std::uint32_t pos) const {
    return static_cast<std::uint64_t>(table_[chunk(pos)]) * kChunkNodes +
           (pos + kShift) % kChunkNodes;
  }
  std::uint32_t seat(std::uint64_t index) const {
    return nodes_[index].seat ^ static_cast<std::uint32_t>(index);
  }
  void take_seat(std::uint64_t index, std::uint32_t seat) {
    nodes_[index].seat = seat ^ static_cast<std::uint32_t>(index);
  }
  const Node& node(std::uint32_t pos) const { return nodes_[index(pos)]; }
  void enter(std::uint32_t id) {
    ranks_[id].region.store(tag_, std::memory_order_relaxed);
    if (line_ != nullptr) line_->members[id / 64] |= std::uint64_t{1} << id % 64;
  }
  void leave(std::uint32_t id) {
    ranks_[id].region.store(0, std::memory_order_relaxed);
    if (line_ != nullptr) line_->members[id / 64] &= ~(std::uint64_t{1} << id % 64);
  }
  std::uint32_t least_child(std::uint32_t pos) const;
  // Of a node that is on its way: its own seat.
  Node lift(std::uint32_t pos) const;
  void place(std::uint32_t pos, Node node);
  void sift_up(std::uint32_t pos, Node node);
  void sift_down(std::uint32_t pos, Node node);
  void settle(std::uint32_t pos, Node node);

  Line* line_;  // null where there are heaps only
  Header* header_;
  Region* region_;
  std::uint8_t tag_;
  std::uint32_t* free_;
  std::uint32_t* table_;
  Node* nodes_;
  std::uint32_t* positions_;
  Ranks ranks_;
};

}  // namespace stoker
