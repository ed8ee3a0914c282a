#include "stoker/heap.h"

#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"

using stoker::Header;
using stoker::Heap;
using stoker::kChunkNodes;
using stoker::Line;
using stoker::Node;
using stoker::Rank;
using stoker::turn_of;

namespace {

struct Heaps {
  explicit Heaps(std::uint32_t ids, std::uint32_t num_chunks)
      : chunks(Heap::chunk_words(num_chunks)),
        nodes(std::size_t{num_chunks} * kChunkNodes),
        positions(nodes.size()),
        ranks(new Rank[ids]()) {
    header.num_chunks = header.free_chunks = num_chunks;
    for (std::uint32_t i = 0; i < num_chunks; ++i) chunks[i] = i;
    for (Line& line : lines) line.members.resize(ids / 64 + 1);
  }
  Heap heap(std::uint32_t region) {
    return {&header,       region,           chunks.data(),
            nodes.data(),  positions.data(), {ranks.get(), false},
            &lines[region]};
  }
  Header header{};
  Line lines[stoker::kMaxRegions];
  std::vector<std::uint32_t> chunks;
  std::vector<Node> nodes;
  std::vector<std::uint32_t> positions;
  std::unique_ptr<Rank[]> ranks;
};

// Two heaps over one pool of nodes, against ordered sets of (key, turn).
void same_as_a_model() {
  constexpr std::uint32_t kIds = 6000;
  Heaps heaps(kIds, 8);
  std::set<std::pair<double, std::uint32_t>> model[2];
  std::map<std::uint32_t, std::pair<int, double>> where;
  std::mt19937 random(3);
  const auto key = [&] { return static_cast<double>(random() % 500); };
  for (int step = 0; step < 60000; ++step) {
    const std::uint32_t id = random() % kIds;
    const auto known = where.find(id);
    const int action = static_cast<int>(random() % 3);
    if (known == where.end()) {
      const int region = static_cast<int>(random() % 2);
      const double value = key();
      CHECK(heaps.heap(static_cast<std::uint32_t>(region)).push(id, value));
      model[region].insert({value, turn_of(id)});
      where[id] = {region, value};
      continue;
    }
    const int region = known->second.first;
    double& value = known->second.second;
    Heap heap = heaps.heap(static_cast<std::uint32_t>(region));
    const std::uint32_t pos = heap.find(id);
    CHECK(heap.at(pos).id() == id && heap.at(pos).key == value);
    CHECK(heaps.ranks[id].region == region + 1);
    CHECK(heap.at(0).key == model[region].begin()->first);
    CHECK(heap.at(0).turn == model[region].begin()->second);
    model[region].erase({value, turn_of(id)});
    if (action == 0) {
      value = key();
      heap.update(pos, value);
      model[region].insert({value, turn_of(id)});
    } else if (action == 1) {
      heap.remove(pos);
      CHECK(heaps.ranks[id].region == 0);
      where.erase(known);
    } else {
      model[region].insert({value, turn_of(id)});
    }
    CHECK(heap.size() == model[region].size());
  }
}

void a_full_pool_refuses_and_chunks_come_back() {
  constexpr std::uint32_t kFirst = kChunkNodes - 3;  // nodes in a heap's first chunk
  Heaps heaps(3 * kChunkNodes, 2);
  for (std::uint32_t id = 0; id < kFirst; ++id) CHECK(heaps.heap(0).push(id, 0));
  CHECK(heaps.heap(1).push(kFirst, 0));
  CHECK(!heaps.heap(0).push(kFirst + 1, 0));
  CHECK(heaps.heap(0).size() == kFirst && heaps.ranks[kFirst + 1].region == 0);
  heaps.heap(1).remove(0);
  CHECK(heaps.heap(0).push(kFirst + 1, 0));
  while (heaps.heap(0).size() > 0) heaps.heap(0).remove(0);
  CHECK(heaps.header.free_chunks == 2);
}

// A chunk that changes hands has the seats of the nodes that were last to leave it.
void seats_are_free_again() {
  constexpr std::uint32_t kIds = 3000;
  Heaps heaps(kIds, 4);
  std::mt19937 random(5);
  for (int round = 0; round < 6; ++round) {
    Heap heap = heaps.heap(static_cast<std::uint32_t>(round % 3));
    for (std::uint32_t id = 0; id < kIds; ++id) CHECK(heap.push(id, random() % 100));
    std::set<std::uint32_t> seats;
    for (std::uint32_t id = 0; id < kIds; ++id) {
      CHECK(heap.at(heap.find(id)).id() == id);
      seats.insert(heaps.ranks[id].seat);
    }
    CHECK(seats.size() == kIds);
    while (heap.size() > 0) heap.remove(random() % heap.size());
  }
}

// Two lines over one pool of nodes, against ordered sets, until they have become heaps.
void lines_are_the_same_as_a_model() {
  constexpr std::uint32_t kIds = 6000;
  for (unsigned seed = 0; seed < 12; ++seed) {
    Heaps heaps(kIds, seed % 2 == 0 ? 9 : 40);
    heaps.lines[0].is_used = heaps.lines[1].is_used = true;
    std::set<std::pair<double, std::uint32_t>> model[2];
    std::map<std::uint32_t, std::pair<std::uint32_t, double>> where;
    std::mt19937 random(seed);
    double now = 0;
    for (int step = 0; step < 60'000; ++step) {
      const std::uint32_t id = random() % kIds;
      const auto known = where.find(id);
      const auto action = random() % 8;
      // Late ones seldom, since each makes a heap of its line.
      const double key = step > 50'000 && random() % 1'000 == 0 ? now / 2 : ++now;
      if (known == where.end()) {
        const std::uint32_t region = random() % 2;
        CHECK(heaps.heap(region).push(id, key));
        model[region].insert({key, turn_of(id)});
        where[id] = {region, key};
        continue;
      }
      const std::uint32_t region = known->second.first;
      Heap heap = heaps.heap(region);
      CHECK(heap.size() == model[region].size() && heap.holds(heap.find(id)));
      CHECK(heap.at(0).key == model[region].begin()->first);
      CHECK(heap.at(heap.find(id)).id() == id);
      CHECK(heap.at(heap.find(id)).key == known->second.second);
      const std::uint32_t chosen = action < 4 ? id : heap.at(0).id();
      const auto moved = where.find(chosen);
      if (action == 3 ||
          (action == 5 && random() % 64 == 0)) {  // one that leaves, and then stays after all
        const bool was_line = heap.is_line();
        const bool ends_chunk = heap.find(chosen) == 0;  // the first one may be the last of its own
        heap.remove(heap.find(chosen));
        CHECK(heap.insert(chosen, moved->second.second));
        CHECK(heap.is_line() == was_line || ends_chunk);
        continue;
      }
      model[region].erase({moved->second.second, turn_of(chosen)});
      if (action % 2 == 0) {
        heap.remove(heap.find(chosen));
        where.erase(moved);
        continue;
      }
      if (action == 1 && heap.is_line()) {
        heaps.ranks[chosen].key = ++now;
        heap.touched(chosen, now);
        if (!heap.is_line()) heap.update(heap.find(chosen), now);
        moved->second.second = now;
      } else {
        heap.update(heap.find(chosen), key);
        moved->second.second = key;
      }
      model[region].insert({moved->second.second, turn_of(chosen)});
      if (step % 1'000 == 0) CHECK(heaps.heap(0).in_order() && heaps.heap(1).in_order());
    }
    for (std::uint32_t id = 0; id < kIds; ++id) {
      const auto at = where.find(id);
      for (std::uint32_t region = 0; region < 2; ++region) {
        const bool is_member = at != where.end() && at->second.first == region;
        CHECK((heaps.lines[region].members[id / 64] >> id % 64 & 1) == is_member);
      }
    }
    for (std::uint32_t region = 0; region < 2; ++region) {
      Heap heap = heaps.heap(region);
      for (const auto& [key, turn] : model[region]) {
        CHECK(heap.at(0).key == key && heap.at(0).turn == turn);
        heap.remove(0);
      }
      CHECK(heap.size() == 0);
    }
    CHECK(heaps.header.free_chunks == heaps.header.num_chunks);
  }
}

}  // namespace

int main() {
  lines_are_the_same_as_a_model();
  same_as_a_model();
  a_full_pool_refuses_and_chunks_come_back();
  seats_are_free_again();
  return check::failures();
}
