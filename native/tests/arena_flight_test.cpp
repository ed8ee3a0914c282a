// Single flight: of many who miss a sample, one fetches it.
#include <thread>

#include "kit.h"

using kit::geometry;
using kit::there;
using stoker::Arena;

namespace {

void one_claimant() {
  Arena arena(geometry(10, 10'000), "");
  CHECK(kit::claim(arena, 1) && !kit::claim(arena, 1));
  Arena other(dup(arena.memory_descriptor()), -1);
  CHECK(!kit::claim(other, 1) && !kit::put(other, 1, 100));
  kit::abandon(other, 1);  // not its to give back
  CHECK(!kit::claim(other, 1));
  CHECK(kit::put(arena, 1, 100) && !kit::claim(other, 1) && there(other, 1));
  kit::abandon(arena, 1);
  CHECK(there(other, 1));
  kit::check_sound(arena);
}

void a_refused_put_gives_the_claim_back() {
  Arena arena(geometry(10, 1000), "");
  CHECK(kit::claim(arena, 1) && !kit::put(arena, 1, 2000));
  Arena other(dup(arena.memory_descriptor()), -1);
  CHECK(kit::claim(other, 1));
  kit::check_sound(arena);
}

void waiting_ends_with_the_sample_or_without_it() {
  Arena arena(geometry(10, 10'000), "");
  Arena other(dup(arena.memory_descriptor()), -1);
  CHECK(!kit::wait(arena, 5, 10));  // no process claimed it
  for (const bool publish : {true, false}) {
    const std::uint32_t id = publish ? 1 : 2;
    CHECK(kit::claim(arena, id));
    const std::int64_t start = stoker::monotonic_ns();
    std::thread ending([&] {
      kit::sleep_ms(30);
      publish ? void(kit::put(arena, id, 300)) : kit::abandon(arena, id);
    });
    CHECK(kit::wait(other, id, 30) == publish);
    CHECK(kit::seconds_since(start) < 10);
    ending.join();
  }
  CHECK(kit::claim(arena, 3));
  const std::int64_t start = stoker::monotonic_ns();
  CHECK(!kit::wait(other, 3, 0.05));
  CHECK(kit::seconds_since(start) >= 0.05 && kit::seconds_since(start) < 5);
}

void a_dead_claimants_sample_is_claimed_again() {
  Arena arena(geometry(10, 10'000), "");
  for (const bool wait_first : {true, false}) {
    const pid_t child = kit::spawn([&] {
      CHECK(kit::claim(arena, 4));
      raise(SIGKILL);
    });
    kit::ended(child);
    if (wait_first) CHECK(!kit::wait(arena, 4, 5));
    CHECK(kit::claim(arena, 4));  // an orphan, too
    kit::abandon(arena, 4);
    arena.reclaim();
    kit::check_sound(arena);
  }
  CHECK(kit::claim(arena, 4) && kit::put(arena, 4, 100) && there(arena, 4));
}

void a_claim_ends_with_its_holder() {
  Arena arena(geometry(10, 10'000), "");
  {
    Arena other(dup(arena.memory_descriptor()), -1);
    CHECK(kit::claim(other, 6));
  }
  CHECK(kit::claim(arena, 6));
}

// Processes that all want the same samples fetch each of them about once.
void many_processes_fetch_once() {
  constexpr std::uint32_t kIds = 300;
  Arena arena(geometry(kIds, 1'000'000), "");
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    children.push_back(kit::spawn([&] {
      std::uint32_t fetched = 0;
      for (std::uint32_t id = 0; id < kIds; ++id) {
        while (!there(arena, id)) {
          if (kit::claim(arena, id)) {
            CHECK(kit::put(arena, id, 100 + id));
            ++fetched;
          } else {
            kit::wait(arena, id, 10);
          }
        }
      }
      CHECK(write(pipes[1], &fetched, sizeof(fetched)) == sizeof(fetched));
    }));
  }
  std::uint32_t total = 0;
  for (const pid_t child : children) {
    std::uint32_t fetched = 0;
    CHECK(read(pipes[0], &fetched, sizeof(fetched)) == sizeof(fetched));
    total += fetched;
    CHECK(kit::succeeded(child));
  }
  CHECK(total == kIds);
  kit::check_sound(arena);
}

}  // namespace

int main() {
  one_claimant();
  a_refused_put_gives_the_claim_back();
  a_dead_claimants_sample_is_claimed_again();
  a_claim_ends_with_its_holder();
  many_processes_fetch_once();
  waiting_ends_with_the_sample_or_without_it();
  return check::failures();
}
