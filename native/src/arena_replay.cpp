// Runs of accesses at once, for simulation: the same steps as a store takes, batch by batch.
#include <algorithm>
#include <memory>

#include "stoker/arena.h"
#include "stoker/error.h"
#include "stoker/tables.h"

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
        const std::uint32_t later = batch[missed[m + kAhead]];
        __builtin_prefetch(&run.length_of(later));
        if (run.scores != nullptr) {
          __builtin_prefetch(&run.scores[later]);
          __builtin_prefetch(&run.seen[later]);
        }
      }
      const std::uint32_t i = missed[m];
      if (found[i] || (run.regions != nullptr && run.regions[begin + i] != target)) continue;
      ids.push_back(batch[i]);
      samples.push_back({nullptr, static_cast<std::uint64_t>(run.length_of(batch[i]))});
      if (run.keys != nullptr) keys.push_back(run.keys[begin + i]);
      if (run.scores != nullptr) keys.push_back(score_key(run.scores, run.seen, batch[i]));
    }
    if (ids.empty()) continue;
    if (run.regions != nullptr) placing.region = target;
    if (!keys.empty()) placing.keys = keys.data();
    put(ids, samples.data(), placing, flags.get());
  }
}

// The key sample that stands for this one now, else kNone.
std::uint32_t Arena::stand_in_for(std::uint32_t id, const StandIns& by) const {
  const auto key = static_cast<std::uint32_t>(by.serves[id]);
  const auto copy = static_cast<std::uint32_t>(by.serves[id] >> 32);
  if (copy == 0 || key >= header_->num_ids) return kNone;
  std::uint32_t number = 0;
  copies({&key, 1}, by.region, &number);
  return number == copy ? key : kNone;
}

// Gets stand-ins in place of what was missed; returns the places in the batch that have none.
std::vector<std::uint32_t> Arena::stand_in(Ids batch, const StandIns& by, std::uint32_t* served,
                                           bool* found) {
  std::vector<std::uint32_t> unfound, missed, keys;
  std::copy(batch.begin(), batch.end(), served);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (!found[i]) unfound.push_back(static_cast<std::uint32_t>(i));
  }
  for (std::size_t m = 0; m < unfound.size(); ++m) {
    if (m + 2 * kAhead < unfound.size()) {
      __builtin_prefetch(&by.serves[batch[unfound[m + 2 * kAhead]]]);
    }
    if (m + kAhead < unfound.size()) {
      const auto later = static_cast<std::uint32_t>(by.serves[batch[unfound[m + kAhead]]]);
      if (later < header_->num_ids) __builtin_prefetch(&entries_[later]);
    }
    const std::uint32_t i = unfound[m];
    const std::uint32_t key = stand_in_for(batch[i], by);
    if (key == kNone) {
      missed.push_back(i);
      continue;
    }
    keys.push_back(served[i] = key);
    found[i] = true;
  }
  const std::unique_ptr<bool[]> got(new bool[keys.size()]);
  look(keys, got.get());
  return missed;
}

void Arena::replay_batch(Ids batch, const Run& run, const StandIns& stand_ins,
                         std::uint32_t* served, bool* hits) {
  check_replay(batch);
  if (stand_ins.serves.size() != header_->num_ids) {
    throw ConfigError(std::to_string(stand_ins.serves.size()) + " stand-ins for " +
                      std::to_string(header_->num_ids) + " samples: give one for each");
  }
  look(batch, hits);
  put_missed(batch, 0, run, stand_in(batch, stand_ins, served, hits), hits);
}

void Arena::check_replay(Ids ids) const {
  if (header_->blank == 0) throw ConfigError("only a blank arena replays: samples have no bytes");
  check(ids);
}

void Arena::replay(Ids ids, const Run& run, bool* hits) {
  check_replay(ids);
  if (run.at_once == 0) throw ConfigError("at_once=0 is invalid: give batches of 1 or more");
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
