// Random orders of samples. Stateless; safe in any thread as far as generator and arrays are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace stoker {

// A generator of NumPy's: the part of its `bitgen_t` that is called here.
struct Bits {
  void* state;
  std::uint64_t (*next64)(void* state);
  std::uint32_t (*next32)(void* state);
  double (*next_double)(void* state) = nullptr;
};

// Puts items into the order that NumPy's Generator.shuffle gives them, with the same draws. Each
// swap misses the cache in long arrays: here the next ones are fetched meanwhile. It goes from the
// last item to the first, and ends where only those before `since` are left to be drawn.
template <typename Item>
void shuffle(std::span<Item> items, const Bits& bits, std::size_t since = 0);

extern template void shuffle(std::span<std::uint8_t> items, const Bits& bits, std::size_t since);
extern template void shuffle(std::span<std::uint32_t> items, const Bits& bits, std::size_t since);
extern template void shuffle(std::span<std::uint64_t> items, const Bits& bits, std::size_t since);

// Draws counts that sum up to `size`, of the probabilities `p`, which sum up to 1, as NumPy's
// Generator.multinomial does with the same draws. False where one is expected more than 30 times,
// which NumPy draws otherwise: then counts and generator are of no use.
bool multinomial(std::uint32_t size, std::span<const double> p, const Bits& bits,
                 std::span<std::uint32_t> counts);

// The samples `order` lie end to end along a line, order[i] as long as parts[i], which are scaled
// to drawn.size() together. drawn[k]: on which one the point k + start falls, start from 0 to 1.
// ConfigError unless there is a part for each sample, and a sample.
void draw_along(std::span<const std::uint32_t> order, std::span<const double> parts, double start,
                std::span<std::uint32_t> drawn);

// The same for shares of at most one, shares[id], each of which has one point at most: so there is
// room for the `count` that are drawn where `order` begins, and no other memory is needed.
// ConfigError for ids out of range, and for a `count` of more than there are.
void draw_among(std::span<std::uint32_t> order, std::span<const double> shares, double start,
                std::size_t count);

// Fills in each id, from the first on, as often as counts[id] says. ConfigError unless these sum up
// to ids.size().
void repeat(std::span<const std::uint32_t> counts, std::span<std::uint32_t> ids);

// Fills in each id as often as counts[id] says, its visits at equal distances: the j-th of n, from
// 0 on, lies at (j + phase) / n of the whole, with one phase, from 0 to below 1, for each id that
// comes at all. Equal ones stay in the order of ids. In linear time where phases are even.
void spread(std::span<const std::uint32_t> counts, std::span<const double> phases,
            std::span<std::uint32_t> ids);

}  // namespace stoker
