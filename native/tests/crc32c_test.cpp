#include "stoker/crc32c.h"

#include <random>
#include <vector>

#include "check.h"

namespace {

std::uint32_t bit_by_bit(const unsigned char* data, std::size_t bytes) {
  std::uint32_t crc = 0xffffffff;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

void published_values() {
  CHECK(stoker::crc32c(0, "123456789", 9) == 0xe3069283);
  CHECK(stoker::crc32c(0, "", 0) == 0);
  const std::vector<unsigned char> zeros(32, 0);
  CHECK(stoker::crc32c(0, zeros.data(), 32) == 0x8a9136aa);
}

void any_length_and_alignment() {
  std::mt19937 random(1);
  std::vector<unsigned char> data(300);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  for (std::size_t from = 0; from < 9; ++from) {
    for (std::size_t bytes = 0; from + bytes <= data.size(); ++bytes) {
      CHECK(stoker::crc32c(0, &data[from], bytes) == bit_by_bit(&data[from], bytes));
    }
  }
}

void in_two_steps_as_in_one() {
  const char text[] = "a batch of samples";
  for (std::size_t cut = 0; cut < sizeof(text); ++cut) {
    CHECK(stoker::crc32c(stoker::crc32c(0, text, cut), text + cut, sizeof(text) - cut) ==
          stoker::crc32c(0, text, sizeof(text)));
  }
}

}  // namespace

int main() {
  published_values();
  any_length_and_alignment();
  in_two_steps_as_in_one();
  return check::failures();
}
