// A descriptor that another process passed: a segment, or bytes that look like one.
//
// The input lies over the image of a sound segment. What is rejected must be rejected by
// SegmentError; what is not must be readable, whatever it holds.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "overlay.h"
#include "stoker/arena.h"
#include "stoker/error.h"

using stoker::Arena;
using stoker::Header;

namespace {

constexpr std::uint32_t kIds = 40;

// A segment in use: samples of one and of many pieces, some evicted.
std::vector<unsigned char> sound_image() {
  Arena arena({kIds, 20'000, 1000, false, true, 1}, "");
  for (std::uint32_t i = 0; i < 2 * kIds; ++i) {
    const std::uint32_t id = i * 7 % kIds;
    const std::vector<unsigned char> bytes(i * 97 % 4000, static_cast<unsigned char>(id));
    const stoker::Sample sample{bytes.data(), bytes.size()};
    const double key = i;
    bool admitted;
    arena.put({&id, 1}, &sample, {0, stoker::kNone, &key, nullptr}, &admitted);
  }
  const std::uint64_t size = arena.header().total_bytes;
  const auto* begin = reinterpret_cast<const unsigned char*>(&arena.header());
  return {begin, begin + size};
}

// What is under the lock, but for the number of regions, and what is derived.
void restore(std::vector<unsigned char>& image, const std::vector<unsigned char>& sound) {
  const auto* header = reinterpret_cast<const Header*>(sound.data());
  const std::size_t parts[3][2] = {
      {offsetof(Header, clock), offsetof(Header, num_regions)},
      {offsetof(Header, limit), header->entries_at},
      {header->ranks_at, header->data_at},
  };
  for (const auto& [begin, end] : parts) {
    std::copy(sound.begin() + static_cast<std::ptrdiff_t>(begin),
              sound.begin() + static_cast<std::ptrdiff_t>(end),
              image.begin() + static_cast<std::ptrdiff_t>(begin));
  }
}

int image_with(const std::uint8_t* data, std::size_t size) {
  static const std::vector<unsigned char> sound = sound_image();
  std::vector<unsigned char> image = sound;
  image.resize(2 * sound.size());
  const std::size_t bytes = overlay(image.data(), sound.size(), image.size(), data, size);
  restore(image, sound);
  image.resize(bytes);
  const int memory = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (write(memory, image.data(), image.size()) != static_cast<ssize_t>(image.size())) abort();
  fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK);
  return memory;
}

void read_all(Arena& arena) {
  const std::uint32_t ids = std::min<std::uint32_t>(arena.header().num_ids, 4 * kIds);
  for (std::uint32_t id = 0; id < ids; ++id) {
    Arena::Snapshot snapshot{};
    std::uint8_t region;
    double key;
    bool found;
    const std::uint64_t most = arena.measure({&id, 1}, &snapshot);
    arena.where({&id, 1}, &region);
    arena.keys({&id, 1}, &key);
    arena.contains({&id, 1}, &found);
    if (most > (1u << 20)) continue;  // the caller's memory
    std::vector<unsigned char> out(most + 1);
    std::int64_t offsets[2];
    arena.get({&id, 1}, &snapshot, out.data(), offsets, &found);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int memory = image_with(data, size);
  try {
    Arena arena(memory, -1);
    read_all(arena);
  } catch (const stoker::SegmentError&) {
  }
  return 0;
}
