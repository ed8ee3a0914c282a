#include "stoker/work_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace stoker {
namespace {

std::atomic<std::uint64_t> forks{0};
// The process id would not do: a grandchild may get its grandparent's.
const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });

/// Blocks every signal in the calling thread while it lives, so that threads started in that time
/// never run the handlers of the program that they serve.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

/// One batch; it lives on the stack of the thread that runs it.
struct Batch {
  const std::function<void(std::size_t)>& work;
  const std::size_t count;
  std::atomic<std::size_t> next{0};
  unsigned helpers = 0;  // guarded by the crew's mutex
  std::condition_variable helpers_left{};

  void drain() {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  }
};

}  // namespace

/// The helpers of one process.
class WorkPool::Crew {
 public:
  Crew() : born_(forks.load()) {}

  ~Crew() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }

  bool is_of_this_process() const { return born_ == forks.load(); }

  void run(Batch& batch, std::size_t wanted) {
    {
      std::lock_guard lock(mutex_);
      hire(wanted);
      batches_.push_back(&batch);
    }
    wake_.notify_one();  // a thread that joins wakes others: work that is done by then wakes none
    batch.drain();
    std::unique_lock lock(mutex_);
    std::erase(batches_, &batch);
    batch.helpers_left.wait(lock, [&] { return batch.helpers == 0; });
  }

 private:
  /// Starts helpers until there are `wanted`, or as many as the system grants.
  void hire(std::size_t wanted) {
    if (helpers_.size() >= wanted) return;
    SignalsBlocked blocked;
    try {
      helpers_.reserve(wanted);
      while (helpers_.size() < wanted) helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      // A limit on threads: continue with fewer.
    }
  }

  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !batches_.empty(); });
      if (stopping_) return;
      Batch& batch = *batches_.front();
      ++batch.helpers;
      lock.unlock();
      wake_others(batch);
      batch.drain();
      lock.lock();
      std::erase(batches_, &batch);  // drained: no thread needs to join it any more
      if (--batch.helpers == 0) batch.helpers_left.notify_one();
    }
  }

  /// Wakes two helpers if there is work for them, so that all are awake after a few steps.
  void wake_others(const Batch& batch) {
    const std::size_t begun = batch.next.load(std::memory_order_relaxed);
    for (std::size_t i = begun + 1; i < std::min(begun + 3, batch.count); ++i) wake_.notify_one();
  }

  const std::uint64_t born_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Batch*> batches_;
  std::vector<std::thread> helpers_;
  bool stopping_ = false;
};

WorkPool::~WorkPool() {
  Crew* crew = crew_.load();
  // After a fork its threads are not here and its mutex may be held for ever.
  if (crew != nullptr && crew->is_of_this_process()) delete crew;
}

WorkPool::Crew& WorkPool::crew() {
  Crew* crew = crew_.load();
  while (crew == nullptr || !crew->is_of_this_process()) {
    auto fresh = std::make_unique<Crew>();
    if (crew_.compare_exchange_strong(crew, fresh.get())) return *fresh.release();
  }
  return *crew;
}

void WorkPool::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count == 0) return;
  Batch batch{work, count};
  const std::size_t wanted = std::min<std::size_t>(count - 1, threads_);
  if (wanted == 0) return batch.drain();
  crew().run(batch, wanted);
}

}  // namespace stoker
