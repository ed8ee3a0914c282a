#include "stoker/huffman.h"

#include <bit>
#include <cstring>

namespace stoker {
namespace {

using Bits = ScanReader::Bits;

constexpr unsigned kLongest = 16;      // of the codes
constexpr unsigned kValues = 64;       // of a block
constexpr unsigned kEnd = 128;         // a skip that leads out of the block, from wherever
constexpr unsigned kEnough = 32;       // bits, for a code and its value
constexpr std::uint8_t kMarker = 255;  // begins a marker, or stands for itself if a 0 follows

constexpr std::uint8_t kOrder[kValues] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// Where the coefficients of a file lie in a block. What lies behind the last falls on it: the end
// of a block is read as a 0 there.
constexpr auto kPlaces = [] {
  std::array<std::uint8_t, kValues + kEnd + 16> places{};
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = kOrder[i < kValues ? i : kValues - 1];
  return places;
}();

// The first `size` bits as a value: those that begin with a 0 are negative.
[[gnu::always_inline]] inline std::int16_t value_of(std::uint64_t bits, unsigned size) {
  const auto value = static_cast<std::uint32_t>(bits >> 1 >> (63 - size));
  const std::uint32_t below = bits >> 63 == 0 ? (~std::uint32_t{0} << size) + 1 : 0;
  return static_cast<std::int16_t>(value + below);
}

[[gnu::always_inline]] inline void use(Bits& bits, unsigned count) {
  bits.value <<= count;
  bits.count -= count;
}

// Out of line, as it is rare: at a marker or a byte that looks like one, and near the end.
[[gnu::noinline]] void fill_by_bytes(Bits& bits) {
  for (; bits.count <= 56; bits.count += 8) {
    const auto left = bits.end - bits.next;
    const bool is_stuffed = left > 1 && bits.next[0] == kMarker && bits.next[1] == 0;
    if (!is_stuffed && (left == 0 || *bits.next == kMarker)) {
      bits.invented += 8;
      continue;
    }
    bits.value |= std::uint64_t{*bits.next} << (56 - bits.count);
    bits.next += is_stuffed ? 2 : 1;
  }
}

[[gnu::always_inline]] inline void fill(Bits& bits) {
  if (bits.count >= kEnough) return;
  std::uint64_t bytes = ~std::uint64_t{0};
  if (bits.end - bits.next >= 8) std::memcpy(&bytes, bits.next, sizeof(bytes));
  if constexpr (std::endian::native == std::endian::little) bytes = __builtin_bswap64(bytes);
  // Whether a byte is kMarker; also said of one that is 1 less, before such a byte.
  if ((bytes & ~(bytes + 0x0101010101010101u) & 0x8080808080808080u) != 0) {
    fill_by_bytes(bits);
    return;
  }
  bits.value |= bytes >> bits.count;
  bits.next += (63 - bits.count) / 8;
  bits.count |= 56;
}

// A block's mean, as a difference to the last one; false where there is no code.
[[gnu::always_inline]] inline bool read_mean(const HuffmanTable& table, Bits& bits,
                                             std::uint32_t& mean) {
  fill(bits);
  const HuffmanTable::Entry entry = table.entries[bits.value >> (64 - HuffmanTable::kBits)];
  if (entry.bits != 0) {
    mean += static_cast<std::uint32_t>(entry.first);
    use(bits, entry.bits);
    return true;
  }
  const HuffmanTable::Step step = table.step_of(entry, bits.value);
  mean += static_cast<std::uint32_t>(value_of(bits.value << step.code, step.size));
  use(bits, step.code + step.size);
  return step.code != 0;
}

// All coefficients but the first; false where there is no code. Those of damaged data may be more
// than a block has, which libjpeg lets pass: the first of these is taken for the last.
template <bool Keeps>
[[gnu::always_inline]] inline bool read_others(const HuffmanTable& table, Bits& bits,
                                               std::int16_t* out) {
  unsigned at = 1;
  while (at < kValues) {
    fill(bits);
    const HuffmanTable::Entry entry = table.entries[bits.value >> (64 - HuffmanTable::kBits)];
    if (entry.bits == 0) [[unlikely]] {
      const HuffmanTable::Step step = table.step_of(entry, bits.value);
      if (step.code == 0) return false;
      at += step.skip;
      if (Keeps) out[kPlaces[at - 1]] = value_of(bits.value << step.code, step.size);
      use(bits, step.code + step.size);
      continue;
    }
    const unsigned first = at + entry.first_skip;
    at += entry.skip;
    if (Keeps) {
      out[kPlaces[first - 1]] = entry.first;
      out[kPlaces[at - 1]] = entry.second;
    }
    if (first >= kValues && at != first) [[unlikely]] {  // the second is the next block's
      if (Keeps) out[kValues - 1] = entry.first;
      use(bits, entry.first_bits);
      return true;
    }
    use(bits, entry.bits);
  }
  return true;
}

}  // namespace

void HuffmanTable::fill(const std::uint8_t* counts, const std::uint8_t* symbols, bool is_dc) {
  symbols_ = symbols;
  is_dc_ = is_dc;
  entries.fill({0, kBits + 1, 0, 0, 0, 0});
  std::uint32_t code = 0;
  std::int32_t index = 0;
  for (unsigned length = 1; length <= kLongest; ++length) {
    offsets_[length] = index - static_cast<std::int32_t>(code);
    for (unsigned i = 0; i < counts[length]; ++i, ++index, ++code) {
      if (length > kBits) continue;
      const Step found = step(length, symbols[index]);
      const auto bits = static_cast<std::uint8_t>(length + found.size);
      const std::uint32_t from = code << (kBits - length);
      for (std::uint32_t at = from; at < from + (1u << (kBits - length)); ++at) {
        entries[at].first_bits = found.code;
        if (bits > kBits) continue;
        const auto value = value_of(std::uint64_t{at} << (64 - kBits) << length, found.size);
        entries[at] = {bits, bits, found.skip, found.skip, value, value};
      }
    }
    limits_[length] = code << (kLongest - length);
    code <<= 1;
  }
  if (!is_dc) pair_up();
}

// Adds the second value to entries where it fits.
void HuffmanTable::pair_up() {
  const auto single = entries;
  for (std::size_t at = 0; at < single.size(); ++at) {
    const Entry& one = single[at];
    if (one.bits == 0 || one.skip == kEnd) continue;
    const Entry& other = single[(at << one.bits) % single.size()];
    if (other.bits == 0 || one.bits + other.bits > static_cast<int>(kBits)) continue;
    entries[at].bits = static_cast<std::uint8_t>(one.bits + other.bits);
    entries[at].skip = static_cast<std::uint8_t>(one.skip + other.skip);
    entries[at].second = other.first;
  }
}

HuffmanTable::Step HuffmanTable::step(unsigned code, unsigned symbol) const {
  const unsigned size = is_dc_ ? symbol : symbol % 16;
  const unsigned zeros = symbol / 16;  // before the value, or 16 without one, or the block's end
  const unsigned skip = is_dc_ ? 1 : size > 0 || zeros == 15 ? zeros + 1 : kEnd;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(size),
          static_cast<std::uint8_t>(skip)};
}

HuffmanTable::Step HuffmanTable::step_of(const Entry& entry, std::uint64_t bits) const {
  const auto code = static_cast<std::uint32_t>(bits >> (64 - kLongest));
  for (unsigned length = entry.first_bits; length <= kLongest; ++length) {
    if (code >= limits_[length]) continue;
    const auto offset = static_cast<std::int32_t>(code >> (kLongest - length)) + offsets_[length];
    return step(length, symbols_[offset]);
  }
  return {};
}

void ScanReader::open(std::span<const std::uint8_t> data) {
  bits_ = {0, 0, 0, data.data(), data.data() + data.size()};
  count_ = 0;
  means_ = {};
}

bool ScanReader::read(Coefficients* const* blocks) {
  Bits bits = bits_;  // in registers, meanwhile
  for (std::size_t i = 0; i < count_; ++i) {
    const Block& block = blocks_[i];
    std::uint32_t& mean = means_[block.colour];
    if (!read_mean(*block.dc, bits, mean)) return false;
    std::int16_t* const out = blocks != nullptr ? *blocks[i] : nullptr;
    if (out != nullptr) out[0] = static_cast<std::int16_t>(mean);
    const bool is_sound = out != nullptr && !block.is_mean_enough
                              ? read_others<true>(*block.ac, bits, out)
                              : read_others<false>(*block.ac, bits, nullptr);
    if (!is_sound) return false;
  }
  bits_ = bits;
  return bits.count >= bits.invented;
}

}  // namespace stoker
