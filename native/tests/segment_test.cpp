#include "stoker/segment.h"

#include <sys/mman.h>

#include <cstring>

#include "kit.h"

using stoker::Header;
using stoker::Segment;
using stoker::SegmentError;

namespace {

// A copy of a segment's memory that may be spoilt; sealed as a segment is, unless asked otherwise.
template <typename Spoil>
int spoilt(off_t size, Spoil spoil, int seals = F_SEAL_SHRINK, bool on_disk = false) {
  const Segment segment = Segment::create(kit::geometry(10, 10'000, 1000, on_disk));
  const int copy = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(ftruncate(copy, static_cast<off_t>(segment.header()->total_bytes) + size) == 0);
  auto* header = static_cast<Header*>(
      mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, copy, 0));
  std::memcpy(static_cast<void*>(header), segment.header(), sizeof(Header));
  spoil(*header);
  munmap(header, sizeof(Header));
  CHECK(fcntl(copy, F_ADD_SEALS, seals) == 0);
  return copy;
}

void what_is_not_a_segment_is_refused() {
  const auto keep = [](Header&) {};
  CHECK(Segment::attach(spoilt(0, keep)).header()->num_ids == 10);
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(-4096, keep)));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(4096, keep)));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header& h) { h.magic ^= 1; })));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header& h) { ++h.abi; })));
  CHECK_THROWS(SegmentError, Segment::attach(memfd_create("empty", MFD_CLOEXEC)));
  int pipes[2];
  CHECK(pipe(pipes) == 0);
  CHECK_THROWS(SegmentError, Segment::attach(pipes[0]));
  CHECK_THROWS(SegmentError, Segment::attach(-1));
  close(pipes[1]);
}

void a_segment_cannot_be_cut() {
  const Segment segment = Segment::create(kit::geometry(10, 10'000));
  CHECK(ftruncate(segment.descriptor().number(), 4096) != 0);
}

// What is taken for a segment has its parts inside of the memory, whatever else its header says.
void n3_a_false_layout_is_refused() {
  for (const bool on_disk : {false, true}) {
    for (std::size_t at = 0; at < offsetof(Header, clock); ++at) {
      for (const unsigned flip : {0x01u, 0x10u, 0x80u, 0xffu}) {
        const int copy = spoilt(
            0, [&](Header& h) { reinterpret_cast<unsigned char*>(&h)[at] ^= flip; }, F_SEAL_SHRINK,
            on_disk);
        try {
          const Segment segment = Segment::attach(copy);
          const Header& h = *segment.header();
          CHECK((at >= offsetof(Header, num_ids) && at < offsetof(Header, block_size)) ||
                at == offsetof(Header, exact) || at > offsetof(Header, blank));
          CHECK(h.ranks_at - h.entries_at >= sizeof(stoker::Entry) * h.num_ids);
          CHECK(h.bitmap_at - h.ranks_at >= sizeof(stoker::Rank) * h.num_ids);
          CHECK(on_disk || h.total_bytes - h.data_at >= h.capacity);
        } catch (const SegmentError&) {
        }
      }
    }
  }
  CHECK_THROWS(SegmentError,
               Segment::attach(spoilt(0, [](Header& h) { h.entries_at = 1ull << 40; })));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header& h) { h.data_at += 8; })));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header& h) { h.mean_size = 0; })));
}

// It could be cut while a process copies.
void n3_memory_that_may_shrink_is_refused() {
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header&) {}, 0)));
  CHECK_THROWS(SegmentError, Segment::attach(spoilt(0, [](Header&) {}, F_SEAL_GROW)));
}

// No overflow for sizes far beyond this machine.
void huge_geometries() {
  for (const bool on_disk : {false, true}) {
    for (const std::uint64_t capacity : {0ull, 1ull << 41, 1ull << 50}) {
      for (const std::uint64_t mean : {1ull, 100'000ull, 1ull << 33}) {
        for (const std::uint32_t ids : {1u, 1'000'000u, 0xfffffffeu}) {
          Header header{};
          Segment::plan({ids, capacity, mean, on_disk, false, 0}, header);
          CHECK(header.num_blocks < stoker::kSpilled && header.num_blocks > 0);
          CHECK(std::uint64_t{header.num_blocks} * header.block_size >= capacity);
          CHECK(header.total_bytes >= header.data_at + (on_disk ? 0 : capacity));
          CHECK(header.nodes_at < header.leases_at && header.ranks_at < header.bitmap_at);
        }
      }
    }
  }
}

}  // namespace

int main() {
  what_is_not_a_segment_is_refused();
  a_segment_cannot_be_cut();
  n3_a_false_layout_is_refused();
  n3_memory_that_may_shrink_is_refused();
  huge_geometries();
  return check::failures();
}
