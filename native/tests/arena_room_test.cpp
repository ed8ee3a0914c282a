// Segments on disk whose limit moves: room of the file system is given back and taken again, and
// what is read is right or a miss, even if processes are killed meanwhile.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "kit.h"
#include "stoker/block_store.h"

using kit::geometry;
using kit::there;
using stoker::Arena;
using stoker::CapacityError;
using stoker::Geometry;

namespace {

constexpr std::uint32_t kIds = 400;
constexpr std::uint64_t kCapacity = 4'000'000;

// Samples of about 10,000 bytes.
Geometry on_disk(std::uint64_t limit = UINT64_MAX) {
  Geometry asked = geometry(kIds, kCapacity, 10'000, true);
  asked.limit = limit;
  return asked;
}

std::uint64_t size_of(std::uint32_t id) { return 9'000 + id; }

void fill(Arena& arena) {
  for (std::uint32_t id = 0; id < kIds; ++id) kit::put(arena, id, size_of(id), id);
}

std::uint64_t disk_of(const Arena& arena) {
  struct stat status{};
  CHECK(fstat(arena.file_descriptor(), &status) == 0);
  return 512ull * static_cast<std::uint64_t>(status.st_blocks);
}

// Its file takes what it says, but for what the file system notes of it.
void check_room(Arena& arena) {
  constexpr std::uint64_t kNotes = 64 << 10;
  const std::uint64_t taken = disk_of(arena);
  if (taken + kNotes < arena.room() || taken > arena.room() + kNotes) {
    std::fprintf(stderr, "%lu bytes taken, %lu said\n", taken, arena.room());
  }
  CHECK(taken + kNotes >= arena.room() && taken <= arena.room() + kNotes);
}

bool gives_back() {
  const kit::Path path;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const int how = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  const bool can = ftruncate(file, 8192) == 0 && fallocate(file, how, 0, 4096) == 0;
  close(file);
  return can;
}

// A cache of half the limit has half the disk and the samples of the highest keys.
void disk_is_given_back_and_taken_again() {
  const kit::Path path;
  Arena arena(on_disk(kCapacity / 2), path);
  const auto fill_up = [&] {
    fill(arena);
    kit::check_sound(arena);
    CHECK(arena.counters().payload <= arena.header().limit);
    CHECK(arena.counters().payload + 12'000 >
          std::min<std::uint64_t>(arena.header().limit, 3'670'000));
    check_room(arena);
  };
  fill_up();
  const std::uint64_t half = arena.room();
  CHECK(arena.memory() == arena.header().total_bytes);
  CHECK(arena.limit(2 * kCapacity) > half + 1'900'000);
  fill_up();
  CHECK(kit::count_there(arena) == kIds);
  CHECK(arena.limit(kCapacity / 2) == half);
  kit::check_sound(arena);
  check_room(arena);
  std::uint32_t first = 0;
  while (!there(arena, first)) ++first;
  for (std::uint32_t id = first; id < kIds; ++id) CHECK(there(arena, id));
  CHECK(arena.counters().payload > kCapacity / 2 - 24'000 && arena.counters().corrupt == 0);
  CHECK(arena.limit(0) < 300'000 && arena.counters().entries == 0);
  CHECK(!kit::put(arena, 1, 100));
  check_room(arena);
  arena.limit(kCapacity);
  fill_up();
}

// It holds what fits its limit then; what was given back is not there, and is not found damaged.
void reopened_with_any_limit() {
  const std::uint64_t limits[] = {kCapacity, kCapacity / 2, kCapacity / 10, kCapacity};
  const kit::Path path;
  {
    Arena arena(on_disk(), path);
  }
  for (const std::uint64_t before : limits) {
    for (const std::uint64_t after : limits) {
      std::uint32_t kept = 0;
      {
        Arena arena(on_disk(), path);
        fill(arena);
        arena.limit(before);
        kept = kit::count_there(arena);
      }
      Arena arena(on_disk(after), path);
      kit::check_sound(arena);
      check_room(arena);
      const std::uint32_t found = kit::count_there(arena);
      CHECK(arena.counters().payload <= after);
      CHECK(after < before || found >= kept);
      CHECK(after >= before || (found < kept && found * 12'000ull > after * 0.9));
      fill(arena);
      kit::check_sound(arena);
      kit::count_there(arena);
    }
  }
}

// Records outlive what they speak of: what was given back is not found damaged.
void what_was_given_back_is_not_there() {
  const kit::Path path;
  {
    Arena arena(on_disk(), path);
    fill(arena);
    arena.limit(kCapacity / 10, 0);
    for (std::uint32_t id = 0; id < 30; ++id) CHECK(kit::put(arena, id, size_of(id), id));
  }
  Arena arena(on_disk(), path);
  const std::uint64_t said = arena.counters().entries;
  CHECK(said >= 30 && said < 70);
  CHECK(kit::count_there(arena) == said && arena.counters().corrupt == 0);
}

// What lies in the way moves with a new checksum: not before the old one was right.
void what_is_spoilt_does_not_become_right() {
  const kit::Path path;
  Arena arena(on_disk(), path);
  fill(arena);
  const auto first = static_cast<off_t>(arena.header().file_data_at);
  for (off_t at = first; at < first + 4'000'000; at += 30'000) {
    const unsigned char byte = 0x5a;
    CHECK(pwrite(arena.file_descriptor(), &byte, 1, at) == 1);
  }
  arena.limit(kCapacity / 2);
  CHECK(arena.counters().corrupt > 10);
  kit::check_sound(arena);
  const std::uint32_t left = kit::count_there(arena);
  CHECK(left > 50 && left < 180);
}

// Copying takes as long as the disk does: what is not copied in time leaves.
void later_than_the_deadline_nothing_moves() {
  const kit::Path path;
  Arena arena(on_disk(), path);
  fill(arena);
  const std::uint64_t evictions = arena.counters().evictions;
  arena.limit(kCapacity * 3 / 4, 0);
  kit::check_sound(arena);
  check_room(arena);
  const std::uint32_t left = kit::count_there(arena);
  CHECK(left > 200 && left < 320);
  CHECK(arena.counters().evictions - evictions == kIds - left);
  fill(arena);
  CHECK(arena.counters().payload + 12'000 > kCapacity * 3 / 4);
}

// Nor does a large file keep its caller for long: each call does a part, until all is done.
void later_than_the_deadline_room_changes_hands_in_parts() {
  const kit::Path path;
  Arena arena(geometry(kIds, 200'000'000, 500'000, true), path);
  const std::uint64_t whole = arena.room();
  int calls = 1;
  for (std::uint64_t before = whole, now = arena.limit(0, 0); now < before; ++calls) {
    check_room(arena);
    CHECK(before - now < 80'000'000);
    before = now;
    now = arena.limit(0, 0);
  }
  CHECK(calls > 2 && arena.room() < 1'000'000);
  CHECK(arena.limit(200'000'000, 0) < whole && arena.limit(200'000'000) == whole);
  kit::check_sound(arena);
  check_room(arena);
}

void churn(Arena& arena, unsigned seed, double seconds) {
  std::mt19937 random(seed);
  const std::int64_t start = stoker::monotonic_ns();
  while (kit::seconds_since(start) < seconds) {
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t id = random() % kIds;
      // Some much larger than the mean, in many pieces.
      const std::uint64_t length = random() % (random() % 8 == 0 ? 200'000 : 15'000);
      kit::put(arena, id, length, random() % 100);
    }
    for (int i = 0; i < 10; ++i) there(arena, random() % kIds);
    if (random() % 8 == 0) kit::discard(arena, random() % kIds);
    if (random() % 4 == 0) {
      const std::uint64_t bytes = random() % (kCapacity + kCapacity / 4);
      arena.limit(bytes, random() % 4 == 0 ? 0 : INT64_MAX);
    }
    if (random() % 50 == 0) kit::check_sound(arena);
  }
}

void finish(Arena& arena) {
  kit::check_sound(arena);
  arena.limit(kCapacity / 3);
  check_room(arena);
  arena.limit(kCapacity);
  kit::count_there(arena);
  check_room(arena);
  CHECK(arena.counters().evictions > 20 && arena.counters().corrupt == 0);
  CHECK(arena.counters().io_errors == 0);
}

void limits_move_while_all_are_at_work() {
  const kit::Path path;
  Arena arena(on_disk(), path);
  std::vector<pid_t> children;
  for (unsigned i = 0; i < 3; ++i) {
    children.push_back(kit::spawn([&, i] { churn(arena, i, 0.7); }));
  }
  for (const pid_t child : children) CHECK(kit::succeeded(child));
  finish(arena);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) threads.emplace_back([&, t] { churn(arena, 7 + t, 0.7); });
  for (std::thread& thread : threads) thread.join();
  finish(arena);
}

// One is killed while another continues, or all are and the next one opens the file.
void killed_at_random_instants() {
  std::mt19937 random(4);
  const kit::Path path;
  {
    Arena arena(on_disk(), path);
  }
  for (int round = 0; round < (kit::kSlow ? 10 : 40); ++round) {
    const unsigned seed = random();
    const auto pause = 2'000'000 + static_cast<long>(random() % 8'000'000);
    const std::uint64_t limit = random() % 2 == 0 ? UINT64_MAX : random() % kCapacity;
    if (round % 2 == 0) {
      const pid_t child = kit::spawn([&] {
        Arena arena(on_disk(), path);
        churn(arena, seed, 60);
      });
      const timespec time{0, pause};
      nanosleep(&time, nullptr);
      kit::kill_and_wait(child);
    }
    Arena arena(on_disk(limit), path);
    kit::check_sound(arena);
    kit::count_there(arena);
    if (round % 2 == 0) continue;
    const pid_t child = kit::spawn([&] { churn(arena, seed, 60); });
    churn(arena, seed + 1, 0.02);
    kit::kill_and_wait(child);
    arena.reclaim();
    kit::check_sound(arena);
    kit::count_there(arena);
    arena.limit(kCapacity / 2);
    arena.limit(kCapacity);
    check_room(arena);
  }
}

// A child that limits is killed at its n-th stop before or after a system call; false when it ended
// before that.
bool cut_short(Arena& arena, std::uint64_t bytes, int stops) {
  const pid_t child = kit::spawn([&] {
    arena.release(0);  // its slot is taken
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    arena.limit(bytes);
  });
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  for (int stop = 0; stop < stops && WIFSTOPPED(status); ++stop) {
    ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    waitpid(child, &status, 0);
  }
  if (!WIFSTOPPED(status)) return false;
  kit::kill_and_wait(child);
  return true;
}

void killed_at_any_call_while_the_limit_moves() {
  constexpr std::uint32_t kFew = 24;
  Geometry few = geometry(kFew, 1'000'000, 40'000, true);
  for (const bool reopens : {false, true}) {
    int cuts = 0;
    for (bool cut = true; cut; cuts += reopens ? 5 : 3) {
      const kit::Path path;
      std::uint32_t found = 0;
      {
        Arena arena(few, path);
        for (std::uint32_t id = 0; id < kFew; ++id) kit::put(arena, id, 38'000 + id, id);
        cut = cut_short(arena, 500'000, cuts + 1);
        if (!reopens) {
          arena.reclaim();
          kit::check_sound(arena);
          found = kit::count_there(arena);
          CHECK(found >= 11 && arena.counters().corrupt == 0);
          arena.limit(500'000);
          check_room(arena);
          CHECK(kit::count_there(arena) >= 11);
        }
      }
      Arena arena(few, path);
      kit::check_sound(arena);
      CHECK(kit::count_there(arena) >= 11);
      CHECK(kit::put(arena, 0, 38'000, 100) && there(arena, 0));
    }
    CHECK(cuts > 20);
  }
}

// A reader in another process that is late: what it reads was given back or written again.
void readers_meet_what_moves() {
  const kit::Path path;
  const kit::Path over;  // is there once the reader may end
  Arena arena(on_disk(), path);
  fill(arena);
  const pid_t reader = kit::spawn([&] {
    const std::int64_t start = stoker::monotonic_ns();
    std::uint32_t found = 0;
    while (access(over.c_str(), F_OK) != 0 && kit::seconds_since(start) < 60) {
      found += kit::count_there(arena);
    }
    CHECK(found > kIds);
  });
  const std::int64_t start = stoker::monotonic_ns();
  const auto has_met = [&] { return kit::kSlow || arena.counters().torn > 0; };
  while (kit::seconds_since(start) < 0.6 || (!has_met() && kit::seconds_since(start) < 30)) {
    arena.limit(kCapacity / 3);
    arena.limit(kCapacity);
    fill(arena);
  }
  close(open(over.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  CHECK(kit::succeeded(reader));
  CHECK(arena.counters().corrupt == 0);
  CHECK(has_met());
}

// A small disk of our own; false where that is not allowed.
bool on_small_disk(const std::string& folder, const char* size) {
  const auto note = [](const char* name, const std::string& text) {
    const int file = open(name, O_WRONLY | O_CLOEXEC);
    const bool is_noted = write(file, text.data(), text.size()) > 0;
    close(file);
    return is_noted;
  };
  const std::string me = "0 " + std::to_string(getuid()) + " 1";
  const bool is_apart = unshare(CLONE_NEWNS) == 0 || (unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 &&
                                                      note("/proc/self/uid_map", me));
  return is_apart && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", folder.c_str(), "tmpfs", 0, size) == 0;
}

// Another file takes the rest of the disk: less than asked, and no error.
void on_a_full_disk_it_is_less() {
  const kit::Path folder;
  CHECK(mkdir(folder.c_str(), 0700) == 0);
  const pid_t child = kit::spawn([&] {
    if (!on_small_disk(folder, "size=5m")) {
      std::fprintf(stderr, "left out: no file system may be mounted here, so no disk is full\n");
      return;
    }
    const std::string path = std::string(folder) + "/cache";
    const std::string other = std::string(folder) + "/other";
    const auto take_the_rest = [&] {
      const int file = open(other.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
      off_t size = 0;
      while (fallocate(file, 0, size, 4096) == 0) size += 4096;
      close(file);
      return size;
    };
    {
      Arena arena(on_disk(kCapacity / 2), path);
      fill(arena);
      CHECK(take_the_rest() > 1'000'000);
      const std::uint64_t had = arena.room();
      CHECK(arena.limit(kCapacity) == had);
      fill(arena);
      kit::check_sound(arena);
      CHECK(arena.counters().io_errors == 0 && kit::count_there(arena) > 180);
      CHECK(truncate(other.c_str(), 100'000) == 0);
      CHECK(arena.limit(kCapacity) > had + 1'000'000);
      CHECK(arena.limit(kCapacity / 2) == had);
      take_the_rest();
    }
    Arena arena(on_disk(), path);
    kit::check_sound(arena);
    CHECK(kit::count_there(arena) > 180 && arena.room() < 3'000'000);
    fill(arena);
    CHECK(arena.counters().io_errors == 0 && arena.counters().corrupt == 0);
    CHECK_THROWS(CapacityError, Arena(on_disk(), path + "2"));
    CHECK(access((path + "2").c_str(), F_OK) != 0);
  });
  CHECK(kit::succeeded(child));
  rmdir(folder.c_str());
}

// A file system that takes nothing back: all stays reserved, and counts.
void what_is_not_taken_back_is_kept() {
  const int file = memfd_create("file", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Arena arena(on_disk(), "/proc/self/fd/" + std::to_string(file));
  fill(arena);
  const std::uint64_t whole = arena.room();
  CHECK(fcntl(file, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0);  // nor is anything written
  CHECK(arena.limit(kCapacity / 2) == whole && disk_of(arena) >= kCapacity);
  kit::check_sound(arena);
  CHECK(kit::count_there(arena) > 80 && arena.counters().payload <= kCapacity / 2);
  CHECK(arena.limit(kCapacity) == whole);
  kit::check_sound(arena);
  close(file);
}

}  // namespace

int main() {
  what_is_not_taken_back_is_kept();
  if (!gives_back()) {
    std::fprintf(stderr,
                 "left out: this file system gives nothing back from the middle of a file\n");
    return check::failures();
  }
  disk_is_given_back_and_taken_again();
  reopened_with_any_limit();
  what_was_given_back_is_not_there();
  what_is_spoilt_does_not_become_right();
  later_than_the_deadline_nothing_moves();
  later_than_the_deadline_room_changes_hands_in_parts();
  limits_move_while_all_are_at_work();
  killed_at_random_instants();
  if (!kit::kSlow && kit::can_trace()) {
    killed_at_any_call_while_the_limit_moves();
  } else {
    std::fprintf(stderr, "left out: no process may be traced here, or each step takes long\n");
  }
  readers_meet_what_moves();
  on_a_full_disk_it_is_less();
  return check::failures();
}
