// A file of a segment on disk, as a bad disk or another program may have left it: opened,
// recovered, read, written to.
//
// The input: one byte of flags and what lies over a sound file. With kSigned set, checksums of
// records are made right again, so that what they say is believed.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "overlay.h"
#include "stoker/arena.h"
#include "stoker/block_store.h"
#include "stoker/crc32c.h"
#include "stoker/error.h"

using stoker::Arena;
using stoker::Record;

namespace {

constexpr std::uint32_t kIds = 32;
constexpr std::size_t kRecords = 4096;
constexpr std::uint8_t kSigned = 1;
constexpr std::uint8_t kInUse = 2;  // spoilt while it is open, not before
constexpr stoker::Geometry kGeometry{kIds, 40'000, 1000, true, true, 1};

std::string path_of(int file) { return "/proc/self/fd/" + std::to_string(file); }

void put(Arena& arena, std::uint32_t id, std::uint64_t length) {
  const std::vector<unsigned char> bytes(length, static_cast<unsigned char>(id));
  const stoker::Sample sample{bytes.data(), bytes.size()};
  const double key = id;
  bool admitted;
  arena.put({&id, 1}, &sample, {0, stoker::kNone, &key, nullptr}, &admitted);
}

std::vector<unsigned char> sound_file() {
  const int file = memfd_create("file", MFD_CLOEXEC);
  {
    Arena arena(kGeometry, path_of(file));
    for (std::uint32_t i = 0; i < 3 * kIds; ++i) put(arena, i * 7 % kIds, i * 331 % 9000);
  }
  std::vector<unsigned char> bytes(static_cast<std::size_t>(lseek(file, 0, SEEK_END)));
  if (pread(file, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) abort();
  close(file);
  return bytes;
}

void sign(std::vector<unsigned char>& bytes) {
  for (std::uint32_t id = 0; id < kIds; ++id) {
    const std::size_t at = kRecords + id * sizeof(Record);
    if (at + sizeof(Record) > bytes.size()) return;
    Record record;
    std::memcpy(&record, &bytes[at], sizeof(record));
    record.self_crc = stoker::BlockStore::self_crc(record);
    std::memcpy(&bytes[at], &record, sizeof(record));
  }
}

void overwrite(int file, const std::vector<unsigned char>& bytes) {
  if (ftruncate(file, 0) != 0 ||
      pwrite(file, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    abort();
  }
}

void read_all(Arena& arena) {
  for (std::uint32_t id = 0; id < kIds; ++id) {
    Arena::Snapshot snapshot{};
    std::vector<unsigned char> out(arena.measure({&id, 1}, &snapshot) + 1);
    std::int64_t offsets[2];
    bool found;
    arena.get({&id, 1}, &snapshot, out.data(), offsets, &found);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<unsigned char> sound = sound_file();
  std::vector<unsigned char> bytes = sound;
  bytes.resize(2 * sound.size());
  const std::uint8_t flags = size > 0 ? data[0] : 0;
  const std::size_t rest = size > 0 ? size - 1 : 0;
  bytes.resize(overlay(bytes.data(), sound.size(), bytes.size(), data + (size - rest), rest));
  if ((flags & kSigned) != 0) sign(bytes);
  const int file = memfd_create("file", MFD_CLOEXEC);
  overwrite(file, (flags & kInUse) != 0 ? sound : bytes);
  try {
    Arena arena(kGeometry, path_of(file));
    if ((flags & kInUse) != 0) overwrite(file, bytes);
    arena.verify();
    read_all(arena);
    for (std::uint32_t id = 0; id < kIds; id += 3) put(arena, id, 1500 + id);
    read_all(arena);
    for (std::uint32_t id = 0; id < kIds; ++id) arena.discard({&id, 1});
    arena.verify();
    if (arena.counters().free_blocks != arena.header().num_blocks) abort();
  } catch (const stoker::SegmentError& error) {
    if (std::strstr(error.what(), "invariant") != nullptr) abort();
  } catch (const stoker::CapacityError&) {
  }
  close(file);
  return 0;
}
