#include "stoker/huffman.h"

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"

namespace {

using Bytes = std::vector<std::uint8_t>;

// Codes of 1, 2, 3 and 12 bits: 16 zeros, a value of one bit, the end of a block; a value of ten
// bits behind 15 zeros.
const std::string kZeros = "0", kValue = "10", kEnd = "110", kLong = "111000000000";
constexpr std::uint8_t kCounts[17] = {0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1};
constexpr std::uint8_t kSymbols[] = {0xf0, 0x01, 0x00, 0xfa};
constexpr std::uint8_t kMeanSymbols[] = {0, 1, 2, 15};
const std::string kSameMean = "0";

std::string times(int count, const std::string& bits) {
  std::string all;
  for (int i = 0; i < count; ++i) all += bits;
  return all;
}

// Whole bytes, the last filled up with ones, with a 0 behind each 255.
Bytes bytes_of(std::string bits) {
  bits.resize((bits.size() + 7) / 8 * 8, '1');
  Bytes bytes;
  for (std::size_t at = 0; at < bits.size(); at += 8) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(bits.substr(at, 8), nullptr, 2)));
    if (bytes.back() == 255) bytes.push_back(0);
  }
  return bytes;
}

struct Scan {
  explicit Scan(const Bytes& data) {
    dc.fill(kCounts, kMeanSymbols, true);
    ac.fill(kCounts, kSymbols, false);
    reader.open(data);
    reader.add({&dc, &ac, 0, false});
  }
  bool read() {
    std::fill_n(block, 64, std::int16_t{0});
    stoker::ScanReader::Coefficients* const blocks[] = {&block};
    return reader.read(blocks);
  }
  bool skip() { return reader.read(nullptr); }

  stoker::HuffmanTable dc, ac;
  stoker::ScanReader reader;
  std::int16_t block[64];
};

long count(const Scan& scan, std::int16_t value) {
  return std::count(std::begin(scan.block), std::end(scan.block), value);
}

void values_are_read() {
  const Bytes data = bytes_of(
      "1101"
      "0" +
      kValue + "1" + kValue + "0" + kLong + "1000000001" + kEnd + "101" + kValue + "1" + kEnd);
  Scan scan(data);
  CHECK(scan.read());
  CHECK(scan.block[0] == 2 && scan.block[1] == 1 && scan.block[8] == -1);
  CHECK(count(scan, 0x201) == 1 && count(scan, 0) == 60);
  CHECK(scan.read());
  CHECK(scan.block[0] == 3 && scan.block[1] == 1 && count(scan, 0) == 62);
}

void bytes_of_255_are_read() {
  for (int shift = 0; shift < 8; ++shift) {
    const std::string block =
        kSameMean + times(shift, kValue + "0") + times(3, kLong + "1111111111");
    const Bytes data = bytes_of(times(20, block + kEnd));
    CHECK(std::count(data.begin(), data.end(), 255) >= 10);
    Scan scan(data);
    for (int i = 0; i < 20; ++i) CHECK(scan.read() && count(scan, 0x3ff) == 3);
  }
}

// Two values are looked up at once, but the second may begin another block.
void a_full_block_has_no_end() {
  for (const std::string& value : {kValue + "0", kValue + "1"}) {
    const Bytes data = bytes_of(times(3, kSameMean + times(63, value)) + times(30, kEnd));
    Scan scan(data);
    CHECK(scan.read() && count(scan, value == kValue + "1" ? 1 : -1) == 63);
    CHECK(scan.skip());
    CHECK(scan.read() && scan.block[63] == (value == kValue + "1" ? 1 : -1));
  }
}

// As libjpeg has it: the first one too many is taken for the last, and ends the block.
void too_many_values_end_a_block() {
  const std::string most = kSameMean + times(3, kZeros) + times(14, kValue + "1");
  for (const std::string& next : {kSameMean, "10" + std::string("1")}) {
    const Bytes data = bytes_of(most + kLong + "1000000001" + next + kValue + "1" + kEnd);
    Scan scan(data);
    CHECK(scan.read() && scan.block[63] == 0x201 && count(scan, 1) == 14);
    CHECK(scan.read() && scan.block[1] == 1 && count(scan, 0) == (next == kSameMean ? 63 : 62));
  }
  for (const std::string& bits : {most + kZeros, most + kZeros + kSameMean}) {
    const Bytes data = bytes_of(bits + kSameMean + kEnd + times(30, kSameMean + kEnd));
    Scan scan(data);
    CHECK(scan.read() && scan.block[63] == 0 && count(scan, 1) == 14);
  }
}

void what_is_no_code_is_damage() {
  const Bytes data = bytes_of(kSameMean + times(20, "1"));
  CHECK(!Scan(data).read() && !Scan(data).skip());
  const Bytes mean = bytes_of(times(20, "1"));
  CHECK(!Scan(mean).read() && !Scan(mean).skip());
}

void the_end_is_noticed() {
  const std::string block = kSameMean + times(20, kValue + "1") + kEnd;
  for (const Bytes& end :
       {Bytes{}, Bytes{255}, Bytes{255, 0xd9}, Bytes{255, 0xd9, 1, 2, 3, 4, 5, 6}}) {
    Bytes data = bytes_of(times(8, block));  // whole bytes
    data.insert(data.end(), end.begin(), end.end());
    Scan scan(data);
    for (int i = 0; i < 8; ++i) CHECK(scan.read());
    CHECK(scan.reader.rest().size() == end.size());
    CHECK(!scan.read() && !scan.skip());
  }
}

}  // namespace

int main() {
  values_are_read();
  bytes_of_255_are_read();
  a_full_block_has_no_end();
  too_many_values_end_a_block();
  what_is_no_code_is_damage();
  the_end_is_noticed();
  return check::failures();
}
