// One region's indexed 4-ary heap: the smallest key first. Nodes live in chunks that all regions
// draw from one pool. Only used under the lock.
#pragma once

#include <cstdint>

#include "stoker/layout.h"

namespace stoker {

class Heap {
 public:
  Heap(Header* header, std::uint32_t region, std::uint32_t* chunks, Node* nodes, Rank* ranks)
      : header_(header),
        region_(&header->regions[region]),
        tag_(static_cast<std::uint8_t>(region + 1)),
        free_(chunks),
        table_(chunks + static_cast<std::uint64_t>(region + 1) * header->num_chunks),
        nodes_(nodes),
        ranks_(ranks) {}

  static std::uint64_t chunk_words(std::uint32_t num_chunks) {
    return static_cast<std::uint64_t>(kMaxRegions + 1) * num_chunks;
  }
  std::uint32_t size() const { return region_->size; }
  Node& at(std::uint32_t pos) {
    return nodes_[static_cast<std::uint64_t>(table_[pos / kChunkNodes]) * kChunkNodes +
                  pos % kChunkNodes];
  }
  // Adds an id and marks it as the region's; false when the pool of nodes is used up.
  bool push(std::uint32_t id, double key);
  // Puts an id back at its old place; its own key may have grown meanwhile and stays.
  bool insert(std::uint32_t id, double key);
  // Takes the node out; the id is in no region then.
  void remove(std::uint32_t pos);
  void update(std::uint32_t pos, double key);

 private:
  void place(std::uint32_t pos, Node node);
  void sift_up(std::uint32_t pos, Node node);
  void sift_down(std::uint32_t pos, Node node);
  void settle(std::uint32_t pos, Node node);

  Header* header_;
  Region* region_;
  std::uint8_t tag_;
  std::uint32_t* free_;
  std::uint32_t* table_;
  Node* nodes_;
  Rank* ranks_;
};

}  // namespace stoker
