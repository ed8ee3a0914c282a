#include "stoker/resample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "stoker/error.h"

namespace {

using stoker::Resampler;
using stoker::Span;
using stoker::Square;
using Bytes = std::vector<std::uint8_t>;

struct Image {
  std::uint32_t width;
  std::uint32_t height;
  Bytes pixels;  // three bytes each
};

Image noise(std::uint32_t width, std::uint32_t height, unsigned seed) {
  std::mt19937 random(seed);
  Image image{width, height, Bytes(std::size_t{3} * width * height)};
  for (std::uint8_t& byte : image.pixels) byte = static_cast<std::uint8_t>(random());
  return image;
}

Bytes resized(const Image& image, const Span& across, const Span& down, std::uint32_t size,
              bool mirrored) {
  Bytes out(std::size_t{3} * size * size);
  const Square square{out.data(), size, std::ptrdiff_t{3} * size, 3, 1};
  Resampler resampler(across, down, image.width, mirrored, square);
  for (std::size_t row = 0; !resampler.done(); ++row) {
    resampler.push(&image.pixels[3 * row * image.width], 3);
  }
  return out;
}

Bytes whole(const Image& image, std::uint32_t size, bool mirrored = false) {
  return resized(image, {0, double(image.width), 0, image.width},
                 {0, double(image.height), 0, image.height}, size, mirrored);
}

// The weight of each pixel of an axis for one target pixel.
std::vector<double> reference(const Span& span, std::uint32_t size, std::uint32_t index) {
  const double scale = span.length / size, reach = std::max(1.0, scale);
  const double centre = span.start + (index + 0.5) * scale;
  std::vector<double> weights(span.last, 0.0);
  double total = 0;
  for (std::uint32_t i = span.first; i < span.last; ++i) {
    weights[i] = std::max(0.0, 1 - std::abs(i + 0.5 - centre) / reach);
    total += weights[i];
  }
  for (double& weight : weights) weight /= total;
  return weights;
}

void is_the_sum_of_both_axes() {
  std::mt19937 random(3);
  for (unsigned round = 0; round < 40; ++round) {
    const Image image = noise(1 + random() % 90, 1 + random() % 90, round);
    const std::uint32_t size = 5 + random() % 20;
    const auto part = [&](std::uint32_t side) {
      const std::uint32_t first = random() % side, last = first + 1 + random() % (side - first);
      return Span{first + 0.25, last - first - 0.25, first, last};
    };
    const Span across = part(image.width), down = part(image.height);
    const Bytes out = resized(image, across, down, size, false);
    for (std::uint32_t y = 0; y < size; ++y) {
      const auto rows = reference(down, size, y);
      for (std::uint32_t x = 0; x < size; ++x) {
        const auto columns = reference(across, size, x);
        for (std::size_t channel = 0; channel < 3; ++channel) {
          double sum = 0;
          for (std::size_t j = down.first; j < down.last; ++j) {
            for (std::size_t i = across.first; i < across.last; ++i) {
              sum += rows[j] * columns[i] * image.pixels[3 * (j * image.width + i) + channel];
            }
          }
          CHECK(std::abs(out[3 * (std::size_t{y} * size + x) + channel] - sum) <= 0.6);
        }
      }
    }
  }
}

void same_size_is_the_same_image() {
  const Image image = noise(33, 33, 1);
  CHECK(whole(image, 33) == image.pixels);
}

void one_colour_stays_that_colour() {
  for (const std::uint32_t side : {1u, 2u, 31u, 160u, 320u}) {
    for (int colour = 0; colour < 256; ++colour) {
      const Image image{side, side, Bytes(std::size_t{3} * side * side, std::uint8_t(colour))};
      const Bytes out = whole(image, 10);
      CHECK(std::count(out.begin(), out.end(), colour) == 300);
    }
  }
}

void a_mirror_image_is_one() {
  const Image image = noise(70, 50, 2);
  const Bytes plain = whole(image, 24), mirrored = whole(image, 24, true);
  for (std::size_t y = 0; y < 24; ++y) {
    for (std::size_t x = 0; x < 24; ++x) {
      for (std::size_t channel = 0; channel < 3; ++channel) {
        CHECK(plain[3 * (24 * y + x) + channel] == mirrored[3 * (24 * y + 23 - x) + channel]);
      }
    }
  }
}

void planes_hold_the_same(std::uint32_t size) {
  const Image image = noise(40, 60, 4);
  const Bytes pixels = whole(image, size);
  const std::size_t area = std::size_t{size} * size;
  Bytes planes(pixels.size() + 1, 7);
  const Square square{planes.data(), size, std::ptrdiff_t(size), 1, std::ptrdiff_t(area)};
  Resampler resampler({0, 40, 0, 40}, {0, 60, 0, 60}, 40, false, square);
  for (std::size_t row = 0; !resampler.done(); ++row) {
    for (std::size_t x = 0; x < 40; ++x) {
      std::copy_n(&image.pixels[3 * (40 * row + x)], 3, resampler.row() + 4 * x);
    }
    resampler.push();
  }
  for (std::size_t i = 0; i < area; ++i) {
    for (std::size_t channel = 0; channel < 3; ++channel) {
      CHECK(planes[area * channel + i] == pixels[3 * i + channel]);
    }
  }
  CHECK(planes.back() == 7);
}

void nonsense_is_refused() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Image image = noise(10, 10, 5);
  const Span good{0, 10, 0, 10};
  for (const Span& bad : {Span{0, 0, 0, 10}, Span{0, -1, 0, 10}, Span{nan, 5, 0, 10},
                          Span{0, nan, 0, 10}, Span{-3, 5, 0, 10}, Span{0, 20, 0, 10},
                          Span{3, 5, 7, 7}, Span{3, 5, 4, 10}, Span{1e300, 1e300, 0, 10}}) {
    CHECK_THROWS(stoker::ConfigError, resized(image, bad, good, 4, false));
    CHECK_THROWS(stoker::ConfigError, resized(image, good, bad, 4, false));
  }
  CHECK_THROWS(stoker::ConfigError, resized(image, {0, 11, 0, 11}, good, 4, false));
  CHECK_THROWS(stoker::ConfigError, whole(image, 0));
  CHECK_THROWS(stoker::ConfigError, whole(noise(330, 2, 6), 10));
}

}  // namespace

int main() {
  is_the_sum_of_both_axes();
  same_size_is_the_same_image();
  one_colour_stays_that_colour();
  a_mirror_image_is_one();
  for (const std::uint32_t size : {16u, 18u, 3u}) planes_hold_the_same(size);
  nonsense_is_refused();
  return check::failures();
}
