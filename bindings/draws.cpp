// stoker._core.shuffle, multinomial, draw_along, draw_among, repeat and spread: translate arrays
// and generators, decide nothing.
#include "stoker/draws.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>

#include "arrays.h"
#include "gil.h"
#include "stoker/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Items = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Item>
void shuffle_as(const Items& items, const stoker::Bits& bits, std::size_t since) {
  const GilReleased released;
  stoker::shuffle(std::span(static_cast<Item*>(items.data()), items.size()), bits, since);
}

}  // namespace

void bind_draws(nb::module_& m) {
  m.def(
      "shuffle",
      [](const Items& items, const nb::capsule& generator, std::size_t since) {
        // NumPy's `bitgen_t` begins with what Bits has.
        const auto* bits = static_cast<const stoker::Bits*>(generator.data("BitGenerator"));
        switch (items.itemsize()) {
          case 1:
            return shuffle_as<std::uint8_t>(items, *bits, since);
          case 4:
            return shuffle_as<std::uint32_t>(items, *bits, since);
          case 8:
            return shuffle_as<std::uint64_t>(items, *bits, since);
          default:
            throw stoker::ConfigError("give items of 1, 4 or 8 bytes");
        }
      },
      "items"_a.noconvert(), "generator"_a, "since"_a);
  m.def(
      "multinomial",
      [](std::uint32_t size, const Array<const double>& p, const nb::capsule& generator,
         const Array<std::uint32_t>& counts) {
        const auto* bits = static_cast<const stoker::Bits*>(generator.data("BitGenerator"));
        const GilReleased released;
        return stoker::multinomial(size, span(p), *bits, span(counts));
      },
      "size"_a, "p"_a, "generator"_a, "counts"_a.noconvert());
  m.def(
      "draw_along",
      [](const Array<const std::uint32_t>& order, const Array<const double>& parts, double start,
         const Array<std::uint32_t>& drawn) {
        const GilReleased released;
        stoker::draw_along(span(order), span(parts), start, span(drawn));
      },
      "order"_a, "parts"_a, "start"_a, "drawn"_a.noconvert());
  m.def(
      "draw_among",
      [](const Array<std::uint32_t>& order, const Array<const double>& shares, double start,
         std::size_t count) {
        const GilReleased released;
        stoker::draw_among(span(order), span(shares), start, count);
      },
      "order"_a.noconvert(), "shares"_a, "start"_a, "count"_a);
  m.def(
      "repeat",
      [](const Array<const std::uint32_t>& counts, const Array<std::uint32_t>& ids) {
        const GilReleased released;
        stoker::repeat(span(counts), span(ids));
      },
      "counts"_a, "ids"_a.noconvert());
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
