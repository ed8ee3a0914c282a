// stoker._core.mark_once, unmark and take_turns: translate arrays to spans, decide nothing; and
// fences.
#include "stoker/marks.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Marks = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Displaced = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_marks(nb::module_& m) {
  m.def(
      "mark_once",
      [](const Marks& marks, const IdArray& ids, std::uint32_t stamp) {
        auto* first = new bool[ids.size()];
        const nb::capsule owner(first,
                                [](void* flags) noexcept { delete[] static_cast<bool*>(flags); });
        stoker::mark_once({marks.data(), marks.size()}, {ids.data(), ids.size()}, stamp, first);
        return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(first, {ids.size()}, owner);
      },
      "marks"_a.noconvert(), "ids"_a, "stamp"_a);
  m.def(
      "unmark",
      [](const Marks& marks, const IdArray& ids, std::uint32_t stamp) {
        stoker::unmark({marks.data(), marks.size()}, {ids.data(), ids.size()}, stamp);
      },
      "marks"_a.noconvert(), "ids"_a, "stamp"_a);
  m.def(
      "find_marked",
      [](const Marks& marks, const Flags& wanted, const IdArray& ids, std::uint32_t stamp) {
        const auto found =
            stoker::find_marked({marks.data(), marks.size()}, {wanted.data(), wanted.size()},
                                {ids.data(), ids.size()}, stamp);
        auto* rows = new std::int64_t[found.size()];
        std::copy(found.begin(), found.end(), rows);
        const nb::capsule owner(
            rows, [](void* memory) noexcept { delete[] static_cast<std::int64_t*>(memory); });
        return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>(rows, {found.size()}, owner);
      },
      "marks"_a.noconvert(), "wanted"_a, "ids"_a, "stamp"_a);
  m.def(
      "take_turns",
      [](const Marks& marks, const Displaced& displaced, const IdArray& ids, std::uint32_t stamp) {
        auto* turns = new std::uint32_t[ids.size()];
        const nb::capsule turns_owner(
            turns, [](void* memory) noexcept { delete[] static_cast<std::uint32_t*>(memory); });
        auto* told = new bool[ids.size()];
        const nb::capsule told_owner(
            told, [](void* memory) noexcept { delete[] static_cast<bool*>(memory); });
        stoker::take_turns({marks.data(), marks.size()}, {displaced.data(), displaced.size()},
                           {ids.data(), ids.size()}, stamp, stoker::kLongestChain, turns, told);
        using Turns = nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>;
        using Told = nb::ndarray<nb::numpy, bool, nb::ndim<1>>;
        return nb::make_tuple(Turns(turns, {ids.size()}, turns_owner),
                              Told(told, {ids.size()}, told_owner));
      },
      "marks"_a.noconvert(), "displaced"_a.noconvert(), "ids"_a, "stamp"_a);
  // A thread that sees what is stored after a release fence, and passes an acquire fence before
  // looking further, sees all that was stored before. Python has no such fence.
  m.def("release_fence", [] { std::atomic_thread_fence(std::memory_order_release); });
  m.def("acquire_fence", [] { std::atomic_thread_fence(std::memory_order_acquire); });
}
