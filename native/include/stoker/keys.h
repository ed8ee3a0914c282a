// Keys that carry two numbers in one ordered double: a count (or a round) and then a clock.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace stoker {

inline constexpr int kClockBits = 40;
inline constexpr std::uint64_t kMostCount = (1ull << 21) - 1;

// Bit 62 keeps every such key a normal positive number, which orders like its bits.
inline double pair_key(std::uint64_t count, std::uint64_t clock) {
  return std::bit_cast<double>((1ull << 62) | (std::min(count, kMostCount) << kClockBits) |
                               (clock & ((1ull << kClockBits) - 1)));
}
inline std::uint64_t count_of(double key) {
  return (std::bit_cast<std::uint64_t>(key) >> kClockBits) & kMostCount;
}
inline std::uint64_t clock_of(double key) {
  return std::bit_cast<std::uint64_t>(key) & ((1ull << kClockBits) - 1);
}

}  // namespace stoker
