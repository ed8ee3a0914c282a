#include "stoker/resample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::uint32_t kOne = 1u << 16;
constexpr std::size_t kLanes = 8;  // two pixels
constexpr std::size_t kGroup = 4;  // pixels of the result that are written at once

// The loops below are compiled twice where processors may have AVX2: for all, and for those. They
// use no templates of the standard library: the linker could keep the AVX2 copy of one for all.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(STOKER_NO_AVX2)
#define STOKER_FOR_AVX2 [[gnu::target("avx2")]]
#define STOKER_HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define STOKER_FOR_AVX2
#define STOKER_HAS_AVX2 false
#endif
#define STOKER_INLINE [[gnu::always_inline]] inline

void check(const Span& span, std::uint32_t size) {
  const bool is_sound = size > 0 && span.first < span.last && std::isfinite(span.start) &&
                        std::isfinite(span.length) && span.length > 0 && span.start >= span.first &&
                        span.start + span.length <= span.last + 1.0;
  if (!is_sound) throw ConfigError("a part that does not lie within the image cannot be resized");
  if (span.length > Resampler::kMostShrink * size) {
    throw ConfigError("a part more than 32 times as long as its result cannot be resized");
  }
}

// The triangle's values above 0 for one target pixel; returns the first source pixel.
std::uint32_t triangle(const Span& span, double scale, std::uint32_t index,
                       std::vector<double>& values) {
  const double reach = std::max(scale, 1.0);
  const double centre = span.start + (index + 0.5) * scale;
  const auto seen = [&](double pixel) {
    return static_cast<std::uint32_t>(std::clamp(pixel, double(span.first), span.last - 1.0));
  };
  // Pixel i counts from its centre, i + 0.5: those less than `reach` away.
  const std::uint32_t first = seen(std::floor(centre - reach - 0.5) + 1);
  const std::uint32_t last = seen(std::ceil(centre + reach - 0.5) - 1);
  values.clear();
  for (std::uint32_t i = first; i <= last; ++i) {
    values.push_back(std::max(0.0, 1 - std::abs(i + 0.5 - centre) / reach));
  }
  return first;
}

// Rounds the running sum, so that the weights add up to kOne exactly.
void round(const std::vector<double>& values, std::uint16_t* weights) {
  double total = 0;
  for (const double value : values) total += value;
  double sum = 0;
  std::uint32_t given = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    sum += total > 0 ? values[i] / total : 1.0 / static_cast<double>(values.size());
    const auto upto = static_cast<std::uint32_t>(std::min(sum, 1.0) * kOne + 0.5);
    weights[i] = static_cast<std::uint16_t>(std::min(upto - given, kOne - 1));
    given = upto;
  }
}

// The upper half of a product: 65536ths of `value`. It loses its fraction, half of one in the mean,
// which the sums get back beforehand.
STOKER_INLINE std::uint16_t share(std::uint16_t value, std::uint16_t weight) {
  return static_cast<std::uint16_t>((std::uint32_t{value} * std::uint32_t{weight}) >> 16);
}

// What a row between the passes is summed of: so many rows, and `half` or the sums so far.
struct Rows {
  const std::uint8_t* const* from;
  const std::uint16_t* weights;
  std::size_t bytes;
  std::uint16_t half;
};

// Sums rows in 256ths. All loops over weights are unrolled, that over bytes becomes vectors.
template <std::size_t Taps, bool Adds>
STOKER_INLINE void sum_rows(const Rows& rows, std::uint16_t* __restrict sums) {
  const std::uint8_t* from[Taps];
  std::uint16_t parts[Taps];
  for (std::size_t tap = 0; tap < Taps; ++tap) {
    from[tap] = rows.from[tap];
    parts[tap] = rows.weights[tap];
  }
  const std::uint16_t half = rows.half;
  for (std::size_t i = 0, bytes = rows.bytes; i < bytes; ++i) {
    std::uint16_t sum = Adds ? sums[i] : half;
    for (std::size_t tap = 0; tap < Taps; ++tap) {
      const auto value = static_cast<std::uint16_t>(from[tap][i] << 8);
      sum = static_cast<std::uint16_t>(sum + share(value, parts[tap]));
    }
    sums[i] = sum;
  }
}

// What a row of the result is summed by, padded to whole groups of kGroup pixels.
struct Columns {
  const std::uint32_t* first;
  const std::uint16_t* halves;   // four times each: what rounding adds
  const std::uint16_t* weights;  // of two pixels, four times each
  std::size_t pairs;
};

using Lanes [[gnu::vector_size(16)]] = std::uint16_t;
using Bytes [[gnu::vector_size(16)]] = std::uint8_t;
using Halves [[gnu::vector_size(16)]] = std::uint64_t;

STOKER_INLINE Lanes shares(const std::uint16_t* pixels, const std::uint16_t* weights) {
  Lanes parts, by;
  std::memcpy(&parts, pixels, sizeof(parts));
  std::memcpy(&by, weights, sizeof(by));
#if defined(__SSE2__)  // of which compilers do not always think
  return reinterpret_cast<Lanes>(
      _mm_mulhi_epu16(reinterpret_cast<__m128i>(parts), reinterpret_cast<__m128i>(by)));
#else
  for (std::size_t i = 0; i < kLanes; ++i) parts[i] = share(parts[i], by[i]);
  return parts;
#endif
}

// The sums of two pixels of the result, in 256ths.
template <std::size_t Known>
STOKER_INLINE Lanes two_pixels(const Columns& across, std::size_t x, const std::uint16_t* row) {
  const std::size_t pairs = Known != 0 ? Known : across.pairs;
  Lanes sums[2] = {};
  for (std::size_t i = 0; i < 2; ++i) {
    const std::uint16_t* const pixels = row + std::size_t{4} * across.first[x + i];
    const std::uint16_t* const weights = across.weights + kLanes * pairs * (x + i);
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      sums[i] += shares(pixels + kLanes * pair, weights + kLanes * pair);
    }
  }
  const auto one = reinterpret_cast<Halves>(sums[0]), other = reinterpret_cast<Halves>(sums[1]);
  Lanes halves;
  std::memcpy(&halves, across.halves + 4 * x, sizeof(halves));
  return halves + reinterpret_cast<Lanes>(__builtin_shufflevector(one, other, 0, 2)) +
         reinterpret_cast<Lanes>(__builtin_shufflevector(one, other, 1, 3));
}

// Writes a row of the result; the number of pairs is known where it is small, which unrolls loops.
template <std::size_t Known>
STOKER_INLINE void sum_columns(const Columns& across, const std::uint16_t* row, const Square& out,
                               std::uint8_t* to) {
  for (std::size_t x = 0; x < out.size; x += kGroup) {
    const auto low = reinterpret_cast<Bytes>(two_pixels<Known>(across, x, row));
    const auto high = reinterpret_cast<Bytes>(two_pixels<Known>(across, x + 2, row));
    // Of each sum the upper byte, colour by colour.
    const Bytes colours = __builtin_shufflevector(low, high, 1, 9, 17, 25, 3, 11, 19, 27, 5, 13, 21,
                                                  29, 7, 15, 23, 31);
    std::uint8_t bytes[sizeof(colours)];
    std::memcpy(bytes, &colours, sizeof(bytes));
    const std::size_t count = out.size - x < kGroup ? out.size - x : kGroup;
    for (std::size_t colour = 0; colour < 3; ++colour) {
      std::uint8_t* const target = to + static_cast<std::ptrdiff_t>(colour) * out.channel +
                                   static_cast<std::ptrdiff_t>(x) * out.column;
      if (out.column == 1 && count == kGroup) {
        std::memcpy(target, bytes + kGroup * colour, kGroup);
        continue;
      }
      for (std::size_t i = 0; i < count; ++i) {
        target[static_cast<std::ptrdiff_t>(i) * out.column] = bytes[kGroup * colour + i];
      }
    }
  }
}

template <std::size_t Taps, bool Adds>
void rows_anywhere(const Rows& rows, std::uint16_t* __restrict sums) {
  sum_rows<Taps, Adds>(rows, sums);
}

template <std::size_t Taps, bool Adds>
STOKER_FOR_AVX2 void rows_by_avx2(const Rows& rows, std::uint16_t* __restrict sums) {
  sum_rows<Taps, Adds>(rows, sums);
}

template <std::size_t Known>
void columns_anywhere(const Columns& across, const std::uint16_t* row, const Square& out,
                      std::uint8_t* to) {
  sum_columns<Known>(across, row, out, to);
}

template <std::size_t Known>
STOKER_FOR_AVX2 void columns_by_avx2(const Columns& across, const std::uint16_t* row,
                                     const Square& out, std::uint8_t* to) {
  sum_columns<Known>(across, row, out, to);
}

using SumRows = std::array<void (*)(const Rows&, std::uint16_t*), 4>;
using SumColumns =
    std::array<void (*)(const Columns&, const std::uint16_t*, const Square&, std::uint8_t*), 4>;

struct Loops {
  SumRows begin;  // of 1 to 4 rows
  SumRows add;
  SumColumns columns;  // of 1 to 3 pairs, and first of any number
};

const Loops& loops() {
  static constexpr Loops kAnywhere = {
      {rows_anywhere<1, false>, rows_anywhere<2, false>, rows_anywhere<3, false>,
       rows_anywhere<4, false>},
      {rows_anywhere<1, true>, rows_anywhere<2, true>, rows_anywhere<3, true>,
       rows_anywhere<4, true>},
      {columns_anywhere<0>, columns_anywhere<1>, columns_anywhere<2>, columns_anywhere<3>}};
  static constexpr Loops kByAvx2 = {
      {rows_by_avx2<1, false>, rows_by_avx2<2, false>, rows_by_avx2<3, false>,
       rows_by_avx2<4, false>},
      {rows_by_avx2<1, true>, rows_by_avx2<2, true>, rows_by_avx2<3, true>, rows_by_avx2<4, true>},
      {columns_by_avx2<0>, columns_by_avx2<1>, columns_by_avx2<2>, columns_by_avx2<3>}};
  static const bool has_avx2 = STOKER_HAS_AVX2;
  return has_avx2 ? kByAvx2 : kAnywhere;
}

}  // namespace

Weights::Weights(const Span& span, std::uint32_t size, bool mirrored) {
  check(span, size);
  const double scale = span.length / size;
  // No more pixels than that lie within the triangle.
  taps = static_cast<std::uint32_t>(std::ceil(2 * std::max(scale, 1.0)));
  first.resize(size);
  count.resize(size);
  values.resize(std::size_t{size} * taps);
  std::vector<double> exact;
  for (std::uint32_t i = 0; i < size; ++i) {
    const std::uint32_t at = mirrored ? size - 1 - i : i;
    first[at] = triangle(span, scale, i, exact);
    exact.resize(std::min<std::size_t>(exact.size(), taps));  // were it for a last bit
    count[at] = static_cast<std::uint32_t>(exact.size());
    round(exact, &values[std::size_t{at} * taps]);
  }
}

Resampler::Resampler(const Span& across, const Span& down, std::uint32_t pixels, bool mirrored,
                     const Square& out)
    : out_(out),
      across_(across, out.size, mirrored),
      down_(down, out.size, false),
      pixels_(pixels),
      bytes_(std::size_t{4} * pixels),
      rows_(bytes_ * down_.taps),
      reached_(down_.taps),
      // What lies behind the last pixel is read, and multiplied by 0.
      blended_(bytes_ + 4 * (across_.taps + std::size_t{1})) {
  if (across.last > pixels) throw ConfigError("a row has fewer pixels than the filter looks at");
  const std::size_t pairs = (across_.taps + 1) / 2;
  const std::size_t padded = (out.size + kGroup - 1) / kGroup * kGroup;
  across_.first.resize(padded);
  pairs_.resize(padded * pairs * kLanes);
  halves_.resize(padded * 4);
  for (std::size_t x = 0; x < out.size; ++x) {
    std::fill_n(&halves_[4 * x], 4, static_cast<std::uint16_t>(128 + across_.count[x] / 2));
    for (std::size_t tap = 0; tap < across_.taps; ++tap) {
      std::fill_n(&pairs_[x * pairs * kLanes + 4 * tap], 4, across_.values[x * across_.taps + tap]);
    }
  }
}

std::uint8_t* Resampler::row() { return &rows_[pushed_ % down_.taps * bytes_]; }

void Resampler::push() {
  ++pushed_;
  while (!done() && down_.first[next_] + down_.count[next_] <= pushed_) {
    blend(next_);
    write(next_);
    ++next_;
  }
}

void Resampler::push(const std::uint8_t* pixels, std::ptrdiff_t step) {
  std::uint8_t* const to = row();
  const std::size_t whole = step == 3 ? pixels_ - 1 : 0;  // four bytes may be read of all but one
  for (std::size_t x = 0; x < whole; ++x) std::memcpy(to + 4 * x, pixels + 3 * x, 4);
  for (std::size_t x = whole; x < pixels_; ++x) {
    std::copy_n(pixels + static_cast<std::ptrdiff_t>(x) * step, 3, to + 4 * x);
  }
  push();
}

void Resampler::blend(std::uint32_t y) {
  const std::uint32_t count = down_.count[y];
  const std::uint16_t* const weights = &down_.values[std::size_t{y} * down_.taps];
  for (std::uint32_t tap = 0; tap < count; ++tap) {
    reached_[tap] = &rows_[(down_.first[y] + tap) % down_.taps * bytes_];
  }
  Rows rows = {reached_.data(), weights, bytes_, static_cast<std::uint16_t>(count / 2)};
  const SumRows* sum = &loops().begin;
  for (std::size_t left = count; left > 0; sum = &loops().add) {
    const std::size_t taps = std::min(left, sum->size());
    (*sum)[taps - 1](rows, blended_.data());
    rows.from += taps;
    rows.weights += taps;
    left -= taps;
  }
}

void Resampler::write(std::uint32_t y) {
  const std::size_t pairs = (across_.taps + 1) / 2;
  const Columns across = {across_.first.data(), halves_.data(), pairs_.data(), pairs};
  const SumColumns& sum = loops().columns;
  sum[pairs < sum.size() ? pairs : 0](across, blended_.data(), out_, out_.data + y * out_.row);
}

}  // namespace stoker
