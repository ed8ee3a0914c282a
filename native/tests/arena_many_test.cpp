// As many processes as one cache is made for, and half of them killed with all that they hold.
#include "kit.h"

using stoker::Arena;

namespace {

constexpr std::uint32_t kProcesses = kit::kSlow ? 64 : 512;
constexpr std::uint32_t kHeld = 2 * kProcesses;  // the sample that all of them read

// Each claims two samples and stops; of the first it puts the bytes when it continues.
pid_t member(Arena& arena, std::uint32_t number) {
  return kit::spawn([&arena, number] {
    CHECK(kit::there(arena, kHeld));
    CHECK(kit::claim(arena, 2 * number) && kit::claim(arena, 2 * number + 1));
    CHECK(arena.lease({&kHeld, 1}, number));
    raise(SIGSTOP);
    CHECK(kit::put(arena, 2 * number, 50));
    kit::abandon(arena, 2 * number + 1);
    arena.release(number);
  });
}

void what_the_killed_held_comes_back() {
  Arena arena(kit::geometry(kHeld + 1, 100 * kHeld, 50), "");
  CHECK(kit::put(arena, kHeld, 70));
  std::vector<pid_t> members;
  for (std::uint32_t i = 0; i < kProcesses; ++i) {
    members.push_back(member(arena, i));
    CHECK(kit::stopped(members.back()));  // one at a time: a lease needs the lock within 50 ms
  }
  for (std::uint32_t i = 0; i < kProcesses; i += 2) kit::kill_and_wait(members[i]);

  arena.reclaim();
  kit::check_sound(arena);
  CHECK(arena.counters().reclaimed == kProcesses);
  for (std::uint32_t i = 0; i < kProcesses; ++i) {
    const bool is_dead = i % 2 == 0;  // a stopped process keeps what it owns
    CHECK(kit::claim(arena, 2 * i) == is_dead && kit::claim(arena, 2 * i + 1) == is_dead);
  }
  for (std::uint32_t i = 1; i < kProcesses; i += 2) {
    kill(members[i], SIGCONT);
    CHECK(kit::succeeded(members[i]));
  }
  kit::check_sound(arena);
  CHECK(kit::count_there(arena) == kProcesses / 2 + 1);
}

}  // namespace

int main() {
  what_the_killed_held_comes_back();
  return check::failures();
}
