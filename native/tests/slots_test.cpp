#include "stoker/slots.h"

#include <sys/resource.h>

#include <set>
#include <string>
#include <thread>

#include "kit.h"
#include "stoker/segment.h"

using stoker::kMaxSlots;
using stoker::kNone;
using stoker::Segment;
using stoker::Slot;
using stoker::Slots;

namespace {

struct Table {
  Table() : segment(Segment::create(kit::geometry(4, 4096))) {}
  Slot* slots() { return segment.at<Slot>(segment.header()->slots_at); }
  Segment segment;
};

Slots open(Table& table) {
  return Slots(table.segment.descriptor(), table.slots(), [](std::uint32_t) {});
}

void one_slot_a_holder_and_it_comes_back() {
  Table table;
  const Slots first = open(table);
  {
    Slots second = open(table);
    Slots third = open(table);
    CHECK(!second.taken());
    const std::uint32_t slot = second.mine();
    CHECK(second.mine() == slot && second.taken());
    CHECK(third.mine() != slot);
    CHECK(first.alive(slot) && second.alive(slot) && third.alive(slot));
  }
  CHECK(!first.alive(0) && !first.alive(1));
  CHECK(table.slots()[0].in_use == 0 && table.slots()[1].in_use == 0);
}

void threads_share_their_process_slot() {
  Table table;
  Slots slots = open(table);
  std::vector<std::uint32_t> seen(8, kNone);
  std::vector<std::thread> threads;
  for (std::uint32_t& mine : seen) threads.emplace_back([&] { mine = slots.mine(); });
  for (std::thread& thread : threads) thread.join();
  for (const std::uint32_t mine : seen) CHECK(mine == slots.mine());
}

void a_forked_child_gets_its_own() {
  Table table;
  Slots slots = open(table);
  const std::uint32_t mine = slots.mine();
  const pid_t child = kit::spawn([&] {
    CHECK(!slots.taken());
    CHECK(slots.mine() != mine && slots.alive(mine));
    raise(SIGSTOP);
  });
  CHECK(kit::stopped(child));
  CHECK(slots.alive(mine + 1));  // a stopped process lives
  CHECK(!slots.seize(mine + 1) && !slots.seize(mine));
  kit::kill_and_wait(child);
  CHECK(!slots.alive(mine + 1) && table.slots()[mine + 1].in_use == 1);
  CHECK(slots.mine() == mine && slots.alive(mine));
}

// The child of a fork does not keep its parent's slot alive.
void a_parents_slot_ends_with_the_parent() {
  Table table;
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  const pid_t parent = kit::spawn([&] {
    Slots slots = open(table);
    const std::uint32_t mine = slots.mine();
    if (fork() == 0) {
      CHECK(write(pipes[1], &mine, sizeof(mine)) == sizeof(mine));
      kit::sleep_ms(300);
      _exit(0);
    }
    kit::sleep_ms(50);
    raise(SIGKILL);
  });
  std::uint32_t slot = kNone;
  CHECK(read(pipes[0], &slot, sizeof(slot)) == sizeof(slot));
  kit::ended(parent);
  CHECK(!open(table).alive(slot));
  close(pipes[0]);
  close(pipes[1]);
}

// Daemons and starters of other programs close every descriptor there is; then others get the
// numbers.
void n4_closed_descriptors_do_not_make_it_look_dead() {
  Table table;
  Slots slots = open(table);
  const std::uint32_t mine = slots.mine();
  const pid_t child = kit::spawn([&] {
    Slots own = open(table);
    const std::uint32_t theirs = own.mine();
    for (const bool reused : {false, true}) {
      for (int number = 3; number < 100; ++number) {
        reused ? dup2(STDERR_FILENO, number) : close(number);
      }
      CHECK(own.mine() == theirs && own.alive(theirs));
      CHECK(own.alive(mine) && !own.seize(mine));  // it cannot be known: nothing is taken away
    }
    raise(SIGSTOP);
    own.leave();
    CHECK(write(50, "", 0) == 0);  // still the program's
  });
  CHECK(kit::stopped(child));
  CHECK(slots.alive(mine + 1) && !slots.seize(mine + 1));
  kill(child, SIGCONT);
  CHECK(kit::succeeded(child));
  CHECK(!slots.alive(mine + 1) && table.slots()[mine + 1].in_use == 0);
}

// It was "Bad file descriptor", which says nothing of what to do.
void without_descriptors_left_the_reason_is_told() {
  Table table;
  Slots slots = open(table);
  struct rlimit before{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  std::string why;
  try {
    slots.mine();
  } catch (const stoker::SegmentError& error) {
    why = error.what();
  }
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(why.find("Too many open files") != std::string::npos);
  CHECK(slots.mine() == 0);
}

void a_seized_slot_is_nobodys() {
  Table table;
  Slots slots = open(table);
  slots.mine();
  CHECK(slots.seize(5) && !open(table).seize(5));
  table.slots()[5].in_use = 0;
  slots.let_go();
  CHECK(!slots.alive(5) && open(table).seize(5));
}

void an_unclean_slot_is_adopted_only_when_none_is_clean() {
  Table table;
  for (std::uint32_t slot = 0; slot < kMaxSlots; ++slot) table.slots()[slot].in_use = 1;
  table.slots()[9].in_use = 0;
  std::set<std::uint32_t> adopted;
  const auto adopt = [&](std::uint32_t slot) { adopted.insert(slot); };
  Slots first(table.segment.descriptor(), table.slots(), adopt);
  CHECK(first.mine() == 9 && adopted.empty());
  Slots second(table.segment.descriptor(), table.slots(), adopt);
  CHECK(second.mine() == 0 && adopted == std::set<std::uint32_t>{0});
}

void what_is_left_behind_marks_the_slot() {
  Table table;
  {
    Slots slots = open(table);
    table.slots()[slots.mine()].pending = 1;
  }
  CHECK(table.slots()[0].in_use == 1);
  {
    Slots slots = open(table);
    CHECK(slots.mine() == 1);
    table.slots()[1].lease_head = 1;
  }
  CHECK(table.slots()[1].in_use == 1);
}

void too_many_processes_are_refused() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < kMaxSlots + 100) return;
  Table table;
  Slots slots = open(table);
  std::vector<std::unique_ptr<Slots>> all;
  for (std::uint32_t i = 0; i < kMaxSlots; ++i) {
    all.push_back(
        std::make_unique<Slots>(table.segment.descriptor(), table.slots(), [](std::uint32_t) {}));
    CHECK(all.back()->mine() == i);
  }
  CHECK_THROWS(stoker::SegmentError, slots.mine());
  all.pop_back();
  CHECK(slots.mine() == kMaxSlots - 1);
}

}  // namespace

int main() {
  one_slot_a_holder_and_it_comes_back();
  a_forked_child_gets_its_own();
  a_parents_slot_ends_with_the_parent();
  n4_closed_descriptors_do_not_make_it_look_dead();
  without_descriptors_left_the_reason_is_told();
  a_seized_slot_is_nobodys();
  an_unclean_slot_is_adopted_only_when_none_is_clean();
  what_is_left_behind_marks_the_slot();
  too_many_processes_are_refused();
  threads_share_their_process_slot();
  return check::failures();
}
