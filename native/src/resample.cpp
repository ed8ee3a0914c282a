#include "stoker/resample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "stoker/error.h"

namespace stoker {
namespace {

constexpr std::uint32_t kOne = 1u << 16;
constexpr std::size_t kLanes = 8;  // two pixels

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
inline std::uint16_t share(std::uint16_t value, std::uint16_t weight) {
  return static_cast<std::uint16_t>((std::uint32_t{value} * std::uint32_t{weight}) >> 16);
}

// Adds so many rows to sums in 256ths. All loops over weights are unrolled, that over bytes becomes
// vectors.
template <std::size_t Taps>
void add_rows(const std::uint8_t* const* rows, const std::uint16_t* weights, std::size_t bytes,
              std::uint16_t* __restrict sums) {
  const std::uint8_t* from[Taps];
  std::uint16_t parts[Taps];
  std::copy_n(rows, Taps, from);
  std::copy_n(weights, Taps, parts);
  for (std::size_t i = 0; i < bytes; ++i) {
    std::uint16_t sum = sums[i];
    for (std::size_t tap = 0; tap < Taps; ++tap) {
      const auto value = static_cast<std::uint16_t>(from[tap][i] << 8);
      sum = static_cast<std::uint16_t>(sum + share(value, parts[tap]));
    }
    sums[i] = sum;
  }
}

using AddRows = void (*)(const std::uint8_t* const*, const std::uint16_t*, std::size_t,
                         std::uint16_t*);
constexpr std::array<AddRows, 4> kAddRows = {add_rows<1>, add_rows<2>, add_rows<3>, add_rows<4>};

using Pixel [[gnu::vector_size(8)]] = std::uint16_t;
using Lanes [[gnu::vector_size(16)]] = std::uint16_t;

inline Lanes shares(const std::uint16_t* pixels, const std::uint16_t* weights) {
  std::uint16_t parts[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) parts[i] = share(pixels[i], weights[i]);
  Lanes lanes;
  std::memcpy(&lanes, parts, sizeof(lanes));
  return lanes;
}

// Writes a row of the result; the number of pairs is known where it is small, which unrolls loops.
template <std::size_t Known>
void sum_columns(const Weights& across, const std::vector<std::uint16_t>& weights,
                 const std::uint16_t* row, const Square& out, std::uint8_t* to) {
  const std::size_t pairs = Known != 0 ? Known : (across.taps + 1) / 2;
  const std::uint16_t* weight = weights.data();
  const std::ptrdiff_t column = out.column, channel = out.channel;
  const std::uint32_t* const first = across.first.data();
  const std::uint32_t* const count = across.count.data();
  for (std::size_t x = 0, size = out.size; x < size; ++x) {
    const std::uint16_t* const pixels = row + std::size_t{4} * first[x];
    Lanes sums = {};
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      sums += shares(pixels + kLanes * pair, weight + kLanes * pair);
    }
    weight += kLanes * pairs;
    Pixel both[2];
    std::memcpy(both, &sums, sizeof(both));
    const auto half = static_cast<std::uint16_t>(128 + count[x] / 2);
    const Pixel pixel = (both[0] + both[1] + half) >> 8;
    for (std::ptrdiff_t i = 0; i < 3; ++i) to[i * channel] = static_cast<std::uint8_t>(pixel[i]);
    to += column;
  }
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
  pairs_.resize(out.size * pairs * kLanes);
  for (std::size_t x = 0; x < out.size; ++x) {
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
  std::fill_n(blended_.data(), bytes_, static_cast<std::uint16_t>(count / 2));
  for (std::uint32_t tap = 0; tap < count;) {
    const std::size_t taps = std::min<std::size_t>(count - tap, kAddRows.size());
    kAddRows[taps - 1](&reached_[tap], weights + tap, bytes_, blended_.data());
    tap += static_cast<std::uint32_t>(taps);
  }
}

void Resampler::write(std::uint32_t y) {
  static constexpr std::array kSum = {sum_columns<0>, sum_columns<1>, sum_columns<2>,
                                      sum_columns<3>};
  const std::size_t pairs = (across_.taps + 1) / 2;
  kSum[pairs < kSum.size() ? pairs : 0](across_, pairs_, blended_.data(), out_,
                                        out_.data + y * out_.row);
}

}  // namespace stoker
