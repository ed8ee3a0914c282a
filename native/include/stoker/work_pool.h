// A bounded set of threads that runs the items of a batch in parallel.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace stoker {

/// Runs batches of independent work items on the calling thread and up to `threads` helpers.
///
/// Several threads may run batches at once; they share the helpers. Helpers are started when they
/// are first needed, once per process: after fork() the child starts its own. When the system
/// denies a thread, the batch is run by those that exist, at worst by the caller alone.
class WorkPool {
 public:
  explicit WorkPool(unsigned threads) noexcept : threads_(threads) {}
  /// No batch may be running. In a child that inherited the helpers by fork, there is nothing to
  /// stop, and what they left behind is leaked.
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  /// Calls `work(0) ... work(count - 1)`, each once, and returns when all have returned.
  /// `work` is called from several threads at once and must not throw.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);

  unsigned threads() const noexcept { return threads_; }

 private:
  class Crew;
  Crew& crew();

  const unsigned threads_;
  std::atomic<Crew*> crew_{nullptr};
};

}  // namespace stoker
