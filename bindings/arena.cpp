// stoker._core.Arena: translates arrays to spans, releases the GIL, decides nothing.
#include "stoker/arena.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.h"
#include "handed.h"
#include "once_each.h"
#include "region_spec.h"
#include "rooms.h"
#include "stoker/error.h"
#include "stoker/futex.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using IdArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeyArray = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SeenArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RegionArray = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FlagArray = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using StandInArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OffsetArray = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

stoker::Arena::Ids span(const IdArray& ids) { return {ids.data(), ids.size()}; }

// Bytes-like objects held while the GIL is released.
class Views {
 public:
  explicit Views(nb::sequence samples) : Views() {  // whole by now: a throw below releases
    const std::size_t count = nb::len(samples);
    views_.reserve(count);
    samples_.reserve(count);
    for (nb::handle sample : samples) {
      Py_buffer view;
      if (PyObject_GetBuffer(sample.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
      views_.push_back(view);
      samples_.push_back({view.buf, static_cast<std::uint64_t>(view.len)});
    }
  }
  ~Views() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  const std::vector<stoker::Sample>& samples() const { return samples_; }

 private:
  Views() = default;
  std::vector<Py_buffer> views_;
  std::vector<stoker::Sample> samples_;
};

// Keeps the arena alive for threads that are inside a call while another one closes it. The GIL
// guards the pointer, so that a fork finds it whole.
class PyArena {
 public:
  explicit PyArena(std::shared_ptr<stoker::Arena> arena) : arena_(std::move(arena)) {}

  std::shared_ptr<stoker::Arena> open() const {
    std::shared_ptr<stoker::Arena> arena = arena_;
    if (!arena) throw stoker::SegmentError("the arena is closed: create or attach another one");
    return arena;
  }
  void close() {
    std::shared_ptr<stoker::Arena> arena;
    arena.swap(arena_);
    const GilReleased released;
    arena.reset();
  }
  bool closed() const { return !arena_; }
  const std::shared_ptr<Spares>& spares() const { return spares_; }

 private:
  std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
  std::shared_ptr<stoker::Arena> arena_;
};

// Runs a call on the open arena without the GIL.
template <typename Call>
auto unlocked(const PyArena& self, Call call) {
  const auto arena = self.open();
  const GilReleased released;
  return call(*arena);
}

// Runs a call that fills one bool an id, without the GIL.
template <typename Call>
Array1<bool> flags(const IdArray& ids, Call call) {
  Buffer<bool> out(ids.size());
  {
    const GilReleased released;
    call(out.get());
  }
  return out.array();
}

Array1<bool> put(const PyArena& self, const IdArray& ids,
                 const std::vector<stoker::Sample>& samples, const std::optional<KeyArray>& keys,
                 const std::string& region, const std::string& overflow,
                 stoker::Evicted* evicted = nullptr) {
  const auto arena = self.open();
  const auto check = [&](std::size_t count, const char* what) {
    if (count == ids.size()) return;
    throw stoker::ConfigError(std::to_string(count) + what + std::to_string(ids.size()) +
                              " ids: give one for each");
  };
  check(samples.size(), " samples for ");
  if (keys) check(keys->size(), " keys for ");
  stoker::Arena::Placing placing{arena->region(region)};
  if (!overflow.empty()) placing.overflow = arena->region(overflow);
  if (keys) placing.keys = keys->data();
  placing.evicted = evicted;
  return flags(ids,
               [&](bool* admitted) { arena->put(span(ids), samples.data(), placing, admitted); });
}

PyRooms reserve(const PyArena& self, const IdArray& ids, const OffsetArray& sizes,
                const std::optional<KeyArray>& keys, const std::string& region,
                const std::string& overflow) {
  const auto arena = self.open();
  if (sizes.size() != ids.size() || (keys && keys->size() != ids.size())) {
    throw stoker::ConfigError("give one size and one key for each id");
  }
  stoker::Arena::Placing placing{arena->region(region)};
  if (!overflow.empty()) placing.overflow = arena->region(overflow);
  if (keys) placing.keys = keys->data();
  std::vector<std::uint64_t> bytes(sizes.data(), sizes.data() + sizes.size());
  const GilReleased released;
  return {std::make_shared<stoker::Rooms>(arena, span(ids), std::move(bytes), placing)};
}

Array1<bool> settle(const PyRooms& self, const FlagArray& whole) {
  if (whole.size() != self.rooms->count()) throw stoker::ConfigError("give one flag for each room");
  Buffer<bool> there(whole.size());
  {
    const GilReleased released;
    self.rooms->settle(whole.data(), there.get());
  }
  return there.array();
}

bool fill(const PyRooms& self, std::size_t index, const ByteArray& bytes) {
  if (index >= self.rooms->count()) throw stoker::ConfigError("there is no such room");
  const GilReleased released;
  return self.rooms->fill(index, {bytes.data(), bytes.size()});
}

void check_keys(const KeyArray& keys, const IdArray& ids) {
  if (keys.size() == ids.size()) return;
  throw stoker::ConfigError(std::to_string(keys.size()) + " keys for " +
                            std::to_string(ids.size()) + " ids: give one for each");
}

void check_lengths(const stoker::Arena& arena, const OffsetArray& lengths) {
  if (lengths.size() == arena.header().num_ids || lengths.size() == 1) return;
  throw stoker::ConfigError(std::to_string(lengths.size()) + " lengths for " +
                            std::to_string(arena.header().num_ids) +
                            " ids: give one for each, or one for all");
}

// Samples of a blank arena: lengths by id or one for all, and no bytes.
std::vector<stoker::Sample> measured(const PyArena& self, const IdArray& ids,
                                     const OffsetArray& lengths) {
  check_lengths(*self.open(), lengths);
  std::vector<stoker::Sample> samples(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint32_t id = lengths.size() == 1 ? 0 : ids.data()[i];
    if (id < lengths.size()) {  // else the put rejects it
      samples[i] = {nullptr, static_cast<std::uint64_t>(lengths.data()[id])};
    }
  }
  return samples;
}

std::vector<stoker::Sample> unpack(const IdArray& ids, const ByteArray& data,
                                   const OffsetArray& offsets) {
  if (offsets.size() != ids.size() + 1) {
    throw stoker::ConfigError(std::to_string(offsets.size()) + " offsets for " +
                              std::to_string(ids.size()) + " ids: give one more than ids");
  }
  std::vector<stoker::Sample> samples(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t from = offsets.data()[i];
    const std::int64_t to = offsets.data()[i + 1];
    if (from < 0 || to < from || static_cast<std::uint64_t>(to) > data.size()) {
      throw stoker::ConfigError("offsets " + std::to_string(from) + " to " + std::to_string(to) +
                                " do not lie in the " + std::to_string(data.size()) +
                                " bytes of data");
    }
    samples[i] = {data.data() + from, static_cast<std::uint64_t>(to - from)};
  }
  return samples;
}

template <typename T>
Array1<T> copy_of(const std::vector<T>& values) {
  Buffer<T> buffer(values.size());
  std::copy(values.begin(), values.end(), buffer.get());
  return buffer.array();
}

nb::tuple exchange(const PyArena& self, const IdArray& ids, const ByteArray& data,
                   const OffsetArray& offsets, const std::optional<KeyArray>& keys,
                   const std::string& region, const std::string& overflow) {
  stoker::Evicted evicted;
  const auto admitted =
      put(self, ids, unpack(ids, data, offsets), keys, region, overflow, &evicted);
  return nb::make_tuple(admitted, copy_of(evicted.ids), copy_of(evicted.data),
                        copy_of(evicted.offsets), copy_of(evicted.keys));
}

stoker::Arena::Run run_of(const stoker::Arena& arena, const IdArray& ids,
                          const OffsetArray& lengths, const std::optional<KeyArray>& keys,
                          const std::optional<RegionArray>& regions, const std::string& entrance,
                          const std::string& overflow) {
  check_lengths(arena, lengths);
  if (keys) check_keys(*keys, ids);
  if (regions && regions->size() != ids.size()) {
    throw stoker::ConfigError(std::to_string(regions->size()) + " regions for " +
                              std::to_string(ids.size()) + " ids: give one for each");
  }
  stoker::Arena::Run run;
  run.lengths = {lengths.data(), lengths.size()};
  run.keys = keys ? keys->data() : nullptr;
  run.regions = regions ? regions->data() : nullptr;
  run.entrance = arena.region(entrance);
  if (!overflow.empty()) run.overflow = arena.region(overflow);
  run.at_once = ids.size();
  return run;
}

Array1<bool> replay(const PyArena& self, const IdArray& ids, const OffsetArray& lengths,
                    const std::optional<KeyArray>& keys, const std::optional<KeyArray>& after,
                    const std::optional<RegionArray>& regions, const std::string& entrance,
                    const std::string& overflow, std::size_t at_once) {
  const auto arena = self.open();
  auto run = run_of(*arena, ids, lengths, keys, regions, entrance, overflow);
  if (after) check_keys(*after, ids);
  run.after = after ? after->data() : nullptr;
  run.at_once = at_once;
  return flags(ids, [&](bool* hits) { arena->replay(span(ids), run, hits); });
}

// Returns what was served and how, the room and who is gone at the end, and how many candidates
// were not used.
nb::tuple replay_once_each(const PyArena& self, const IdArray& ids, const OffsetArray& lengths,
                           const std::optional<KeyArray>& keys,
                           const std::optional<KeyArray>& after, const std::string& entrance,
                           const std::string& overflow, std::size_t at_once,
                           OnceEachArguments& once) {
  const auto arena = self.open();
  auto run = run_of(*arena, ids, lengths, keys, std::nullopt, entrance, overflow);
  if (after) check_keys(*after, ids);
  run.after = after ? after->data() : nullptr;
  run.at_once = at_once;
  if (once.count() < arena->header().num_ids) {
    throw stoker::ConfigError("marks of " + std::to_string(once.count()) +
                              " samples: give one for each that the arena may hold");
  }
  Buffer<std::uint32_t> served(ids.size());
  Buffer<std::int8_t> how(ids.size());
  {
    const GilReleased released;
    arena->replay_once_each(span(ids), run, once.get(), served.get(),
                            reinterpret_cast<stoker::Arena::How*>(how.get()));
  }
  return nb::make_tuple(served.array(), how.array(), once.get().room, copy_of(once.get().gone),
                        once.get().candidates.size());
}

nb::tuple replay_batch(const PyArena& self, const IdArray& ids, const OffsetArray& lengths,
                       const std::optional<KeyArray>& keys, const std::optional<KeyArray>& scores,
                       const std::optional<SeenArray>& seen,
                       const std::optional<RegionArray>& regions, const std::string& entrance,
                       const std::string& overflow, const StandInArray& stand_ins,
                       const std::string& key_region) {
  const auto arena = self.open();
  auto run = run_of(*arena, ids, lengths, keys, regions, entrance, overflow);
  const std::size_t all = arena->header().num_ids;
  if (scores && (keys || !seen || scores->size() < all || seen->size() < all)) {
    throw stoker::ConfigError("give keys, or one score and count for each of " +
                              std::to_string(all) + " samples");
  }
  run.scores = scores ? scores->data() : nullptr;
  run.seen = scores ? seen->data() : nullptr;
  const stoker::Arena::StandIns by{{stand_ins.data(), stand_ins.size()}, arena->region(key_region)};
  Buffer<std::uint32_t> served(ids.size());
  const auto hits = flags(
      ids, [&](bool* found) { arena->replay_batch(span(ids), run, by, served.get(), found); });
  return nb::make_tuple(served.array(), hits);
}

// The data is None where it lies in `into`.
nb::tuple get(const PyArena& self, const IdArray& ids,
              const std::optional<Array1<std::uint8_t>>& into) {
  const auto arena = self.open();
  Buffer<std::int64_t> offsets(ids.size() + 1);
  Buffer<bool> found(ids.size());
  const auto spares = self.spares();
  std::uint8_t* data = nullptr;
  std::size_t room = 0, bytes = 0;
  {
    const GilReleased released;
    std::vector<stoker::Arena::Snapshot> snapshots(ids.size());
    bytes = arena->measure(span(ids), snapshots.data());
    if (into && bytes <= into->size()) {
      data = into->data();
    } else if (bytes < kLargeBatch) {
      data = allocate<std::uint8_t>(bytes);
    } else {
      std::tie(data, room) = spares->take(bytes);
    }
    bytes = arena->get(span(ids), snapshots.data(), data, offsets.get(), found.get());
  }
  if (into && data == into->data()) {
    return nb::make_tuple(nb::none(), offsets.array(), found.array());
  }
  auto batch = room == 0 ? own(data, bytes) : lend(spares, data, room, bytes);
  return nb::make_tuple(batch, offsets.array(), found.array());
}

nb::tuple peek(const stoker::View& self, const IdArray& ids) {
  const stoker::Arena& arena = self.arena();
  Buffer<std::int64_t> offsets(ids.size() + 1);
  Buffer<bool> found(ids.size());
  std::optional<Buffer<std::uint8_t>> data;
  {
    const GilReleased released;
    std::vector<stoker::Arena::Snapshot> snapshots(ids.size());
    data.emplace(arena.measure(span(ids), snapshots.data()));
    data->size = arena.peek(span(ids), snapshots.data(), data->get(), offsets.get(), found.get());
  }
  return nb::make_tuple(data->array(), offsets.array(), found.array());
}

Array1<std::int64_t> find_lacking(const PyArena& self, const IdArray& ids, const IdArray& marks,
                                  std::uint32_t stamp) {
  const auto arena = self.open();
  Buffer<std::int64_t> places(ids.size());
  {
    const GilReleased released;
    places.size = arena->find_lacking(span(ids), span(marks), stamp, places.get());
  }
  return places.array();
}

nb::dict dict_of(const stoker::Region& region) {
  nb::dict out;
  out["bytes"] = region.bytes;
  out["budget"] = region.budget;
  out["entries"] = region.size;
  return out;
}

nb::dict stats(const PyArena& self) {
  const auto arena = self.open();
  stoker::Counters counters;
  std::vector<stoker::Region> regions;
  {
    const GilReleased released;
    counters = arena->counters();
    regions = arena->regions();
  }
  const stoker::Header& header = arena->header();
  nb::dict out;
  out["capacity_bytes"] = header.capacity;
  out["limit_bytes"] = header.limit;
  out["memory_bytes"] = arena->memory();
  out["disk_bytes"] = header.on_disk != 0 ? arena->room() : 0;
  out["payload_bytes"] = counters.payload;
  out["overhead_bytes"] = header.total_bytes - std::min(header.total_bytes, header.capacity);
  out["entries"] = counters.entries;
  out["hits"] = counters.hits;
  out["misses"] = counters.misses;
  out["inserts"] = counters.inserts;
  out["evictions"] = counters.evictions;
  out["rejected"] = counters.rejected;
  out["bypassed"] = counters.bypassed;
  out["torn_reads"] = counters.torn;
  out["repairs"] = counters.repairs;
  out["reclaimed"] = counters.reclaimed;
  out["corrupt"] = counters.corrupt;
  out["io_errors"] = counters.io_errors;
  out["block_size"] = header.block_size;
  out["free_blocks"] = counters.free_blocks;
  nb::dict by_name;
  for (const stoker::Region& region : regions) by_name[region.name] = dict_of(region);
  out["regions"] = by_name;
  return out;
}

}  // namespace

void bind_arena(nb::module_& m) {
  using stoker::Arena;
  const auto release = nb::call_guard<GilReleased>();
  m.attr("ABI") = stoker::kAbi;
  m.def(
      "segment_bytes",
      [](std::uint32_t num_ids, std::uint64_t capacity, std::uint64_t mean_size, bool on_disk,
         bool blank, std::uint64_t limit) {
        stoker::Header header{};
        stoker::Segment::plan({num_ids, capacity, mean_size, on_disk, false, 0, blank, limit},
                              header);
        return stoker::memory_of(header, header.reserved_blocks);
      },
      "num_ids"_a, "capacity_bytes"_a, "mean_size"_a, "on_disk"_a, "blank"_a = false,
      "limit_bytes"_a = UINT64_MAX, "Bytes of memory that such an arena takes, payload included.");
  m.def(
      "file_bytes",
      [](std::uint32_t num_ids, std::uint64_t capacity, std::uint64_t mean_size,
         std::uint64_t limit) {
        stoker::Header header{};
        stoker::Segment::plan({num_ids, capacity, mean_size, true, false, 0, false, limit}, header);
        return stoker::end_of(header, header.reserved_blocks);
      },
      "num_ids"_a, "capacity_bytes"_a, "mean_size"_a, "limit_bytes"_a = UINT64_MAX,
      "Bytes of disk that the file of such an arena takes.");
  nb::class_<PyRooms>(m, "Rooms", "Room in an arena for samples on their way.")
      .def("fill", &fill, "index"_a, "bytes"_a,
           "Copy a sample to its room; False where it has none, or is of another size.")
      .def("settle", &settle, "whole"_a,
           "Publish those that are whole, bool[n], and give up the others, once; return bool[n], "
           "True where one is cached now.")
      .def(
          "reserved",
          [](const PyRooms& self) {
            Buffer<bool> reserved(self.rooms->count());
            for (std::size_t i = 0; i < reserved.size; ++i) reserved.get()[i] = self.rooms->has(i);
            return reserved.array();
          },
          "Return bool[n], True where a sample has a room.");
  nb::class_<PyArena>(m, "Arena", "One mapped cache segment; stoker.Arena is its Python interface.")
      .def_static(
          "create",
          [](std::uint32_t num_ids, std::uint64_t capacity, std::uint64_t mean_size,
             const std::string& path, bool exact, std::uint64_t seed, bool blank,
             std::uint64_t limit) {
            const stoker::Geometry geometry{num_ids, capacity, mean_size, !path.empty(),
                                            exact,   seed,     blank,     limit};
            return PyArena(std::make_shared<Arena>(geometry, path));
          },
          "num_ids"_a, "capacity_bytes"_a, "mean_size"_a, "path"_a, "exact"_a, "seed"_a,
          "blank"_a = false, "limit"_a = UINT64_MAX, release)
      .def_static(
          "attach",
          [](int memory, int file) { return PyArena(std::make_shared<Arena>(memory, file)); },
          "memory"_a, "file"_a, release)
      .def("close", &PyArena::close)
      .def_prop_ro("closed", &PyArena::closed)
      .def_prop_ro("descriptors",
                   [](const PyArena& self) {
                     const auto arena = self.open();
                     return nb::make_tuple(arena->memory_descriptor(), arena->file_descriptor());
                   })
      .def_prop_ro("num_ids", [](const PyArena& self) { return self.open()->header().num_ids; })
      .def_prop_ro("capacity_bytes",
                   [](const PyArena& self) { return self.open()->header().capacity; })
      .def_prop_ro("mean_size", [](const PyArena& self) { return self.open()->header().mean_size; })
      .def_prop_ro("io_errors", [](const PyArena& self) { return self.open()->io_errors(); })
      .def_prop_ro("total_bytes",
                   [](const PyArena& self) { return self.open()->header().total_bytes; })
      .def_prop_ro("memory_bytes", [](const PyArena& self) { return self.open()->memory(); })
      .def_prop_ro("disk_bytes",
                   [](const PyArena& self) {
                     const auto arena = self.open();
                     return arena->header().on_disk != 0 ? arena->room() : 0;
                   })
      .def_prop_ro("limit_bytes", [](const PyArena& self) { return self.open()->header().limit; })
      .def(
          "limit",
          [](const PyArena& self, std::uint64_t bytes, double seconds) {
            return unlocked(self, [&](Arena& arena) {
              return arena.limit(bytes,
                                 stoker::monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9));
            });
          },
          "bytes"_a, "seconds"_a)
      .def(
          "put",
          [](const PyArena& self, const IdArray& ids, nb::sequence samples,
             std::optional<KeyArray> keys, const std::string& region, const std::string& overflow) {
            const Views views(samples);
            return put(self, ids, views.samples(), keys, region, overflow);
          },
          "ids"_a, "samples"_a, "keys"_a.none(), "region"_a, "overflow"_a)
      .def(
          "put_packed",
          [](const PyArena& self, const IdArray& ids, const ByteArray& data,
             const OffsetArray& offsets, std::optional<KeyArray> keys, const std::string& region,
             const std::string& overflow) {
            return put(self, ids, unpack(ids, data, offsets), keys, region, overflow);
          },
          "ids"_a, "data"_a, "offsets"_a, "keys"_a.none(), "region"_a, "overflow"_a)
      .def(
          "put_lengths",
          [](const PyArena& self, const IdArray& ids, const OffsetArray& lengths,
             std::optional<KeyArray> keys, const std::string& region, const std::string& overflow) {
            return put(self, ids, measured(self, ids, lengths), keys, region, overflow);
          },
          "ids"_a, "lengths"_a, "keys"_a.none(), "region"_a, "overflow"_a)
      .def("reserve", &reserve, "ids"_a, "sizes"_a, "keys"_a.none(), "region"_a, "overflow"_a)
      .def("replay", &replay, "ids"_a, "lengths"_a, "keys"_a.none(), "after"_a.none(),
           "regions"_a.none(), "entrance"_a, "overflow"_a, "at_once"_a)
      .def(
          "replay_once_each",
          [](const PyArena& self, const IdArray& ids, const OffsetArray& lengths,
             const std::optional<KeyArray>& keys, const std::optional<KeyArray>& after,
             const std::string& entrance, const std::string& overflow, std::size_t at_once,
             const ById<std::uint32_t>& served, const ById<std::uint32_t>& turns,
             std::uint32_t stamp, const OnceEachArguments::Places& places, std::uint8_t place,
             const IdArray& candidates, const nb::callable& search,
             const OnceEachArguments::Packaged& packaged, std::int64_t room, const IdArray& gone,
             const nb::object& make_room) {
            OnceEachArguments once(served, turns, stamp, places, place);
            once.search_by(candidates, search);
            once.pack_by(packaged, room, gone, make_room);
            return replay_once_each(self, ids, lengths, keys, after, entrance, overflow, at_once,
                                    once);
          },
          "ids"_a, "lengths"_a, "keys"_a.none(), "after"_a.none(), "entrance"_a, "overflow"_a,
          "at_once"_a, "served"_a.noconvert(), "turns"_a.noconvert(), "stamp"_a,
          "places"_a.noconvert().none(), "place"_a, "candidates"_a, "search"_a,
          "packaged"_a.noconvert().none(), "room"_a, "gone"_a, "make_room"_a.none())
      .def("replay_batch", &replay_batch, "ids"_a, "lengths"_a, "keys"_a.none(),
           "scores"_a.noconvert().none(), "seen"_a.noconvert().none(), "regions"_a.none(),
           "entrance"_a, "overflow"_a, "stand_ins"_a.noconvert(), "key_region"_a)
      .def("exchange", &exchange, "ids"_a, "data"_a, "offsets"_a, "keys"_a.none(), "region"_a,
           "overflow"_a)
      .def("get", &get, "ids"_a, "into"_a.none())
      .def(
          "contains",
          [](const PyArena& self, const IdArray& ids) {
            const auto arena = self.open();
            return flags(ids, [&](bool* found) { arena->contains(span(ids), found); });
          },
          "ids"_a)
      .def("find_lacking", &find_lacking, "ids"_a, "marks"_a.noconvert(), "stamp"_a)
      .def(
          "claim",
          [](const PyArena& self, const IdArray& ids) {
            const auto arena = self.open();
            return flags(ids, [&](bool* claimed) { arena->claim(span(ids), claimed); });
          },
          "ids"_a)
      .def(
          "are_coming",
          [](const PyArena& self, const IdArray& ids) {
            return self.open()->are_coming(span(ids));
          },
          "ids"_a)
      .def(
          "wait",
          [](const PyArena& self, const IdArray& ids, double timeout) {
            const auto arena = self.open();
            const auto bound = static_cast<std::int64_t>(timeout * 1e9);
            return flags(ids, [&](bool* found) { arena->wait(span(ids), bound, found); });
          },
          "ids"_a, "timeout"_a)
      .def(
          "keys",
          [](const PyArena& self, const IdArray& ids) {
            const auto arena = self.open();
            Buffer<double> keys(ids.size());
            arena->keys(span(ids), keys.get());
            return keys.array();
          },
          "ids"_a)
      .def(
          "set_keys",
          [](const PyArena& self, const IdArray& ids, const KeyArray& keys) {
            check_keys(keys, ids);
            unlocked(self, [&](Arena& arena) { arena.set_keys(span(ids), keys.data()); });
          },
          "ids"_a, "keys"_a)
      .def(
          "abandon",
          [](const PyArena& self, const IdArray& ids) {
            unlocked(self, [&](Arena& arena) { arena.abandon(span(ids)); });
          },
          "ids"_a)
      .def(
          "discard",
          [](const PyArena& self, const IdArray& ids) {
            unlocked(self, [&](Arena& arena) { arena.discard(span(ids)); });
          },
          "ids"_a)
      .def(
          "discard_from",
          [](const PyArena& self, const std::string& region, const IdArray& ids) {
            unlocked(self,
                     [&](Arena& arena) { arena.discard_from(arena.region(region), span(ids)); });
          },
          "region"_a, "ids"_a)
      .def(
          "move",
          [](const PyArena& self, const IdArray& ids, const std::string& region,
             std::optional<KeyArray> keys) {
            if (keys) check_keys(*keys, ids);
            const auto arena = self.open();
            const std::uint32_t target = arena->region(region);
            return flags(ids, [&](bool* moved) {
              arena->move(target, span(ids), keys ? keys->data() : nullptr, moved);
            });
          },
          "ids"_a, "region"_a, "keys"_a.none())
      .def(
          "where",
          [](const PyArena& self, const IdArray& ids) {
            const auto arena = self.open();
            Buffer<std::uint8_t> regions(ids.size());
            {
              const GilReleased released;
              arena->where(span(ids), regions.get());
            }
            return regions.array();
          },
          "ids"_a)
      .def(
          "copies",
          [](const PyArena& self, const IdArray& ids, const std::string& region) {
            const auto arena = self.open();
            Buffer<std::uint32_t> numbers(ids.size());
            {
              const GilReleased released;
              arena->copies(span(ids), arena->region(region), numbers.get());
            }
            return numbers.array();
          },
          "ids"_a, "region"_a)
      .def(
          "list",
          [](const PyArena& self, const std::string& region) {
            return copy_of(
                unlocked(self, [&](Arena& arena) { return arena.list(arena.region(region)); }));
          },
          "region"_a)
      .def(
          "lease",
          [](const PyArena& self, const IdArray& ids, std::int64_t position) {
            return unlocked(self, [&](Arena& arena) { return arena.lease(span(ids), position); });
          },
          "ids"_a, "position"_a)
      .def(
          "release",
          [](const PyArena& self, std::int64_t position) {
            unlocked(self, [&](Arena& arena) { arena.release(position); });
          },
          "position"_a)
      .def(
          "configure",
          [](const PyArena& self, nb::sequence regions) {
            std::vector<stoker::RegionSpec> specs;
            for (nb::handle rules : regions)
              specs.push_back(region_spec(nb::cast<nb::dict>(rules)));
            unlocked(self, [&](Arena& arena) { arena.configure(specs); });
          },
          "regions"_a)
      .def(
          "add_region",
          [](const PyArena& self, const nb::dict& rules) {
            const stoker::RegionSpec spec = region_spec(rules);
            unlocked(self, [&](Arena& arena) { arena.add_region(spec); });
          },
          "rules"_a)
      .def(
          "resize_region",
          [](const PyArena& self, const std::string& name, std::uint64_t bytes) {
            unlocked(self, [&](Arena& arena) { arena.resize_region(name, bytes); });
          },
          "name"_a, "bytes"_a)
      .def(
          "divide",
          [](const PyArena& self, const std::vector<std::string>& names,
             const std::vector<double>& shares) {
            unlocked(self, [&](Arena& arena) { arena.divide(names, shares); });
          },
          "names"_a, "shares"_a)
      .def("reclaim",
           [](const PyArena& self) { unlocked(self, [](Arena& arena) { arena.reclaim(); }); })
      .def("verify",
           [](const PyArena& self) { unlocked(self, [](Arena& arena) { arena.verify(); }); })
      .def("stats", &stats)
      .def(
          "region_stats",
          [](const PyArena& self, const std::string& region) {
            return dict_of(unlocked(
                self, [&](Arena& arena) { return arena.regions()[arena.region(region)]; }));
          },
          "region"_a);
  nb::class_<stoker::View>(m, "View", "An arena mapped to be read only; it ends with the object.")
      .def(nb::init<int>(), "memory"_a, release)
      .def_prop_ro("num_ids",
                   [](const stoker::View& self) { return self.arena().header().num_ids; })
      .def("get", &peek, "ids"_a)
      .def(
          "contains",
          [](const stoker::View& self, const IdArray& ids) {
            return flags(ids, [&](bool* found) { self.arena().contains(span(ids), found); });
          },
          "ids"_a);
}
