// Processes that die or stop anywhere inside the arena: the others continue, with right bytes.
#include <sys/mman.h>

#include "kit.h"
#include "stoker/slot_lock.h"

using kit::geometry;
using kit::there;
using stoker::Arena;
using stoker::RegionSpec;

namespace {

constexpr std::uint32_t kIds = 40;

stoker::RegionSpec region(const char* name, std::uint64_t budget, stoker::Pop pop, bool holds) {
  stoker::RegionSpec spec;
  spec.name = name;
  spec.budget = budget;
  spec.order = stoker::Order::kInsertion;
  spec.pop = pop;
  spec.strict = false;
  spec.holds_bytes = holds;
  return spec;
}

stoker::RegionSpec strict(const char* name, std::uint64_t budget) {
  stoker::RegionSpec spec = region(name, budget, stoker::Pop::kEvict, true);
  spec.strict = true;
  return spec;
}

// Small enough that every put evicts, with ghosts and promotions: all that can be cut short.
void configure(Arena& arena) {
  RegionSpec small = region("main", 4'000, stoker::Pop::kPromote, true);
  small.visits = 1;
  small.promote_to = "big";
  small.ghost = "ghost";
  arena.configure({small, region("big", 16'000, stoker::Pop::kSecondChance, true),
                   region("ghost", 10'000, stoker::Pop::kEvict, false)});
}

void fill(Arena& arena) {
  for (std::uint32_t id = 0; id < kIds; ++id) {
    kit::put(arena, id, 100 + 60 * id);
    there(arena, id);
    there(arena, id / 2);
  }
}

// What a child does until it is killed: every kind of write.
void work(Arena& arena, std::mt19937& random) {
  const std::uint32_t id = random() % kIds;
  const std::uint32_t other = random() % kIds;
  switch (random() % 6) {
    case 0:
      kit::discard(arena, id);
      break;
    case 1:
      arena.lease({&id, 1}, random() % 100);
      break;
    case 2:
      arena.release(random() % 100);
      break;
    case 3:
      if (kit::claim(arena, id) && random() % 2 == 0) kit::abandon(arena, id);
      break;
    default:
      kit::put(arena, id, 100 + random() % 3000);
      there(arena, other);
  }
}

// After a death: all invariants hold, all bytes are right, and nothing is held any more.
void check_recovered(Arena& arena) {
  arena.reclaim();
  kit::check_sound(arena);
  kit::count_there(arena);
  const bool can_claim = kit::claim(arena, 0);
  if (can_claim) kit::abandon(arena, 0);
  CHECK(can_claim || there(arena, 0));
  for (std::uint32_t id = 0; id < kIds; ++id) kit::discard(arena, id);
  CHECK(arena.counters().payload == 0 && arena.counters().entries == 0);
  CHECK(arena.counters().free_blocks == arena.header().num_blocks);
  CHECK(kit::put(arena, 1, 3000) && there(arena, 1));
  kit::check_sound(arena);
}

long random_below(std::mt19937& random, long most) {
  return static_cast<long>(random() % static_cast<unsigned long>(most));
}

void killed_at_random_instants() {
  std::mt19937 random(5);
  Arena arena(geometry(kIds, 20'000, 1000), "");
  configure(arena);
  const int rounds = kit::kSlow ? 40 : 200;
  for (int round = 0; round < rounds; ++round) {
    fill(arena);
    pid_t children[2];
    for (pid_t& child : children) {
      const unsigned seed = random();
      child = kit::spawn([&] {
        std::mt19937 mine(seed);
        for (;;) work(arena, mine);
      });
    }
    timespec time{0, 1'000'000 + random_below(random, 3'000'000)};
    nanosleep(&time, nullptr);
    kit::kill_and_wait(children[0]);
    if (round % 2 == 0) {  // one dies while another continues
      nanosleep(&time, nullptr);
      kit::count_there(arena);
    }
    kit::kill_and_wait(children[1]);
    check_recovered(arena);
  }
}

// Runs `steps` instructions of a stopped child and kills it; false when it ended before.
bool step_and_kill(pid_t child, long steps) {
  for (long step = 0; step < steps; ++step) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) break;
    int status = 0;
    if (waitpid(child, &status, 0) != child || WIFEXITED(status)) return false;
  }
  kit::kill_and_wait(child);
  return true;
}

// A child that stopped, its slot taken, where it will begin with `body`.
template <typename Body>
pid_t traced(Arena& arena, Body body) {
  const pid_t child = kit::spawn([&] {
    arena.release(0);
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    body();
  });
  CHECK(kit::stopped(child));
  return child;
}

// Each kind of write, cut short after every so many of its instructions.
void killed_at_many_instructions() {
  constexpr long kStride = 97;
  const kit::Bytes bytes = kit::payload(0, 2500);
  const stoker::Sample sample{bytes.data(), bytes.size()};
  for (int kind = 0; kind < 4; ++kind) {
    std::uint64_t repairs = 0;
    for (long steps = 1, cut = 1; cut != 0; steps += kStride) {
      Arena arena(geometry(kIds, 20'000, 1000), "");
      configure(arena);
      fill(arena);
      const std::uint32_t ids[3] = {20, 21, 22};
      arena.lease(ids, 1);
      const pid_t child = traced(arena, [&] {
        const std::uint32_t id = 0;
        bool done = false;
        if (kind == 0) arena.put({&id, 1}, &sample, {0}, &done);  // evicts, promotes, remembers
        if (kind == 1) kit::discard(arena, 39);
        if (kind == 2) arena.lease({&ids[0], 3}, 1);
        if (kind == 3) arena.claim({&id, 1}, &done);
      });
      cut = step_and_kill(child, steps) ? 1 : 0;
      check_recovered(arena);
      repairs += arena.counters().repairs;
    }
    if (kind < 3) CHECK(repairs > 0);  // some died with the lock
  }
}

// A page that stops or kills its reader halfway through copying a sample.
unsigned char* trap = nullptr;
int trap_signal = SIGKILL;

void on_fault(int) {
  raise(trap_signal);
  mprotect(trap + 4096, 4096, PROT_READ | PROT_WRITE);
}

void put_trapped(Arena& arena, std::uint32_t id) {
  trap = static_cast<unsigned char*>(
      mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (std::uint64_t i = 0; i < 8192; ++i) trap[i] = kit::byte_of(id, 8192, i);
  mprotect(trap + 4096, 4096, PROT_NONE);
  struct sigaction action{};
  action.sa_handler = on_fault;
  sigaction(SIGSEGV, &action, nullptr);
  const stoker::Sample sample{trap, 8192};
  bool admitted = false;
  arena.put({&id, 1}, &sample, {0}, &admitted);
  CHECK(admitted);
}

void a_writer_killed_while_copying() {
  Arena arena(geometry(kIds, 20'000, 4000), "");
  const pid_t child = kit::spawn([&] { put_trapped(arena, 3); });
  CHECK(WIFSIGNALED(kit::ended(child)));
  CHECK(!there(arena, 3));
  const std::int64_t start = stoker::monotonic_ns();
  CHECK(!kit::wait(arena, 3, 5) && kit::seconds_since(start) < 2);
  CHECK(kit::claim(arena, 3) && kit::put(arena, 3, 8192) && there(arena, 3));
  CHECK(arena.counters().reclaimed == 1);
  kit::check_sound(arena);
}

// What a stopped writer has reserved stays its own, however long that takes.
void a_writer_stopped_while_copying() {
  Arena arena(geometry(kIds, 20'000, 4000), "");
  trap_signal = SIGSTOP;
  const pid_t child = kit::spawn([&] { put_trapped(arena, 3); });
  CHECK(kit::stopped(child));
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t id = 4; id < kIds; ++id) kit::put(arena, id, 500 + 50 * id);
    arena.reclaim();
    CHECK(!there(arena, 3) && !kit::claim(arena, 3) && !kit::put(arena, 3, 100));
    kit::count_there(arena);
    kit::check_sound(arena);
  }
  CHECK(!kit::wait(arena, 3, 0.1));
  kill(child, SIGCONT);
  CHECK(kit::wait(arena, 3, 5));
  CHECK(kit::succeeded(child));
  CHECK(kit::get(arena, 3) == kit::payload(3, 8192));
  kit::count_there(arena);
  kit::check_sound(arena);
}

// Holds the lock as a process does that is inside of the arena.
struct LockHolder {
  explicit LockHolder(const Arena& arena)
      : segment(stoker::Segment::attach(dup(arena.memory_descriptor()))),
        slots(segment.descriptor(), segment.at<stoker::Slot>(segment.header()->slots_at),
              [](std::uint32_t) {}),
        lock(&segment.header()->lock, slots) {}
  stoker::Segment segment;
  stoker::Slots slots;
  stoker::SlotLock lock;
};

// A process stopped inside the lock: everybody else bypasses the cache, and reads on.
void stopped_with_the_lock() {
  Arena arena(geometry(kIds, 20'000), "");
  kit::put(arena, 1, 1000);
  const pid_t child = kit::spawn([&] {
    LockHolder holder(arena);
    holder.lock.acquire(holder.slots.mine(), 0);
    raise(SIGSTOP);
    holder.lock.release();
  });
  CHECK(kit::stopped(child));
  const std::int64_t start = stoker::monotonic_ns();
  CHECK(!kit::put(arena, 2, 1000));
  CHECK(kit::seconds_since(start) > 0.045);
  for (int i = 0; i < 100; ++i) CHECK(!kit::put(arena, 2, 1000) && there(arena, 1));
  const std::uint32_t id = 1;
  CHECK(!arena.lease({&id, 1}, 1));
  CHECK(kit::claim(arena, 2));
  kit::abandon(arena, 2);
  CHECK(kit::seconds_since(start) < 5 && arena.counters().bypassed == 101);
  kill(child, SIGCONT);
  CHECK(kit::succeeded(child));
  kit::sleep_ms(1100);
  CHECK(kit::put(arena, 2, 1000) && there(arena, 2));
  kit::check_sound(arena);
}

// Runs a stopped child until the budgets have changed and it has let go of the lock.
void step_until_changed(pid_t child, const stoker::Header& header) {
  const volatile std::uint64_t& budget = header.regions[1].budget;
  int status = 0;
  do {
    CHECK(ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0);
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status)) break;
  } while (budget == 0 || (header.lock.load() & 0x7ff) != 0);
  CHECK(WIFSTOPPED(status));
}

// A process that stops with the lock after budgets have changed and before all is shed: the new
// budgets hold, and there is room for what they promise.
template <typename Change>
void shed_is_interrupted(Change change) {
  constexpr std::uint32_t kMany = 1000;
  Arena arena(geometry(2 * kMany, 64 * kMany, 64), "");
  arena.configure({strict("main", 64 * kMany), strict("other", 0)});
  for (std::uint32_t id = 0; id < kMany; ++id) kit::put(arena, id, 64);
  const stoker::Region* regions = arena.header().regions;
  const pid_t changer = traced(arena, [&] { change(arena, 32 * kMany); });
  step_until_changed(changer, arena.header());
  const pid_t holder = kit::spawn([&] {
    LockHolder held(arena);
    CHECK(held.lock.acquire(held.slots.mine(), 5'000'000'000) == stoker::SlotLock::Result::kTaken);
    raise(SIGSTOP);
    held.lock.release();
  });
  CHECK(kit::stopped(holder));
  ptrace(PTRACE_CONT, changer, nullptr, nullptr);
  CHECK(kit::succeeded(changer));  // it gives shedding up, without an error
  CHECK(regions[0].budget == 32 * kMany && regions[1].budget == 32 * kMany);
  CHECK(regions[0].bytes > regions[0].budget);
  kill(holder, SIGCONT);
  CHECK(kit::succeeded(holder));
  for (std::uint32_t id = kMany; id < kMany + kMany / 2; ++id) CHECK(kit::put(arena, id, 64, 0, 1));
  CHECK(regions[1].bytes == 32 * kMany && regions[0].bytes <= regions[0].budget);
  kit::check_sound(arena);
}

void n4_budgets_hold_when_shedding_is_interrupted() {
  shed_is_interrupted(
      [](Arena& arena, std::uint64_t bytes) { arena.resize_region("other", bytes); });
  shed_is_interrupted([](Arena& arena, std::uint64_t) { arena.divide({"main", "other"}, {1, 1}); });
}

void dead_processes_keep_no_leases() {
  Arena arena(geometry(kIds, 5'000), "");
  for (std::uint32_t id = 0; id < 5; ++id) kit::put(arena, id, 1000);
  const pid_t child = kit::spawn([&] {
    const std::uint32_t ids[5] = {0, 1, 2, 3, 4};
    CHECK(arena.lease(ids, 100));
    raise(SIGKILL);
  });
  kit::ended(child);
  CHECK(!kit::put(arena, 9, 1000));
  arena.reclaim();
  CHECK(kit::put(arena, 9, 1000));
  kit::check_sound(arena);
}

}  // namespace

int main() {
  stopped_with_the_lock();
  if (kit::can_trace()) n4_budgets_hold_when_shedding_is_interrupted();
  a_writer_killed_while_copying();
  a_writer_stopped_while_copying();
  dead_processes_keep_no_leases();
  killed_at_random_instants();
  if (!kit::kSlow && kit::can_trace()) killed_at_many_instructions();
  return check::failures();
}
