#include "stoker/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

namespace stoker {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0x82f63b78u : 0u);
    table[i] = value;
  }
  return table;
}

std::uint32_t by_table(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  static constexpr auto kTable = make_table();
  while (bytes-- > 0) crc = (crc >> 8) ^ kTable[(crc ^ *data++) & 0xff];
  return crc;
}

#if defined(__x86_64__)
#if defined(__clang__)  // to which it is a feature of its own
#define STOKER_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define STOKER_CRC_TARGET __attribute__((target("sse4.2")))
#endif
bool has_hardware() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
#define STOKER_CRC_TARGET __attribute__((target("+crc")))
bool has_hardware() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#if defined(STOKER_CRC_TARGET)
STOKER_CRC_TARGET std::uint32_t by_hardware(std::uint32_t crc, const unsigned char* data,
                                            std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
#if defined(__x86_64__)
    crc = static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
#else
    crc = __crc32cd(crc, word);
#endif
  }
  return by_table(crc, data, bytes);
}
#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
#if defined(STOKER_CRC_TARGET)
  static const bool hardware = has_hardware();
  if (hardware) return ~by_hardware(~crc, from, bytes);
#endif
  return ~by_table(~crc, from, bytes);
}

}  // namespace stoker
