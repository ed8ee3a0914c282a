// From a JPEG file to a resized part of its image, of which only that part is decoded, or to all of
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "stoker/resample.h"

namespace stoker {

/// The part of an image, as its header gives the size, that becomes a square.
struct JpegPart {
  std::uint32_t width;  // of the whole image, in pixels
  std::uint32_t height;
  std::uint32_t shrink;  // 1, 2, 4 or 8: the image is decoded at such a part of its sides
  Span across;           // in pixels of the shrunk image, whose sides are rounded up
  Span down;
  bool mirrored;
};

/// Writes the part and returns true; false if this is no file for it, and some of `out` may be
/// written then. It takes baseline JPEG, grey or of three colours in one scan, that ends as it
/// should and in which libjpeg finds nothing wrong, not even what it only warns of, and no code
/// that is none. Bytes that no row of the part needs are not looked at. Memory is that of a few
/// rows. ConfigError for a part outside of the image, or that cannot be resized. Safe in any
/// thread.
bool cut_jpeg(std::span<const std::uint8_t> file, const JpegPart& part, const Square& out);

/// Writes all of an image of that size at a `shrink`-th of its sides, which are rounded up, as red,
/// green and blue; as cut_jpeg else.
bool decode_jpeg(std::span<const std::uint8_t> file, std::uint32_t width, std::uint32_t height,
                 std::uint32_t shrink, std::uint8_t* pixels);

/// The library's version, such as "2.1.5".
const char* jpeg_version();

}  // namespace stoker
