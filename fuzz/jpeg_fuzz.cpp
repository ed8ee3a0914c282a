// A JPEG file from a data set: the part of a resized image that a training cuts out, and all of it.
//
// The first six bytes choose the part, the rest is the file, or bytes that look like one. What is
// not taken must be left alone; nothing may be read or written outside of file and result.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "stoker/jpeg.h"

namespace {

constexpr std::size_t kChoices = 6;
constexpr std::uint32_t kMostPixels = 1u << 16;  // of an image: the time it takes

// What follows the marker of a frame, if there is one: precision, height, width.
const std::uint8_t* frame(const std::uint8_t* file, std::size_t size) {
  for (std::size_t at = 0; at + 9 < size; ++at) {
    const bool is_frame = file[at] == 0xff && file[at + 1] >= 0xc0 && file[at + 1] <= 0xc2;
    if (is_frame) return file + at + 4;
  }
  return nullptr;
}

// A span of so many pixels, chosen by two bytes.
stoker::Span span(std::uint32_t side, std::uint8_t from, std::uint8_t length) {
  const std::uint32_t first = from * (side - 1) / 256;
  const std::uint32_t last = first + 1 + length * (side - first - 1) / 255;
  return {double(first), double(last - first), first, last};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < kChoices) return 0;
  const std::uint8_t* const file = data + kChoices;
  const std::uint8_t* const found = frame(file, size - kChoices);
  if (found == nullptr) return 0;
  const std::uint32_t height = found[1] << 8 | found[2], width = found[3] << 8 | found[4];
  const std::uint32_t shrink = 1u << data[0] % 4;
  const std::uint32_t side = 4 + data[1] % 32;
  if (width == 0 || height == 0 || width * height > kMostPixels) return 0;
  const auto across = span((width + shrink - 1) / shrink, data[2], data[3]);
  const auto down = span((height + shrink - 1) / shrink, data[4], data[5]);
  if (std::max(across.length, down.length) > stoker::Resampler::kMostShrink * side) return 0;
  std::vector<std::uint8_t> out(std::size_t{3} * side * side);
  const stoker::Square square{out.data(), side, side, 1, std::ptrdiff_t{side} * side};
  stoker::cut_jpeg({file, size - kChoices},
                   {width, height, shrink, across, down, (data[1] & 32) != 0}, square);
  std::vector<std::uint8_t> whole(std::size_t{3} * ((width + shrink - 1) / shrink) *
                                  ((height + shrink - 1) / shrink));
  stoker::decode_jpeg({file, size - kChoices}, width, height, shrink, whole.data());
  return 0;
}
