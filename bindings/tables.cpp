// stoker._core.count, write_scores, score_keys, next_use and spread: translate arrays, decide
// nothing.
#include "stoker/tables.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "gil.h"
#include "stoker/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<T> span(const Array<T>& array) {
  return {array.data(), array.size()};
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> own(T* memory, std::size_t count) {
  const nb::capsule owner(memory, [](void* block) noexcept { delete[] static_cast<T*>(block); });
  return {memory, {count}, owner};
}

void check_lengths(std::size_t given, std::size_t wanted) {
  if (given != wanted) {
    throw stoker::ConfigError("arrays of " + std::to_string(given) + " and " +
                              std::to_string(wanted) + " elements: give equal lengths");
  }
}

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
      "write_scores",
      [](const Array<double>& values, const Array<std::int32_t>& last,
         const Array<std::int32_t>& seen, const Array<const std::uint32_t>& ids,
         const Array<const double>& given, std::int32_t step) {
        check_lengths(last.size(), values.size());
        check_lengths(seen.size(), values.size());
        check_lengths(given.size(), ids.size());
        stoker::write_scores({span(values), span(last), span(seen)}, span(ids), span(given), step);
      },
      "values"_a.noconvert(), "last"_a.noconvert(), "seen"_a.noconvert(), "ids"_a, "given"_a,
      "step"_a);
  m.def(
      "score_keys",
      [](const Array<const double>& values, const Array<const std::int32_t>& seen,
         const Array<const std::uint32_t>& ids) {
        check_lengths(seen.size(), values.size());
        auto* keys = new double[ids.size()];
        auto out = own(keys, ids.size());
        stoker::score_keys(span(values), span(seen), span(ids), keys);
        return out;
      },
      "values"_a, "seen"_a, "ids"_a);
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
      "spread",
      [](const Array<const std::uint32_t>& counts, const Array<const double>& phases,
         std::size_t visits) {
        auto* ids = new std::uint32_t[visits];
        auto out = own(ids, visits);
        const GilReleased released;
        stoker::spread(span(counts), span(phases), {ids, visits});
        return out;
      },
      "counts"_a, "phases"_a, "visits"_a);
}
