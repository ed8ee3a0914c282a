// Runs of accesses for which other samples may stand in, each once an epoch, for simulation: the
// steps of a store with stoker.store.substitutes.OnceEach, batch by batch.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "stoker/arena.h"
#include "stoker/error.h"
#include "stoker/marks.h"
#include "stoker/tables.h"

namespace stoker {
namespace {

constexpr std::size_t kAhead = 16;  // marks looked up before they are needed

// Writes those of `rows` for which `is_meant` to `chosen`, and the others to `rest`. Without a
// branch, as no processor could predict it.
template <typename Which>
void split(Arena::Ids rows, Which is_meant, std::vector<std::uint32_t>& chosen,
           std::vector<std::uint32_t>& rest) {
  chosen.resize(rows.size());
  rest.resize(rows.size());
  std::size_t num_chosen = 0, num_rest = 0;
  for (const std::uint32_t row : rows) {
    const bool is_chosen = is_meant(row);
    chosen[num_chosen] = rest[num_rest] = row;
    num_chosen += static_cast<std::size_t>(is_chosen);
    num_rest += static_cast<std::size_t>(!is_chosen);
  }
  chosen.resize(num_chosen);
  rest.resize(num_rest);
}

}  // namespace

// What is served for one batch after the other, and how: decided by marks, looked up by `look`.
class Arena::Chooser {
 public:
  Chooser(Arena& arena, const Run& run, OnceEach& once)
      : arena_(arena),
        once_(once),
        entrance_(run.entrance),
        flags_(new bool[run.at_once]),
        missing_(new bool[run.at_once]),
        places_(new std::uint8_t[run.at_once]),
        every_row_(run.at_once) {
    std::iota(every_row_.begin(), every_row_.end(), 0u);
  }

  Ids batch;                            // what is asked for
  std::uint32_t* served;                // what is served
  std::vector<std::uint32_t> open;      // rows that ask for what takes part; so does, then, what is
                                        // served for them
  std::vector<std::uint32_t> to_fetch;  // those of them whose samples are not at hand
  std::vector<std::uint32_t> apart;     // and of the other rows

  void begin(Ids asked, std::uint32_t* chosen) {
    batch = asked;
    served = chosen;
    std::copy(batch.begin(), batch.end(), served);
    if (once_.places == nullptr) {
      std::fill_n(places_.get(), batch.size(), once_.place);
      return;
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (i + kAhead < batch.size()) __builtin_prefetch(&once_.places[batch[i + kAhead]]);
      places_[i] = once_.places[batch[i]];
    }
  }

  // The region of what a row asks for.
  std::uint8_t place(std::size_t row) const { return places_[row]; }

  // The region of what takes part.
  std::uint32_t entrance() const { return once_.places == nullptr ? entrance_ : once_.place; }

  // `begun`: accesses of the run up to the end of this batch.
  void choose(std::size_t begun) {
    arena_.look(batch, flags_.get());
    for (std::size_t i = 0; i < batch.size(); ++i) missing_[i] = !flags_[i];
    const Ids rows = Ids{every_row_}.first(batch.size());
    split(rows, [this](std::uint32_t row) { return places_[row] == once_.place; }, open, rows_);
    const auto is_missing = [this](std::uint32_t row) { return missing_[row]; };
    split(rows_, is_missing, apart, rest_);
    // Another sample is wanted for those that were served already, then for those not cached.
    split(open, is_missing, to_fetch, rest_);
    wanted_.clear();
    mark(rest_, wanted_);
    wanted_.insert(wanted_.end(), to_fetch.begin(), to_fetch.end());
    const std::size_t taken = substitute(begun);
    take_turns(std::vector<std::uint32_t>(wanted_.begin() + static_cast<std::ptrdiff_t>(taken),
                                          wanted_.end()));
    split(open, is_missing, to_fetch, rest_);
  }

 private:
  bool takes_part(std::uint32_t id) const {
    return once_.places == nullptr || once_.places[id] == once_.place;
  }

  void note_turn(std::uint32_t id, std::uint32_t turn) { once_.turns[id] = turn; }

  // What mark_once() does, without a locked instruction: a blank arena is one thread's.
  bool mark(std::uint32_t id) {
    if (once_.served[id] >= once_.stamp) return false;
    once_.served[id] = once_.stamp;
    return true;
  }

  // Marks `rows` as served on their own turns; those that were served before are added to `late`.
  void mark(const std::vector<std::uint32_t>& rows, std::vector<std::uint32_t>& late) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (i + kAhead < rows.size()) {
        __builtin_prefetch(&once_.served[batch[rows[i + kAhead]]], 1);
        __builtin_prefetch(&once_.turns[batch[rows[i + kAhead]]], 1);
      }
      const std::uint32_t id = batch[rows[i]];
      if (mark(id)) {
        note_turn(id, id);
      } else {
        late.push_back(rows[i]);
      }
    }
  }

  // Gives the first wanted rows what stands in for them; returns how many.
  std::size_t substitute(std::size_t begun) {
    std::size_t done = 0;
    while (done < wanted_.size()) {
      if (once_.candidates.empty()) once_.candidates = once_.search(begun);
      if (once_.candidates.empty()) break;
      const std::size_t count = std::min(wanted_.size() - done, once_.candidates.size());
      arena_.check(once_.candidates.first(count));
      list_free(once_.candidates.first(count));
      once_.candidates = once_.candidates.subspan(count);
      for (const std::uint32_t id : ids_) {
        __builtin_prefetch(&once_.turns[id], 1);
      }
      for (const std::uint32_t id : ids_) {
        served[wanted_[done]] = id;
        missing_[wanted_[done]] = false;
        note_turn(id, batch[wanted_[done++]]);
      }
    }
    return done;
  }

  // Those of the candidates that are cached, and that no other batch serves: they are marked.
  void list_free(Ids candidates) {
    const auto keep = [&](const auto& which) {
      std::size_t kept = 0;
      for (std::size_t i = 0; i < ids_.size(); ++i) {
        if (which(i)) ids_[kept++] = ids_[i];
      }
      ids_.resize(kept);
    };
    ids_.assign(candidates.begin(), candidates.end());
    keep([&](std::size_t i) {
      if (i + kAhead < ids_.size()) __builtin_prefetch(&once_.served[ids_[i + kAhead]]);
      return once_.served[ids_[i]] < once_.stamp && takes_part(ids_[i]);
    });
    arena_.look(ids_, flags_.get());
    keep([&](std::size_t i) { return flags_[i] && mark(ids_[i]); });
  }

  // Serves the rows themselves, or whom they displaced where they were served already.
  void take_turns(const std::vector<std::uint32_t>& rows) {
    rows_.clear();
    mark(rows, rows_);
    for (const std::uint32_t row : rows_) {
      served[row] = whose_turn(batch[row]);
      if (served[row] != batch[row]) missing_[row] = true;
    }
  }

  // What stoker::take_turns() does: of those that displaced one another the last, if it had no
  // turn.
  std::uint32_t whose_turn(std::uint32_t id) {
    std::uint32_t last = id;
    for (std::uint32_t link = 0; link < kLongestChain; ++link) {
      const std::uint32_t next = once_.turns[last];
      if (next == last) break;
      last = next;
      if (!mark(last)) continue;
      note_turn(last, last);
      return last;
    }
    return id;
  }

  Arena& arena_;
  OnceEach& once_;
  std::uint32_t entrance_;
  std::unique_ptr<bool[]> flags_, missing_;
  std::unique_ptr<std::uint8_t[]> places_;  // of what each row asks for
  std::vector<std::uint32_t> every_row_, wanted_, rows_, rest_, ids_;
};

// Reads what is not at hand and puts it, region by region. `keys` are those of what is asked for,
// of others none is known.
void Arena::fetch(const Chooser& chosen, const Run& run, const double* keys, How* how) {
  for (std::uint32_t target = 0; target < header_->num_regions; ++target) {
    if (target == chosen.entrance()) fetch_open(chosen, run, keys, how);
    if (!chosen.apart.empty()) fetch_apart(chosen, run, keys, target, how);
  }
}

// What takes part: read once where it is asked for twice.
void Arena::fetch_open(const Chooser& chosen, const Run& run, const double* keys, How* how) {
  const std::vector<std::uint32_t>& rows = chosen.to_fetch;
  std::vector<std::uint32_t> ids, others;
  for (const std::uint32_t row : rows) ids.push_back(chosen.served[row]);
  const std::unique_ptr<bool[]> flags(new bool[ids.size()]);
  claim(ids, flags.get());
  ids.clear();
  std::vector<Sample> samples;
  std::vector<double> own_keys;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint32_t id = chosen.served[rows[i]];
    how[rows[i]] = flags[i] ? How::kFetched : How::kHit;
    if (!flags[i]) {
      const auto word = entries_[id].word.load(std::memory_order_relaxed);
      if (state_of(word) == State::kReady) others.push_back(id);
      continue;
    }
    ids.push_back(id);
    samples.push_back({nullptr, static_cast<std::uint64_t>(run.length_of(id))});
    if (keys == nullptr) continue;
    const bool is_asked = id == chosen.batch[rows[i]];
    own_keys.push_back(is_asked ? keys[rows[i]] : -std::numeric_limits<double>::infinity());
  }
  const Placing placing{chosen.entrance(), run.overflow,
                        keys == nullptr ? nullptr : own_keys.data()};
  if (!ids.empty()) put(ids, samples.data(), placing, flags.get());
  look(others, flags.get());
}

// What does not take part, and so comes once: it needs no claim.
void Arena::fetch_apart(const Chooser& chosen, const Run& run, const double* keys,
                        std::uint32_t target, How* how) {
  std::vector<std::uint32_t> ids;
  std::vector<Sample> samples;
  std::vector<double> own_keys;
  for (const std::uint32_t row : chosen.apart) {
    if (chosen.place(row) != target) continue;
    const std::uint32_t id = chosen.batch[row];
    ids.push_back(id);
    samples.push_back({nullptr, static_cast<std::uint64_t>(run.length_of(id))});
    if (keys != nullptr) own_keys.push_back(keys[row]);
    how[row] = How::kFetched;
  }
  const double* const of_ids = keys == nullptr ? nullptr : own_keys.data();
  if (!ids.empty()) put_unclaimed(ids, samples.data(), {target, run.overflow, of_ids});
}

// What was fetched has a copy of its own from now on; what was served makes room for packages. Only
// samples that take part come with packages.
void Arena::note_packaged(const Chooser& chosen, const Run& run, OnceEach& once, How* how) {
  for (const std::uint32_t row : chosen.open) {
    if (how[row] == How::kFetched) once.packaged[chosen.served[row]] = 0;
  }
  for (const std::uint32_t row : chosen.open) {
    // What was fetched made no room: it takes up its own, or is not there.
    if (how[row] == How::kFetched) continue;
    const std::uint32_t id = chosen.served[row];
    if (how[row] == How::kHit && once.packaged[id] == 1) how[row] = How::kPackaged;
    once.room -= run.length_of(id);
    once.gone.push_back(id);
  }
}

void Arena::check_keys(const Run& run, const OnceEach& once) const {
  if ((run.keys == nullptr) != (run.after == nullptr)) {
    throw ConfigError("give keys before and after the accesses, or neither");
  }
  const auto has_keys = [this](std::uint32_t region) {
    return region < header_->num_regions && header_->regions[region].order == Order::kKey;
  };
  const std::uint32_t own = once.places == nullptr ? run.entrance : once.place;
  if (run.keys != nullptr && (has_keys(own) || has_keys(run.overflow))) {
    throw ConfigError("what stands in for others may have no keys: give its region another order");
  }
}

void Arena::replay_once_each(Ids ids, const Run& run, OnceEach& once, std::uint32_t* served,
                             How* how) {
  check_replay(ids);
  if (run.at_once == 0) throw ConfigError("at_once=0 is invalid: give batches of 1 or more");
  if (once.stamp == 0) throw ConfigError("stamp=0 is invalid, it means no mark: count from 1");
  check_keys(run, once);
  Chooser chosen(*this, run, once);
  const std::unique_ptr<bool[]> is_own(new bool[run.at_once]);
  for (std::size_t begin = 0; begin < ids.size(); begin += run.at_once) {
    const std::size_t count = std::min(run.at_once, ids.size() - begin);
    const Ids batch = ids.subspan(begin, count);
    std::fill_n(how + begin, count, How::kHit);
    chosen.begin(batch, served + begin);
    chosen.choose(begin + count);
    fetch(chosen, run, run.keys == nullptr ? nullptr : run.keys + begin, how + begin);
    for (const std::uint32_t row : chosen.open) {
      How& so = how[begin + row];
      if (so == How::kHit && served[begin + row] != batch[row]) so = How::kSubstituted;
    }
    if (once.make_room) note_packaged(chosen, run, once, how + begin);
    if (once.make_room && once.room <= 0) {
      once.room = once.make_room(once.gone);
      once.gone.clear();
    }
    if (run.after == nullptr) continue;
    // What stood in for others has no key.
    for (std::size_t i = 0; i < count; ++i) is_own[i] = served[begin + i] == batch[i];
    rekey(batch, run.after + begin, is_own.get());
  }
}

}  // namespace stoker
