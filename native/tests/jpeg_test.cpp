#include "stoker/jpeg.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

// clang-format off
#include <jpeglib.h>  // needs cstdio, which it does not include
// clang-format on

#include "check.h"
#include "stoker/error.h"

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::uint32_t kWidth = 150, kHeight = 117, kSize = 24;

struct Kind {
  bool grey = false;
  int across = 2;  // sampling of brightness to that of colours
  int down = 2;
  bool progressive = false;
  unsigned restart_rows = 0;
  int quality = 92;
  unsigned noise = 16;
  bool optimized = false;  // has Huffman tables of its own
};

// A smooth image with noise, as a file.
Bytes file_of(const Kind& kind) {
  jpeg_compress_struct library;
  jpeg_error_mgr errors;
  library.err = jpeg_std_error(&errors);
  jpeg_create_compress(&library);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&library, &memory, &size);
  library.image_width = kWidth;
  library.image_height = kHeight;
  library.input_components = kind.grey ? 1 : 3;
  library.in_color_space = kind.grey ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&library);
  jpeg_set_quality(&library, kind.quality, TRUE);
  library.comp_info[0].h_samp_factor = kind.grey ? 1 : kind.across;
  library.comp_info[0].v_samp_factor = kind.grey ? 1 : kind.down;
  library.restart_in_rows = static_cast<int>(kind.restart_rows);
  library.optimize_coding = kind.optimized ? TRUE : FALSE;
  if (kind.progressive) jpeg_simple_progression(&library);
  jpeg_start_compress(&library, TRUE);
  std::mt19937 random(1);
  Bytes row(std::size_t{3} * kWidth);
  for (std::uint32_t y = 0; y < kHeight; ++y) {
    for (std::uint32_t i = 0; i < row.size(); ++i) {
      row[i] = static_cast<std::uint8_t>(((i % 3 + 1) * y + i / 3 + random() % kind.noise) % 256);
    }
    JSAMPROW rows[] = {row.data()};
    jpeg_write_scanlines(&library, rows, 1);
  }
  jpeg_finish_compress(&library);
  jpeg_destroy_compress(&library);
  Bytes file(memory, memory + size);
  std::free(memory);
  return file;
}

std::uint32_t shrunk(std::uint32_t side, std::uint32_t by) { return (side + by - 1) / by; }

stoker::JpegPart part_of(std::uint32_t shrink, std::uint32_t left, std::uint32_t top,
                         std::uint32_t width, std::uint32_t height) {
  return {kWidth,
          kHeight,
          shrink,
          {double(left), double(width), left, left + width},
          {double(top), double(height), top, top + height},
          false};
}

struct Result {
  bool taken;
  Bytes pixels;
};

Result cut(const Bytes& file, const stoker::JpegPart& part, std::uint32_t size = kSize) {
  Result result{false, Bytes(std::size_t{3} * size * size)};
  const stoker::Square square{result.pixels.data(), size, std::ptrdiff_t{3} * size, 3, 1};
  result.taken = stoker::cut_jpeg(file, part, square);
  return result;
}

// All of the image, at a fraction of its size, resized by nothing.
Bytes decoded(const Bytes& file, std::uint32_t shrink) {
  jpeg_decompress_struct library;
  jpeg_error_mgr errors;
  library.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&library);
  jpeg_mem_src(&library, file.data(), static_cast<unsigned long>(file.size()));
  jpeg_read_header(&library, TRUE);
  library.scale_num = 1;
  library.scale_denom = shrink;
  library.out_color_space = JCS_RGB;
  jpeg_start_decompress(&library);
  const std::size_t stride = std::size_t{3} * library.output_width;
  Bytes pixels(stride * library.output_height);
  while (library.output_scanline < library.output_height) {
    JSAMPROW rows[] = {&pixels[stride * library.output_scanline]};
    jpeg_read_scanlines(&library, rows, 1);
  }
  jpeg_destroy_decompress(&library);
  return pixels;
}

void a_part_is_that_of_the_whole() {
  std::mt19937 random(2);
  for (const Kind& kind :
       {Kind{}, Kind{false, 2, 1}, Kind{false, 1, 1}, Kind{false, 1, 2}, Kind{true},
        Kind{false, 2, 2, false, 1}, Kind{.quality = 100}, Kind{.quality = 100, .noise = 256},
        Kind{.quality = 20}, Kind{.noise = 1, .optimized = true},
        Kind{.quality = 100, .noise = 256, .optimized = true}}) {
    const Bytes file = file_of(kind);
    for (const std::uint32_t shrink : {1u, 2u, 4u, 8u}) {
      const std::uint32_t width = shrunk(kWidth, shrink), height = shrunk(kHeight, shrink);
      const Bytes whole = decoded(file, shrink);
      Bytes pixels(whole.size());
      CHECK(stoker::decode_jpeg(file, kWidth, kHeight, shrink, pixels.data()) && pixels == whole);
      for (int round = 0; round < 30; ++round) {
        const auto most = std::min(width, height);
        const auto size = static_cast<std::uint32_t>(1 + random() % most);
        const auto left = static_cast<std::uint32_t>(random() % (width - size + 1));
        const auto top = static_cast<std::uint32_t>(random() % (height - size + 1));
        const Result result = cut(file, part_of(shrink, left, top, size, size), size);
        CHECK(result.taken);
        for (std::size_t y = 0; y < size; ++y) {
          CHECK(std::equal(&result.pixels[3 * size * y], &result.pixels[3 * size * y] + 3 * size,
                           &whole[3 * ((top + y) * width + left)]));
        }
      }
    }
  }
}

void other_kinds_are_left_to_others() {
  const stoker::JpegPart part = part_of(1, 0, 0, kWidth, kHeight);
  CHECK(cut(file_of({}), part).taken);
  CHECK(!cut(file_of({false, 2, 2, true}), part).taken);
  CHECK(!cut(file_of({false, 4, 1}), part).taken);
  stoker::JpegPart other = part;
  other.height += 1;  // not what the header says
  CHECK(!cut(file_of({}), other).taken);
  Bytes pixels(std::size_t{3} * kWidth * (kHeight + 1));
  CHECK(!stoker::decode_jpeg(file_of({}), kWidth, kHeight + 1, 1, pixels.data()));
  CHECK(!stoker::decode_jpeg(file_of({false, 2, 2, true}), kWidth, kHeight, 1, pixels.data()));
}

void damage_is_noticed() {
  const Bytes file = file_of({});
  const stoker::JpegPart part = part_of(1, 10, 10, kWidth - 10, kHeight - 10);
  Bytes pixels(std::size_t{3} * kWidth * kHeight);
  for (std::size_t size = 0; size < file.size(); ++size) {
    Bytes cut_short(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK(!cut(cut_short, part).taken);
    CHECK(!stoker::decode_jpeg(cut_short, kWidth, kHeight, 1, pixels.data()));
    if (size < 2) continue;
    cut_short[size - 2] = 0xff;  // ends as if it were whole
    cut_short[size - 1] = 0xd9;
    CHECK(!cut(cut_short, part).taken || size > file.size() - 4);
  }
  Bytes odd = file;
  odd.insert(odd.begin() + 2, 3, std::uint8_t{0});  // at which libjpeg only warns
  CHECK(!cut(odd, part).taken);
}

void any_bytes_do_no_harm() {
  std::mt19937 random(4);
  const std::vector<Bytes> files = {file_of({}), file_of({true}), file_of({false, 1, 2, false, 2})};
  for (int round = 0; round < 1000; ++round) {
    Bytes file = files[random() % files.size()];
    const std::size_t reach = round % 2 == 0 ? 700 : file.size();  // most tables lie at the front
    for (auto count = random() % 4 + 1; count > 0; --count) {
      file[random() % reach] = static_cast<std::uint8_t>(random());
    }
    const std::uint32_t shrink = 1u << random() % 4;
    const std::uint32_t width = shrunk(kWidth, shrink), height = shrunk(kHeight, shrink);
    const auto left = static_cast<std::uint32_t>(random() % width);
    const auto top = static_cast<std::uint32_t>(random() % height);
    cut(file, part_of(shrink, left, top, width - left, height - top));
  }
}

void nonsense_is_refused() {
  const Bytes file = file_of({});
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(3, 0, 0, 10, 10)));
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(0, 0, 0, 10, 10)));
  Bytes none;
  CHECK_THROWS(stoker::ConfigError, stoker::decode_jpeg(file, kWidth, kHeight, 3, none.data()));
  CHECK_THROWS(stoker::ConfigError, stoker::decode_jpeg(file, kWidth, kHeight, 0, none.data()));
  CHECK_THROWS(stoker::ConfigError, stoker::decode_jpeg(file, 0, kHeight, 1, none.data()));
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(1, 0, 0, kWidth + 1, 10)));
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(2, 0, 0, 10, kHeight)));
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(1, 4, 4, 0, 10)));
  CHECK_THROWS(stoker::ConfigError, cut(file, part_of(1, 0, 0, kWidth, 10), 2));
  stoker::JpegPart backwards = part_of(1, 0, 0, 10, 10);
  backwards.across.first = 20;
  CHECK_THROWS(stoker::ConfigError, cut(file, backwards));
  backwards = part_of(1, 0, 0, 10, 10);
  backwards.down.first = 4'000'000'000u;
  CHECK_THROWS(stoker::ConfigError, cut(file, backwards));
}

}  // namespace

int main() {
  a_part_is_that_of_the_whole();
  other_kinds_are_left_to_others();
  damage_is_noticed();
  any_bytes_do_no_harm();
  nonsense_is_refused();
  CHECK(std::strlen(stoker::jpeg_version()) > 3);
  return check::failures();
}
