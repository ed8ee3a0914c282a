// CRC-32C (Castagnoli), in hardware where the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes);

}  // namespace stoker
