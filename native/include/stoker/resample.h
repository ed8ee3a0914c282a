// Antialiased resizing of a part of an image while its rows come in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker {

/// One axis of the part: where it lies, and the pixels that the filter may look at.
struct Span {
  double start;   // in pixels of the rows, as all here
  double length;  // > 0
  std::uint32_t first;
  std::uint32_t last;  // behind the last one
};

/// Where `size` x `size` pixels of red, green and blue go; strides in bytes.
struct Square {
  std::uint8_t* data;
  std::uint32_t size;
  std::ptrdiff_t row;
  std::ptrdiff_t column;
  std::ptrdiff_t channel;
};

/// Weights of one axis: each target pixel is a sum of `taps` pixels from `first[i]` on, in
/// 65536ths. Pillow's bilinear filter: a triangle that reaches one target pixel to either side, and
/// one source pixel at least.
struct Weights {
  /// ConfigError unless span and size make sense and the part is at most kMostShrink times as long.
  Weights(const Span& span, std::uint32_t size, bool mirrored);

  std::uint32_t taps;
  std::vector<std::uint32_t> first;
  std::vector<std::uint32_t> count;   // of taps, behind which weights are 0
  std::vector<std::uint16_t> values;  // [size][taps]
};

/// Resizes rows of four bytes a pixel, of which the fourth is ignored. One thread at a time.
///
/// Columns are summed before rows, in 16 bits: results are within one of Pillow's.
class Resampler {
 public:
  static constexpr double kMostShrink = 32;  // more taps would not fit into the sums

  /// Rows have `pixels` pixels; row 0 of `down` is the first that is pushed.
  Resampler(const Span& across, const Span& down, std::uint32_t pixels, bool mirrored,
            const Square& out);

  /// Where the next row goes, 4 * pixels bytes.
  std::uint8_t* row();
  /// Takes the row, and writes the rows of the result that are complete now.
  void push();
  /// Takes a row of three bytes a pixel, each pixel `step` bytes behind the last.
  void push(const std::uint8_t* pixels, std::ptrdiff_t step);
  /// Whether the result is complete: no further row is needed.
  bool done() const { return next_ == out_.size; }

 private:
  void blend(std::uint32_t y);
  void write(std::uint32_t y);

  const Square out_;
  Weights across_;
  const Weights down_;
  const std::size_t pixels_;
  const std::size_t bytes_;
  std::uint32_t pushed_ = 0;
  std::uint32_t next_ = 0;
  std::vector<std::uint16_t> pairs_;   // [size][pairs][8]: weights of two pixels, four times each
  std::vector<std::uint16_t> halves_;  // [size][4]: what rounding adds to a pixel's colours
  std::vector<std::uint8_t> rows_;     // as many as the filter reaches over, in turn
  std::vector<const std::uint8_t*> reached_;
  std::vector<std::uint16_t> blended_;  // one row between the passes, in 256ths
};

}  // namespace stoker
