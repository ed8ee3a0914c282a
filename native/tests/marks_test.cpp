// Of all who mark an id with one stamp, exactly one is first: in threads and in processes.
#include "stoker/marks.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "kit.h"

namespace {

constexpr std::uint32_t kIds = 5'000;

// The number of ids, visited from `from` on, that this caller is the first to mark.
std::uint32_t mark_all(std::span<std::uint32_t> marks, std::uint32_t from, std::uint32_t stamp) {
  std::uint32_t firsts = 0;
  for (std::uint32_t i = 0; i < kIds; i += 5) {
    std::uint32_t ids[5];
    bool first[5];
    for (std::uint32_t k = 0; k < 5; ++k) ids[k] = (from + i + k) % kIds;
    stoker::mark_once(marks, ids, stamp, first);
    firsts += static_cast<std::uint32_t>(std::count(first, first + 5, true));
  }
  return firsts;
}

void a_stamp_is_set_once() {
  std::vector<std::uint32_t> marks(10, 0);
  const std::vector<std::uint32_t> ids{3, 7, 3};
  bool first[3];
  stoker::mark_once(marks, ids, 1, first);
  CHECK(first[0] && first[1] && !first[2]);
  stoker::mark_once(marks, ids, 1, first);
  CHECK(!first[0] && !first[1] && !first[2]);
  stoker::mark_once(marks, ids, 2, first);
  CHECK(first[0] && first[1] && !first[2]);
  stoker::unmark(marks, std::vector<std::uint32_t>{3}, 1);  // of another stamp: stays
  stoker::mark_once(marks, ids, 2, first);
  CHECK(!first[0]);
  stoker::mark_once(marks, ids, 1, first);  // a straggler
  CHECK(!first[0] && !first[1]);
  stoker::unmark(marks, std::vector<std::uint32_t>{3, 4}, 2);
  stoker::mark_once(marks, ids, 2, first);
  CHECK(first[0] && !first[1] && !first[2]);
}

void what_was_marked_or_is_not_wanted_is_found() {
  const std::vector<std::uint32_t> marks{2, 1, 3, 0, 2};
  const bool wanted[] = {true, true, true, true, false};
  const std::vector<std::uint32_t> ids{4, 3, 2, 1, 0, 0};
  const auto found = stoker::find_marked(marks, wanted, ids, 2);
  CHECK((found == std::vector<std::int64_t>{0, 2, 4, 5}));
  CHECK(stoker::find_marked(marks, wanted, {}, 2).empty());
  const std::vector<std::uint32_t> beyond{5};
  CHECK_THROWS(stoker::ConfigError, stoker::find_marked(marks, wanted, beyond, 2));
  CHECK_THROWS(stoker::ConfigError, stoker::find_marked(marks, {wanted, 4}, ids, 2));
}

void a_turn_goes_to_the_end_of_the_chain() {
  constexpr std::uint64_t kNow = std::uint64_t{2} << 32;
  std::vector<std::uint32_t> marks{2, 2, 2, 2, 0, 2};
  // 0 on the turn of 1, 1 on that of 4; 2 is not noted yet; 3 is of a later epoch; 5 on its own.
  std::vector<std::uint64_t> displaced{kNow | 1, kNow | 4, 1, std::uint64_t{3} << 32, 0, kNow | 5};
  const std::vector<std::uint32_t> ids{0, 0, 2, 3, 5};
  std::uint32_t turns[5];
  bool told[5];
  stoker::take_turns(marks, displaced, ids, 2, 1, turns, told);
  CHECK(turns[0] == 0 && told[0] && marks[4] == 0);  // 4 is two links away
  stoker::take_turns(marks, displaced, ids, 2, 10, turns, told);
  CHECK(turns[0] == 4 && told[0] && marks[4] == 2 && displaced[4] == (kNow | 4));
  CHECK(turns[1] == 0 && told[1]);
  CHECK(!told[2] && turns[3] == 3 && told[3] && turns[4] == 5 && told[4]);
  CHECK_THROWS(stoker::ConfigError,
               stoker::take_turns(marks, std::span(displaced).first(3), ids, 2, 10, turns, told));
}

void bad_arguments_change_nothing() {
  std::vector<std::uint32_t> marks(10, 0);
  bool first[2];
  const std::vector<std::uint32_t> beyond{1, 10};
  CHECK_THROWS(stoker::ConfigError, stoker::mark_once(marks, beyond, 1, first));
  CHECK_THROWS(stoker::ConfigError, stoker::unmark(marks, beyond, 1));
  CHECK_THROWS(stoker::ConfigError, stoker::mark_once(marks, std::span(beyond).first(1), 0, first));
  CHECK(std::accumulate(marks.begin(), marks.end(), 0u) == 0);
}

void threads_share_the_ids_out() {
  std::vector<std::uint32_t> marks(kIds, 0);
  for (std::uint32_t stamp = 1; stamp <= 20; ++stamp) {
    std::atomic<std::uint32_t> firsts{0};
    std::vector<std::thread> all;
    for (std::uint32_t t = 0; t < 4; ++t) {
      all.emplace_back([&, t] { firsts += mark_all(marks, t * 7, stamp); });
    }
    for (std::thread& thread : all) thread.join();
    CHECK(firsts == kIds);
  }
}

void processes_share_the_ids_out() {
  const std::size_t bytes = (kIds + 1) * sizeof(std::uint32_t);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  const std::span<std::uint32_t> all(static_cast<std::uint32_t*>(memory), kIds + 1);
  std::vector<pid_t> children;
  for (std::uint32_t c = 0; c < 4; ++c) {
    children.push_back(kit::spawn([&, c] {
      const std::uint32_t mine = mark_all(all.first(kIds), c * 11, 9);
      std::atomic_ref<std::uint32_t>(all[kIds]).fetch_add(mine);
    }));
  }
  for (const pid_t child : children) CHECK(kit::succeeded(child));
  CHECK(all[kIds] == kIds);
  munmap(memory, bytes);
}

}  // namespace

int main() {
  a_stamp_is_set_once();
  what_was_marked_or_is_not_wanted_is_found();
  a_turn_goes_to_the_end_of_the_chain();
  bad_arguments_change_nothing();
  processes_share_the_ids_out();
  threads_share_the_ids_out();
  return check::failures();
}
