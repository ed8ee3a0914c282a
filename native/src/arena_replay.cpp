// Runs of accesses at once, for simulation: the same steps as a store takes, batch by batch.
#include <algorithm>
#include <memory>

#include "stoker/arena.h"
#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;  // entries and lengths looked up before they are needed

}  // namespace

// What measure() and get() do, where there are no bytes to copy.
void Arena::look(Ids batch, bool* found) {
  const std::uint64_t now = advance(batch.size()) + 1;
  std::uint64_t hits = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (i + kAhead < batch.size()) __builtin_prefetch(&entries_[batch[i + kAhead]], 1);
    const std::uint64_t word = entries_[batch[i]].word.load(std::memory_order_relaxed);
    found[i] = state_of(word) == State::kReady;
    if (!found[i]) continue;
    ++hits;
    touch(batch[i], now + i);
  }
  Slot& mine = slot_table_[slot()];
  mine.hits.fetch_add(hits, std::memory_order_relaxed);
  mine.misses.fetch_add(batch.size() - hits, std::memory_order_relaxed);
}

// Claims what was missed, as places in the batch, and puts it, region by region.
void Arena::put_missed(Ids batch, std::size_t begin, const Run& run,
                       const std::vector<std::uint32_t>& missed, bool* found) {
  std::vector<std::uint32_t> ids;
  std::vector<Sample> samples;
  std::vector<double> keys;
  Placing placing{run.entrance, run.overflow};
  for (const std::uint32_t i : missed) ids.push_back(batch[i]);
  const std::unique_ptr<bool[]> flags(new bool[ids.size()]);
  claim(ids, flags.get());
  for (std::size_t m = 0; m < missed.size(); ++m) {
    found[missed[m]] = !flags[m];  // a sample that was asked for twice waits for the first
  }
  const std::uint32_t targets = run.regions == nullptr ? 1 : header_->num_regions;
  for (std::uint32_t target = 0; target < targets; ++target) {
    ids.clear();
    samples.clear();
    keys.clear();
    for (std::size_t m = 0; m < missed.size(); ++m) {
      if (m + kAhead < missed.size()) {
        __builtin_prefetch(&run.length_of(batch[missed[m + kAhead]]));
      }
      const std::uint32_t i = missed[m];
      if (found[i] || (run.regions != nullptr && run.regions[begin + i] != target)) continue;
      ids.push_back(batch[i]);
      samples.push_back({nullptr, static_cast<std::uint64_t>(run.length_of(batch[i]))});
      if (run.keys != nullptr) keys.push_back(run.keys[begin + i]);
    }
    if (ids.empty()) continue;
    if (run.regions != nullptr) placing.region = target;
    if (run.keys != nullptr) placing.keys = keys.data();
    put(ids, samples.data(), placing, flags.get());
  }
}

void Arena::replay(Ids ids, const Run& run, bool* hits) {
  if (header_->blank == 0) throw ConfigError("only a blank arena replays: samples have no bytes");
  if (run.at_once == 0) throw ConfigError("at_once=0 is invalid: give batches of 1 or more");
  check(ids);
  std::vector<std::uint32_t> missed;
  for (std::size_t begin = 0; begin < ids.size(); begin += run.at_once) {
    const std::size_t count = std::min(run.at_once, ids.size() - begin);
    const Ids batch = ids.subspan(begin, count);
    bool* found = hits + begin;
    look(batch, found);
    if (run.keys != nullptr && run.after == nullptr) rekey(batch, run.keys + begin, found);
    missed.clear();
    for (std::size_t i = 0; i < count; ++i) {
      if (!found[i]) missed.push_back(static_cast<std::uint32_t>(i));
    }
    put_missed(batch, begin, run, missed, found);
    if (run.after != nullptr) set_keys(batch, run.after + begin);
  }
}

}  // namespace stoker
