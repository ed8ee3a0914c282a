#include "stoker/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "stoker/blocks.h"
#include "stoker/error.h"
#include "stoker/heap.h"

namespace stoker {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kFileRecord = 64;  // see block_store.cpp
constexpr std::uint64_t kMostCapacity = std::uint64_t{1} << 60;

std::uint64_t pages(std::uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// A blank segment is not shared: its memory is private,
// which the kernel gives in large pages.
unsigned char* map(int descriptor, std::uint64_t bytes, bool blank = false, bool to_read = false) {
  const int how = blank ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  const int may = to_read ? PROT_READ : PROT_READ | PROT_WRITE;
  void* base = mmap(nullptr, bytes, may, how, blank ? -1 : descriptor, 0);
  if (blank && base != MAP_FAILED) madvise(base, bytes, MADV_HUGEPAGE);
  if (base != MAP_FAILED) return static_cast<unsigned char*>(base);
  const int code = errno;
  const std::string what = "map " + std::to_string(bytes) + " bytes of a segment";
  if (code == ENOMEM) throw CapacityError(describe_errno(what, code));
  throw SegmentError(describe_errno(what, code));
}

}  // namespace

std::uint32_t blocks_within(const Header& header, std::uint64_t limit) {
  if (limit >= header.capacity) return header.num_blocks;
  const double share = static_cast<double>(limit) / static_cast<double>(header.capacity);
  const auto blocks = static_cast<std::uint64_t>(share * header.num_blocks) + 64;
  const std::uint64_t at_once = std::max<std::uint64_t>(1, kPage / header.block_size);
  const std::uint64_t whole = (blocks + at_once - 1) / at_once * at_once;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(whole, header.num_blocks));
}

std::uint64_t end_of(const Header& header, std::uint32_t blocks) {
  const std::uint64_t bytes = std::uint64_t{blocks} * header.block_size;
  return header.on_disk != 0 ? header.file_data_at + bytes : header.data_at + pages(bytes);
}

std::uint64_t memory_of(const Header& header, std::uint32_t blocks) {
  return header.on_disk != 0 ? header.total_bytes : end_of(header, blocks);
}

int reserve_pages(int descriptor, off_t bytes, off_t from) {
  constexpr off_t kPiece = off_t{64} << 20;
  for (off_t at = from; at < from + bytes;) {
    if (fallocate(descriptor, 0, at, std::min(kPiece, from + bytes - at)) == 0) {
      at += kPiece;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

namespace {

constexpr std::uintptr_t kPiece = 64 << 10;  // of memory that is mapped at once, at least

}  // namespace

Mapped::Mapped(const unsigned char* begin, std::uint64_t bytes)
    : begin_(reinterpret_cast<std::uintptr_t>(begin)),
      marks_(std::make_unique<std::atomic<std::uint64_t>[]>(bytes / kPiece / 64 + 2)) {}

void Mapped::bring(std::span<const unsigned char> part, const unsigned char* end) {
  const auto from = reinterpret_cast<std::uintptr_t>(part.data());
  const std::uintptr_t behind = (from + part.size() + kPiece - 1) / kPiece;
  for (std::uintptr_t piece = from / kPiece; piece < behind; ++piece) {
    const std::uintptr_t first = piece;
    while (piece < behind && mark(piece)) ++piece;
    if (piece == first) continue;
    const std::uintptr_t begin = std::max(first * kPiece, begin_);
    const std::uintptr_t stop = std::min(piece * kPiece, reinterpret_cast<std::uintptr_t>(end));
    madvise(reinterpret_cast<void*>(begin), stop - begin, MADV_POPULATE_WRITE);
  }
}

// False if it was marked before.
bool Mapped::mark(std::uintptr_t piece) {
  const std::uintptr_t number = piece - begin_ / kPiece;
  std::atomic<std::uint64_t>& word = marks_[number / 64];
  const std::uint64_t bit = std::uint64_t{1} << (number % 64);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) return false;
  return (word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
}

void Segment::plan(const Geometry& geometry, Header& h) {
  h.abi = kAbi;
  h.num_ids = geometry.num_ids;
  h.capacity = geometry.capacity;
  h.mean_size = geometry.mean_size;
  h.on_disk = geometry.on_disk;
  h.exact = geometry.exact;
  h.blank = geometry.blank;
  h.random = geometry.seed * 2 + 1;
  // Small blocks waste little, large ones keep samples in one piece: about an eighth does both.
  std::uint64_t block = std::bit_ceil(std::max<std::uint64_t>(geometry.mean_size / 8, 1));
  block = std::clamp<std::uint64_t>(block, 64, kPage);
  if (geometry.on_disk) block = std::max<std::uint64_t>(block, 512);
  const std::uint64_t samples =
      std::min<std::uint64_t>(geometry.capacity / geometry.mean_size + 1, geometry.num_ids);
  std::uint64_t blocks = 0;
  for (;; block *= 2) {
    // Payload, what samples leave of their last blocks (half of one, or what all lose that have
    // the mean size), and 5 % kept free so that runs are found.
    const std::uint64_t whole = (geometry.mean_size + block - 1) / block * block;
    const std::uint64_t lost = std::max(5 * block / 8, whole - geometry.mean_size);
    blocks = geometry.capacity / block +
             std::min<std::uint64_t>(samples * lost / block, kSpilled / 2) +
             geometry.capacity / 20 / block + 64;
    if (blocks < kSpilled) break;
  }
  if (geometry.blank) blocks = 0;
  h.block_size = static_cast<std::uint32_t>(block);
  h.num_blocks = static_cast<std::uint32_t>(blocks);
  h.limit = std::min(geometry.limit, geometry.capacity);
  h.usable_blocks = h.reserved_blocks = blocks_within(h, h.limit);
  const std::uint64_t nodes =
      geometry.blank ? geometry.num_ids : std::min<std::uint64_t>(geometry.num_ids, 2 * blocks);
  h.num_chunks = static_cast<std::uint32_t>(nodes / kChunkNodes + kMaxRegions + 1);
  const std::uint64_t leased = geometry.blank ? 0 : nodes / 8;
  h.num_leases = static_cast<std::uint32_t>(std::min<std::uint64_t>(leased + 4096, 1u << 24));
  std::uint64_t at = pages(sizeof(Header));
  const auto take = [&at](std::uint64_t bytes) {
    const std::uint64_t here = at;
    at += pages(bytes);
    return here;
  };
  h.slots_at = take(sizeof(Slot) * kMaxSlots);
  h.entries_at = take(sizeof(Entry) * geometry.num_ids);
  h.ranks_at = geometry.blank ? h.entries_at + offsetof(Entry, extents)
                              : take(sizeof(Rank) * geometry.num_ids);
  h.bitmap_at = take(Blocks::words(h.num_blocks) * sizeof(std::uint64_t));
  h.chunks_at = take(Heap::chunk_words(h.num_chunks) * sizeof(std::uint32_t));
  h.nodes_at = take(static_cast<std::uint64_t>(h.num_chunks) * kChunkNodes * sizeof(Node));
  h.heap_positions_at =
      take(static_cast<std::uint64_t>(h.num_chunks) * kChunkNodes * sizeof(std::uint32_t));
  h.leases_at = take(h.num_leases * sizeof(Lease));
  h.data_at = at;
  if (geometry.on_disk) {
    h.file_data_at = kPage + pages(kFileRecord * geometry.num_ids);
  } else {
    at += pages(blocks * block);
  }
  h.total_bytes = at;
  h.magic = kMagic;
}

Segment Segment::create(const Geometry& geometry) {
  Header header{};
  plan(geometry, header);
  OwnDescriptor memory(memfd_create("stoker", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int descriptor = memory.number();
  if (descriptor < 0) throw CapacityError(describe_errno("memfd_create", errno));
  const auto bytes = static_cast<off_t>(geometry.blank ? 0 : header.total_bytes);
  // Reserved now, since a page that is not available later would be a SIGBUS in some process's
  // memcpy.
  int code = ftruncate(descriptor, bytes) != 0 ? errno : 0;
  const auto needed =
      static_cast<off_t>(geometry.blank ? 0 : memory_of(header, header.reserved_blocks));
  if (code == 0) code = reserve_pages(descriptor, needed);
  if (code != 0) {
    throw CapacityError(describe_errno(
        "reserve " + std::to_string(needed) + " bytes of memory for a cache of " +
            std::to_string(header.capacity) + " payload bytes; ask for a smaller cache",
        code));
  }
  // A user who gets a descriptor to read could open it again to write: its mode says who may.
  if (fchmod(descriptor, 0600) != 0) throw SegmentError(describe_errno("fchmod", errno));
  fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  unsigned char* base = map(descriptor, header.total_bytes, geometry.blank);
  Segment segment(std::move(memory), base, header.total_bytes);
  madvise(segment.base_ + header.data_at, header.total_bytes - header.data_at, MADV_HUGEPAGE);
  plan(geometry, *new (segment.base_) Header());
  return segment;
}

namespace {

// A layout follows from its geometry, so only one is right. What would not fit is rejected
// first, so that nothing overflows while it is worked out.
bool is_laid_out(const Header& found, std::uint64_t bytes) {
  if (found.num_ids == 0 || found.num_ids > bytes / sizeof(Entry) || found.mean_size == 0 ||
      found.on_disk > 1 || found.exact > 1 || found.blank != 0 ||
      found.capacity > (found.on_disk ? kMostCapacity : bytes)) {
    return false;
  }
  Header planned{};
  Segment::plan({found.num_ids, found.capacity, found.mean_size, found.on_disk != 0,
                 found.exact != 0, 0, false},
                planned);
  return std::memcmp(&found, &planned, offsetof(Header, blank) + 1) == 0;
}

}  // namespace

Segment Segment::attach(int descriptor, bool to_read) {
  OwnDescriptor memory(descriptor);
  // Before its size is trusted: memory that shrinks later would be a SIGBUS in some memcpy.
  const int seals = fcntl(descriptor, F_GET_SEALS);
  struct stat status{};
  if (seals < 0 || fstat(descriptor, &status) != 0 ||
      status.st_size < static_cast<off_t>(pages(sizeof(Header)))) {
    throw SegmentError("the descriptor is not a Stoker segment");
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    throw SegmentError("the descriptor is not a Stoker segment: its memory may shrink");
  }
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  unsigned char* base = map(descriptor, bytes, false, to_read);
  Segment segment(std::move(memory), base, bytes);
  const Header& header = *segment.header();
  if (header.magic != kMagic) throw SegmentError("the descriptor is not a Stoker segment");
  if (header.abi != kAbi) {
    throw SegmentError("the segment has layout version " + std::to_string(header.abi) +
                       ", this Stoker reads version " + std::to_string(kAbi) +
                       ": use the same Stoker in all jobs that share a cache");
  }
  if (header.total_bytes != bytes) throw SegmentError("the segment is truncated");
  // Another process may change these two at any time, but not beyond what is there.
  const bool is_bounded =
      header.usable_blocks - 1 < header.num_blocks && header.reserved_blocks <= header.num_blocks;
  if (!is_laid_out(header, bytes) || !is_bounded) {
    throw SegmentError("the segment's layout is damaged: restart the jobs that share it");
  }
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(other.bytes_),
      mapped_(std::move(other.mapped_)) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

}  // namespace stoker
