// Readers and writers at once, in threads and in processes: never a wrong byte.
#include <thread>

#include "kit.h"

using kit::geometry;
using stoker::Arena;

namespace {

constexpr std::uint32_t kIds = 80;

// Batches of everything for a while; samples of several lengths, so that blocks are
// redistributed.
void churn(Arena& arena, unsigned seed, double seconds) {
  std::mt19937 random(seed);
  const std::int64_t start = stoker::monotonic_ns();
  while (kit::seconds_since(start) < seconds) {
    std::uint32_t ids[8];
    kit::Bytes bytes[8];
    stoker::Sample samples[8];
    double keys[8];
    bool flags[8];
    for (int i = 0; i < 8; ++i) {
      ids[i] = random() % kIds;
      bytes[i] = kit::payload(ids[i], random() % 6000);
      samples[i] = {bytes[i].data(), bytes[i].size()};
      keys[i] = random() % 100;
    }
    stoker::Arena::Placing placing{0};
    placing.keys = keys;
    arena.claim(ids, flags);
    arena.put(ids, samples, placing, flags);
    arena.abandon(ids);
    for (int i = 0; i < 30; ++i) kit::there(arena, random() % kIds);
    if (random() % 4 == 0) arena.discard({ids, 2});
    if (random() % 4 == 0) arena.set_keys({ids, 4}, keys);
    if (random() % 4 == 0) arena.lease({ids, 1}, static_cast<std::int64_t>(random() % 50));
    if (random() % 4 == 0) arena.release(50);
    if (random() % 50 == 0) kit::check_sound(arena);
  }
}

void finish(Arena& arena) {
  kit::check_sound(arena);
  kit::count_there(arena);
  CHECK(arena.counters().hits > 100 && arena.counters().evictions > 100);
  CHECK(arena.counters().corrupt == 0);
}

void threads(const std::string& path) {
  Arena arena(geometry(kIds, 60'000, 4096, !path.empty()), path);
  Arena other(dup(arena.memory_descriptor()), path.empty() ? -1 : dup(arena.file_descriptor()));
  std::vector<std::thread> all;
  for (unsigned t = 0; t < 4; ++t) {
    all.emplace_back([&, t] { churn(t % 2 == 0 ? arena : other, t, 1); });
  }
  for (std::thread& thread : all) thread.join();
  finish(arena);
}

void processes(const std::string& path) {
  Arena arena(geometry(kIds, 60'000, 4096, !path.empty()), path);
  std::vector<pid_t> children;
  for (unsigned i = 0; i < 3; ++i) {
    children.push_back(kit::spawn([&] { churn(arena, i, 1); }));
  }
  churn(arena, 9, 1);
  for (const pid_t child : children) CHECK(kit::succeeded(child));
  finish(arena);
}

// A fork while other threads are inside calls finds nothing locked or half done.
void forks_among_threads() {
  Arena arena(geometry(kIds, 60'000, 4096), "");
  std::vector<std::thread> busy;
  for (unsigned t = 0; t < 2; ++t) busy.emplace_back([&, t] { churn(arena, t, 1); });
  const std::int64_t start = stoker::monotonic_ns();
  while (kit::seconds_since(start) < 0.9) {
    CHECK(kit::succeeded(kit::spawn([&] { churn(arena, 77, 0.005); })));
  }
  for (std::thread& thread : busy) thread.join();
  finish(arena);
}

}  // namespace

int main() {
  const kit::Path first;
  const kit::Path second;
  processes("");
  processes(first);
  if (!kit::kSlow) forks_among_threads();  // the sanitizers' own locks do not survive that
  threads("");
  threads(second);
  return check::failures();
}
