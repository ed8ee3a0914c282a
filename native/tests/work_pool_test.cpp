#include "stoker/work_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "check.h"

using stoker::WorkPool;

namespace {

bool runs_each_once(WorkPool& pool, std::size_t count) {
  std::vector<std::atomic<int>> calls(count);
  pool.run(count, [&](std::size_t i) { ++calls[i]; });
  for (const auto& n : calls) {
    if (n != 1) return false;
  }
  return true;
}

void every_item_runs_once() {
  for (const unsigned threads : {0u, 1u, 7u}) {
    WorkPool pool(threads);
    for (const std::size_t count : {0u, 1u, 2u, 3u, 1000u}) CHECK(runs_each_once(pool, count));
  }
}

void helpers_are_bounded_and_used() {
  WorkPool pool(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  pool.run(64, [&](std::size_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  CHECK(seen.size() > 1 && seen.size() <= 4);
}

/// Items that end only when all have begun: helpers have to wake each other until all are there.
void all_helpers_are_woken_for_items_that_take_long() {
  WorkPool pool(15);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> begun{0};
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    pool.run(16, [&](std::size_t) {
      ++begun;
      while (begun < 16 && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
    });
    CHECK(std::chrono::steady_clock::now() < patience);
  }
}

void batches_of_several_threads_share_the_helpers() {
  WorkPool pool(4);
  std::vector<std::thread> callers;
  for (int t = 0; t < 8; ++t) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) CHECK(runs_each_once(pool, 17));
    });
  }
  for (auto& caller : callers) caller.join();
}

/// Runs `body` in a forked child that has 20 seconds, and returns its exit status.
template <typename Body>
int in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    ::_exit(body() ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

void works_after_fork_while_other_threads_run_batches() {
#ifdef __SANITIZE_THREAD__
  return;  // ThreadSanitizer does not allow new threads after such a fork
#endif
  // Nor does qemu-user survive it every time: a child may inherit a lock of the emulator's own.
  if (std::getenv("STOKER_TEST_EMULATOR")) return;
  WorkPool pool(4);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) runs_each_once(pool, 50);
  });
  for (int i = 0; i < 20; ++i) {
    CHECK(in_child([&] {
            const bool ok = runs_each_once(pool, 50);
            return ok && in_child([&] { return runs_each_once(pool, 50); }) == 0;
          }) == 0);
  }
  stop = true;
  busy.join();
}

void a_child_can_destroy_what_it_inherited() {
  auto* pool = new WorkPool(4);
  CHECK(runs_each_once(*pool, 50));
  CHECK(in_child([&] {
          delete pool;
          return true;
        }) == 0);
  delete pool;
}

void goes_on_when_the_system_refuses_threads() {
  CHECK(in_child([] {
          const rlimit none{0, 0};
          ::setrlimit(RLIMIT_NPROC, &none);
          if (::getuid() == 0 && ::setuid(65534) != 0) return false;
          WorkPool pool(4);
          return runs_each_once(pool, 50);
        }) == 0);
}

void helpers_leave_signals_to_the_program() {
  static std::atomic<bool> elsewhere{false};
  static const pthread_t self = ::pthread_self();
  std::signal(SIGUSR1, [](int) {
    if (!::pthread_equal(::pthread_self(), self)) elsewhere = true;
  });
  WorkPool pool(4);
  pool.run(64, [](std::size_t) { ::kill(::getpid(), SIGUSR1); });
  CHECK(!elsewhere);
}

}  // namespace

int main() {
  every_item_runs_once();
  helpers_are_bounded_and_used();
  all_helpers_are_woken_for_items_that_take_long();
  batches_of_several_threads_share_the_helpers();
  works_after_fork_while_other_threads_run_batches();
  a_child_can_destroy_what_it_inherited();
  goes_on_when_the_system_refuses_threads();
  helpers_leave_signals_to_the_program();
  return check::failures();
}
