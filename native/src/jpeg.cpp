#include "stoker/jpeg.h"

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <map>
#include <utility>

#ifdef STOKER_HAS_JPEGINT
#define JPEG_INTERNALS  // jpeglib.h includes jpegint.h then
#endif
// clang-format off
#include <jpeglib.h>  // needs cstdio, which it does not include
// clang-format on

#include "stoker/error.h"
#include "stoker/huffman.h"

#define STOKER_TEXT(value) STOKER_TEXT_OF(value)
#define STOKER_TEXT_OF(value) #value

namespace stoker {
namespace {

// Interpolation of colours at the edges of what is decoded looks at no neighbour.
constexpr std::uint32_t kMargin = 4;

// libjpeg-turbo, which reports errors by a call that must not return: each method that calls it
// comes back by longjmp then, and has no object that a destructor would have to clean.
class PartDecoder {
 public:
  PartDecoder() {
    library_.err = jpeg_std_error(&errors_);
    library_.client_data = this;
    errors_.error_exit = [](j_common_ptr library) { give_up(library); };
    // Level -1 is a warning; others only trace.
    errors_.emit_message = [](j_common_ptr library, int level) {
      if (level < 0) give_up(library);
    };
  }
  ~PartDecoder() { jpeg_destroy_decompress(&library_); }
  PartDecoder(const PartDecoder&) = delete;
  PartDecoder& operator=(const PartDecoder&) = delete;

  /// Whether the header is sound, and of a kind and size as expected.
  bool open(std::span<const std::uint8_t> file, const JpegPart& part, J_COLOR_SPACE colours) {
    if (setjmp(back_) != 0) return false;
    jpeg_create_decompress(&library_);
    jpeg_mem_src(&library_, file.data(), static_cast<unsigned long>(file.size()));
    jpeg_read_header(&library_, TRUE);
    library_.scale_num = 1;
    library_.scale_denom = part.shrink;
    library_.out_color_space = colours;
    return library_.image_width == part.width && library_.image_height == part.height && is_plain();
  }

  /// Begins with the first row of the part; `left` is the first column that rows will have.
  bool start(const JpegPart& part, std::uint32_t& left, std::uint32_t& pixels) {
    if (setjmp(back_) != 0) return false;
    jpeg_start_decompress(&library_);
    const JDIMENSION from = part.across.first - std::min(part.across.first, kMargin);
    const JDIMENSION to = std::min(part.across.last + kMargin, library_.output_width);
    JDIMENSION first = from;
    JDIMENSION columns = to - from;
    if (columns < library_.output_width) jpeg_crop_scanline(&library_, &first, &columns);
    left = first;
    pixels = library_.output_width;
#ifdef STOKER_HAS_JPEGINT
    if (library_.restart_interval == 0) read_codes_ourselves(part.shrink, first);
#endif
    const JDIMENSION above = part.down.first;
    return jpeg_skip_scanlines(&library_, above) == above;
  }

  /// Writes the next row.
  bool read(std::uint8_t* row) {
    if (setjmp(back_) != 0) return false;
    JSAMPROW rows[] = {row};
    return jpeg_read_scanlines(&library_, rows, 1) == 1;
  }

  /// After the last row: whether the file ends there.
  bool finish() {
    if (setjmp(back_) != 0) return false;
    return library_.output_scanline < library_.output_height ||
           jpeg_finish_decompress(&library_) == TRUE;
  }

 private:
  [[noreturn]] static void give_up(j_common_ptr library) {
    std::longjmp(static_cast<PartDecoder*>(library->client_data)->back_, 1);
  }

#ifdef STOKER_HAS_JPEGINT
  // Has the library take coefficients from `scan_`, which is faster than its own functions. `left`
  // is the first column that rows have.
  void read_codes_ourselves(std::uint32_t shrink, JDIMENSION left) {
    const bool is_grey = library_.num_components == 1;
    const int across = is_grey ? 1 : library_.max_h_samp_factor;
    const JDIMENSION width = DCTSIZE / shrink * static_cast<JDIMENSION>(across);
    first_ = left / width;
    last_ = (left + library_.output_width - 1) / width;
    scan_.open({library_.src->next_input_byte, library_.src->bytes_in_buffer});
    for (int i = 0; i < library_.blocks_in_MCU; ++i) {
      const int colour = library_.MCU_membership[i];
      const jpeg_component_info& info = *library_.cur_comp_info[colour];
      // Colours of fewer pixels are shrunk less.
      const bool is_finest = info.h_samp_factor == library_.max_h_samp_factor &&
                             info.v_samp_factor == library_.max_v_samp_factor;
      scan_.add({table(true, info.dc_tbl_no), table(false, info.ac_tbl_no),
                 static_cast<std::size_t>(colour), is_finest && shrink == DCTSIZE});
    }
    library_.entropy->decode_mcu = [](j_decompress_ptr library, JBLOCKROW* blocks) -> boolean {
      static_cast<PartDecoder*>(library->client_data)->read_mcu(blocks);
      return TRUE;
    };
  }

  const HuffmanTable* table(bool is_dc, int number) {
    const auto [place, is_new] = tables_.try_emplace({is_dc, number});
    if (is_new) {
      const JHUFF_TBL& codes =
          *(is_dc ? library_.dc_huff_tbl_ptrs : library_.ac_huff_tbl_ptrs)[number];
      place->second.fill(codes.bits, codes.huffval, is_dc);
    }
    return &place->second;
  }

  void read_mcu(JBLOCKROW* blocks) {
    const bool is_seen = first_ <= mcu_ && mcu_ <= last_;
    mcu_ = mcu_ + 1 < library_.MCUs_per_row ? mcu_ + 1 : 0;
    if (!scan_.read(is_seen ? blocks : nullptr)) give_up(reinterpret_cast<j_common_ptr>(&library_));
    library_.src->next_input_byte = scan_.rest().data();
    library_.src->bytes_in_buffer = scan_.rest().size();
  }
#endif

  bool is_plain() {
    const bool has_known_colours = library_.jpeg_color_space == JCS_GRAYSCALE ||
                                   library_.jpeg_color_space == JCS_YCbCr ||
                                   library_.jpeg_color_space == JCS_RGB;
    if (!has_known_colours || library_.data_precision != 8 || library_.progressive_mode ||
        library_.arith_code || jpeg_has_multiple_scans(&library_)) {
      return false;
    }
    return std::all_of(library_.comp_info, library_.comp_info + library_.num_components,
                       [](const jpeg_component_info& colour) {
                         return colour.h_samp_factor <= 2 && colour.v_samp_factor <= 2;
                       });
  }

  jpeg_decompress_struct library_{};
  jpeg_error_mgr errors_{};
  std::jmp_buf back_;
#ifdef STOKER_HAS_JPEGINT
  ScanReader scan_;
  std::map<std::pair<bool, int>, HuffmanTable> tables_;
  JDIMENSION mcu_ = 0;  // the next one's column
  JDIMENSION first_ = 0;
  JDIMENSION last_ = 0;
#endif
};

bool ends_as_it_should(std::span<const std::uint8_t> file) {
  return file.size() > 4 && file[file.size() - 2] == 0xff && file[file.size() - 1] == JPEG_EOI;
}

void check(const JpegPart& part) {
  if (part.shrink != 1 && part.shrink != 2 && part.shrink != 4 && part.shrink != 8) {
    throw ConfigError("a JPEG is shrunk by 1, 2, 4 or 8");
  }
  const auto shrunk = [&](std::uint32_t side) {
    return (std::uint64_t{side} + part.shrink - 1) / part.shrink;
  };
  const auto lies_within = [&](const Span& span, std::uint32_t side) {
    return span.first < span.last && span.last <= shrunk(side);
  };
  if (!lies_within(part.across, part.width) || !lies_within(part.down, part.height)) {
    throw ConfigError("a part that does not lie within the image cannot be resized");
  }
}

Span moved(const Span& span, std::uint32_t by) {
  return {span.start - by, span.length, span.first - by, span.last - by};
}

// Whether the part can be read; `left` is the column its rows begin with, `pixels` what they have.
bool begins(PartDecoder& decoder, std::span<const std::uint8_t> file, const JpegPart& part,
            J_COLOR_SPACE colours, std::uint32_t& left, std::uint32_t& pixels) {
  return ends_as_it_should(file) && decoder.open(file, part, colours) &&
         decoder.start(part, left, pixels);
}

}  // namespace

bool cut_jpeg(std::span<const std::uint8_t> file, const JpegPart& part, const Square& out) {
  check(part);
  PartDecoder decoder;
  std::uint32_t left = 0;
  std::uint32_t pixels = 0;
  if (!begins(decoder, file, part, JCS_EXT_RGBX, left, pixels)) return false;
  Resampler resampler(moved(part.across, left), moved(part.down, part.down.first), pixels,
                      part.mirrored, out);
  while (!resampler.done()) {
    if (!decoder.read(resampler.row())) return false;
    resampler.push();
  }
  return decoder.finish();
}

bool decode_jpeg(std::span<const std::uint8_t> file, std::uint32_t width, std::uint32_t height,
                 std::uint32_t shrink, std::uint8_t* pixels) {
  const auto whole = [&](std::uint32_t side) {
    const std::uint32_t shrunk = shrink == 0 ? 0 : side / shrink + (side % shrink != 0);
    return Span{0, double(shrunk), 0, shrunk};
  };
  const JpegPart part = {width, height, shrink, whole(width), whole(height), false};
  check(part);
  PartDecoder decoder;
  std::uint32_t left = 0;
  std::uint32_t columns = 0;
  if (!begins(decoder, file, part, JCS_RGB, left, columns)) return false;
  for (std::size_t y = 0; y < part.down.last; ++y) {
    if (!decoder.read(pixels + 3 * y * columns)) return false;
  }
  return decoder.finish();
}

const char* jpeg_version() { return STOKER_TEXT(LIBJPEG_TURBO_VERSION); }

}  // namespace stoker
