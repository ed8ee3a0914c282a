// stoker._core.count, count_kinds, write, find_first, look_up, write_scores, score_keys, median,
// least_of_largest, distinct, count_below, count_up_to, next_use and first_use: translate arrays,
// decide nothing.
#include "stoker/tables.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Lets other threads run during a call for as many ids as take long enough to be worth it.
class Released {
 public:
  explicit Released(std::size_t num_ids) {
    if (num_ids >= kMany) released_.emplace();
  }

 private:
  static constexpr std::size_t kMany = 4096;
  std::optional<GilReleased> released_;
};

}  // namespace

void bind_tables(nb::module_& m) {
  m.def(
      "count",
      [](const Array<std::int32_t>& counts, const Array<const std::uint32_t>& ids) {
        const GilReleased released;
        stoker::count(span(counts), span(ids));
      },
      "counts"_a.noconvert(), "ids"_a);
  m.def(
      "count_kinds",
      [](const Array<const std::uint8_t>& kinds, const Array<const std::uint32_t>& ids) {
        stoker::Kinds counts{};
        {
          const GilReleased released;
          stoker::count_kinds(span(kinds), span(ids), counts);
        }
        return std::vector<std::int64_t>(counts.begin(), counts.end());
      },
      "kinds"_a, "ids"_a);
  m.def(
      "write",
      [](const Array<std::uint32_t>& table, const Array<const std::uint32_t>& ids,
         std::uint32_t value) {
        const Released released(ids.size());
        stoker::write(span(table), span(ids), value);
      },
      "table"_a.noconvert(), "ids"_a, "value"_a);
  m.def(
      "write",
      [](const Array<std::uint8_t>& table, const Array<const std::uint32_t>& ids,
         std::uint8_t value) {
        const Released released(ids.size());
        stoker::write(span(table), span(ids), value);
      },
      "table"_a.noconvert(), "ids"_a, "value"_a);
  m.def(
      "find_first",
      [](const Array<const std::uint32_t>& table, std::uint32_t value,
         const Array<const bool>& wanted,
         const Array<const std::uint32_t>& ids) -> std::optional<std::size_t> {
        const std::size_t first = stoker::find_first(span(table), value, span(wanted), span(ids));
        return first < ids.size() ? std::optional(first) : std::nullopt;
      },
      "table"_a.noconvert(), "value"_a, "wanted"_a.noconvert(), "ids"_a);
  m.def(
      "look_up",
      [](const Array<const std::uint32_t>& table, const Array<const std::uint32_t>& ids) {
        auto* found = new std::uint32_t[ids.size()];
        auto out = own(found, ids.size());
        const Released released(ids.size());
        stoker::look_up(span(table), span(ids), found);
        return out;
      },
      "table"_a.noconvert(), "ids"_a);
  m.def(
      "write_scores",
      [](const Array<double>& values, const Array<std::int32_t>& last,
         const Array<std::int32_t>& seen, const Array<const std::uint32_t>& ids,
         const Array<const double>& given, const Array<const std::int32_t>& steps) {
        check_lengths(last.size(), values.size());
        check_lengths(seen.size(), values.size());
        check_lengths(given.size(), ids.size());
        if (steps.size() != 1) check_lengths(steps.size(), ids.size());
        const Released released(ids.size());
        stoker::write_scores({span(values), span(last), span(seen)}, span(ids), span(given),
                             span(steps));
      },
      "values"_a.noconvert(), "last"_a.noconvert(), "seen"_a.noconvert(), "ids"_a, "given"_a,
      "steps"_a);
  m.def(
      "score_keys",
      [](const Array<const double>& values, const Array<const std::int32_t>& seen,
         const Array<const std::uint32_t>& ids) {
        check_lengths(seen.size(), values.size());
        auto* keys = new double[ids.size()];
        auto out = own(keys, ids.size());
        const Released released(ids.size());
        stoker::score_keys(span(values), span(seen), span(ids), keys);
        return out;
      },
      "values"_a, "seen"_a, "ids"_a);
  m.def(
      "median",
      [](const Array<const double>& values, const Array<const std::int32_t>& seen) {
        check_lengths(seen.size(), values.size());
        const GilReleased released;
        return stoker::median(span(values), span(seen));
      },
      "values"_a, "seen"_a);
  m.def(
      "least_of_largest",
      [](const Array<const double>& values, const Array<const bool>& chosen, std::size_t count) {
        check_lengths(chosen.size(), values.size());
        const GilReleased released;
        const stoker::Floor floor = stoker::least_of_largest(span(values), span(chosen), count);
        return std::pair(floor.least, floor.above);
      },
      "values"_a, "chosen"_a, "count"_a);
  m.def(
      "distinct",
      [](const Array<const std::uint32_t>& ids) {
        std::unique_ptr<std::uint32_t[]> found(new std::uint32_t[ids.size()]);
        const std::size_t count = stoker::distinct(span(ids), {found.get(), ids.size()});
        return own(found.release(), count);
      },
      "ids"_a);
  m.def(
      "count_below",
      [](const Array<const double>& values) {
        auto* below = new std::int64_t[values.size()];
        auto out = own(below, values.size());
        stoker::count_below(span(values), below);
        return out;
      },
      "values"_a);
  m.def(
      "count_up_to",
      [](const Array<const double>& values, const Array<std::uint32_t>& order,
         const Array<std::uint32_t>& counts) {
        check_lengths(order.size(), values.size());
        if (counts.size() != 0) check_lengths(counts.size(), values.size());
        const GilReleased released;
        stoker::count_up_to(span(values), span(order), span(counts));
      },
      "values"_a, "order"_a.noconvert(), "counts"_a.noconvert());
  m.def(
      "next_use",
      [](const Array<const std::uint32_t>& own, const Array<const std::uint32_t>& later,
         const Array<std::int64_t>& next) {
        check_lengths(next.size(), own.size());
        const GilReleased released;
        stoker::next_use(span(own), span(later), next.data());
      },
      "own"_a, "later"_a, "next"_a.noconvert());
  m.def(
      "first_use",
      [](const Array<const std::uint32_t>& ids, const Array<std::int64_t>& first) {
        const GilReleased released;
        stoker::first_use(span(ids), span(first));
      },
      "ids"_a, "first"_a.noconvert());
}
