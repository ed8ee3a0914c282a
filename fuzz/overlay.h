// A fuzzer's input, laid over bytes that are sound: {offset:4, length:2, bytes}, again and again.
// So a few bytes reach every field. Offset 0xffffffff changes the size, to 64 times as many bytes
// as follow.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Returns the size that the bytes have then, at most `room`.
static inline size_t overlay(unsigned char* bytes, size_t size, size_t room, const uint8_t* data,
                             size_t left) {
  while (left >= 6) {
    uint32_t at;
    uint16_t length;
    memcpy(&at, data, 4);
    memcpy(&length, data + 4, 2);
    data += 6;
    left -= 6;
    const size_t count = length < left ? length : left;
    if (at == UINT32_MAX) size = 64 * count < room ? 64 * count : room;
    if (at < size) memcpy(bytes + at, data, count < size - at ? count : size - at);
    data += count;
    left -= count;
  }
  return size;
}
