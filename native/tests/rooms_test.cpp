// Rooms: samples that are brought to their place in an arena, and what becomes of those that are
// not.
#include "stoker/rooms.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "kit.h"

namespace {

std::atomic<int> mapped;

}  // namespace

// Stands before that of the system.
extern "C" int madvise(void* at, std::size_t bytes,
                       int advice) noexcept(noexcept(::madvise(nullptr, 0, 0))) {
  if (advice == MADV_POPULATE_WRITE) ++mapped;
  return static_cast<int>(::syscall(SYS_madvise, at, bytes, advice));
}

namespace {

using kit::payload;
using stoker::Arena;
using stoker::Rooms;

std::vector<std::uint32_t> ids_to(std::uint32_t count) {
  std::vector<std::uint32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 0u);
  return ids;
}

std::unique_ptr<Rooms> rooms_for(const std::shared_ptr<Arena>& arena,
                                 const std::vector<std::uint32_t>& ids, std::uint64_t size) {
  return std::make_unique<Rooms>(arena, ids, std::vector<std::uint64_t>(ids.size(), size),
                                 Arena::Placing{0});
}

// Writes a sample where it belongs, part by part.
void bring(Rooms& rooms, std::size_t index, std::uint32_t id) {
  const auto bytes = payload(id, rooms.size_of(index));
  std::size_t at = 0;
  for (const auto& part : rooms.parts(index)) {
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), part.size(), part.begin());
    at += part.size();
  }
  CHECK(at == bytes.size());
}

void what_is_brought_is_there_once_it_is_settled() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 10'000), "");
  const auto ids = ids_to(3);
  bool own[3];
  arena->claim(ids, own);
  const auto rooms = rooms_for(arena, ids, 1000);
  for (std::size_t i = 0; i < 3; ++i) CHECK(own[i] && rooms->has(i));
  CHECK(arena->are_coming(ids));
  CHECK(!arena->are_coming(ids_to(4)));  // the last one is not claimed
  bring(*rooms, 0, 0);
  const auto bytes = payload(1, 1000);
  CHECK(!rooms->fill(1, std::span(bytes).first(999)));
  CHECK(rooms->fill(1, bytes));
  CHECK(kit::count_there(*arena) == 0);
  arena->verify();
  const bool whole[3] = {true, true, false};
  bool there[3];
  rooms->settle(whole, there);
  CHECK(there[0] && there[1] && !there[2]);
  CHECK(kit::there(*arena, 0) && kit::there(*arena, 1) && !kit::there(*arena, 2));
  CHECK(!arena->are_coming({ids.data(), 2}));
  rooms->settle(whole, there);  // once only
  CHECK(!there[0] && kit::there(*arena, 0));
  arena->claim({&ids[2], 1}, own);
  CHECK(own[0]);  // what did not come is anybody's again
  arena->verify();
}

void what_is_not_settled_is_given_up_with_the_rooms() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 10'000), "");
  rooms_for(arena, ids_to(4), 1000).reset();
  CHECK(arena->counters().payload == 0);
  CHECK(kit::count_there(*arena) == 0);
  bool own[4];
  arena->claim(ids_to(4), own);
  CHECK(own[0] && own[3]);
  arena->verify();
}

void what_finds_no_room_keeps_its_claim() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 2000), "");
  const auto ids = ids_to(4);
  bool own[4];
  arena->claim(ids, own);
  const auto rooms = rooms_for(arena, ids, 1000);
  CHECK(rooms->has(0) && rooms->has(1));
  CHECK(!rooms->has(2) && !rooms->has(3));  // what is reserved is not evicted
  CHECK(rooms->parts(3).empty());
  CHECK(!rooms->fill(3, payload(3, 1000)));
  arena->claim({&ids[3], 1}, own);
  CHECK(!own[0]);
  arena->abandon(ids);
  arena->claim({&ids[3], 1}, own);
  CHECK(own[0]);
  arena->verify();
}

void a_sample_in_pieces_comes_whole() {
  const auto arena = std::make_shared<Arena>(kit::geometry(64, 64'000), "");
  for (std::uint32_t id = 0; id < 60; ++id) kit::put(*arena, id, 1000, id);
  for (std::uint32_t id = 1; id < 60; id += 2) arena->discard({&id, 1});
  const std::uint32_t large = 63;
  const auto rooms = rooms_for(arena, {large}, 20'000);
  CHECK(rooms->has(0) && rooms->parts(0).size() > 1);
  bring(*rooms, 0, large);
  const bool whole = true;
  bool there = false;
  rooms->settle(&whole, &there);
  CHECK(there && kit::there(*arena, large));
  arena->verify();
}

// The kernel walked the pages of each sample that came, though it had mapped them for another.
void memory_is_mapped_once() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 1'000'000), "");
  const int before = mapped;
  for (std::uint32_t turn = 0; turn < 100; ++turn) {
    const std::uint32_t id = turn % 4;
    arena->discard({&id, 1});
    const auto rooms = rooms_for(arena, {id}, 200'000);
    bring(*rooms, 0, id);
    const bool whole = true;
    bool there = false;
    rooms->settle(&whole, &there);
    CHECK(there && kit::there(*arena, id));
  }
  CHECK(mapped > before);
  CHECK(mapped - before <= 1'100'000 / 65'536 + 2);
}

void readers_beside_it_see_whole_samples_or_none() {
  const auto arena = std::make_shared<Arena>(kit::geometry(8, 3000), "");
  std::atomic<bool> is_over{false};
  std::thread reader([&] {
    while (!is_over) {
      for (std::uint32_t id = 0; id < 8; ++id) kit::there(*arena, id);
    }
  });
  for (std::uint32_t turn = 0; turn < (kit::kSlow ? 500u : 5000u); ++turn) {
    const auto rooms = rooms_for(arena, {turn % 8}, 1000);
    const bool whole = turn % 3 != 0 && rooms->fill(0, payload(turn % 8, 1000));
    bool there = false;
    rooms->settle(&whole, &there);
  }
  is_over = true;
  reader.join();
  arena->verify();
}

void a_process_that_dies_leaves_no_room_taken() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 10'000), "");
  const pid_t child = ::fork();
  if (child == 0) {
    const auto rooms = rooms_for(arena, ids_to(4), 1000);
    ::_exit(rooms->has(3) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  arena->reclaim();
  CHECK(arena->counters().payload == 0);
  arena->verify();
}

void a_child_does_not_give_up_what_its_parent_has() {
  const auto arena = std::make_shared<Arena>(kit::geometry(4, 10'000), "");
  auto rooms = rooms_for(arena, ids_to(4), 1000);
  const pid_t child = ::fork();
  if (child == 0) {
    rooms.reset();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  for (std::uint32_t id = 0; id < 4; ++id) bring(*rooms, id, id);
  const bool whole[4] = {true, true, true, true};
  bool there[4];
  rooms->settle(whole, there);
  CHECK(there[0] && there[3] && kit::count_there(*arena) == 4);
  arena->verify();
}

}  // namespace

int main() {
  what_is_brought_is_there_once_it_is_settled();
  what_is_not_settled_is_given_up_with_the_rooms();
  what_finds_no_room_keeps_its_claim();
  a_sample_in_pieces_comes_whole();
  memory_is_mapped_once();
  readers_beside_it_see_whole_samples_or_none();
  a_process_that_dies_leaves_no_room_taken();
  a_child_does_not_give_up_what_its_parent_has();
  return check::failures();
}
