// The memory that processes share: a sealed memfd, and for a segment on disk the file beside it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "stoker/layout.h"
#include "stoker/own_descriptor.h"

namespace stoker {

struct Geometry {
  std::uint32_t num_ids;
  std::uint64_t capacity;  // payload bytes
  std::uint64_t mean_size;
  bool on_disk;
  bool exact;
  std::uint64_t seed;
  bool blank = false;  // accounts for bytes, and stores none; for one thread at a time
  std::uint64_t limit = UINT64_MAX;  // payload bytes that fit at first, if less than `capacity`
};

// Takes the room for so many bytes of a file, in pieces, since a signal makes a long request begin
// again; they begin `from` a place. Returns 0 or the errno.
int reserve_pages(int descriptor, off_t bytes, off_t from = 0);
// The blocks that so many payload bytes take, of those that `header` plans for its capacity.
std::uint32_t blocks_within(const Header& header, std::uint64_t limit);
// Where so many blocks end, in the segment's memory or in its file.
std::uint64_t end_of(const Header& header, std::uint32_t blocks);
// Bytes of memory, with so many blocks.
std::uint64_t memory_of(const Header& header, std::uint32_t blocks);

// Which pages of shared memory this process can reach without asking the kernel. Thread-safe.
class Mapped {
 public:
  Mapped(const unsigned char* begin, std::uint64_t bytes);
  // Has the kernel map the pages of a part at once, and those around them as far as `end`, where it
  // is asked at each page that is touched first. Once each; that it may fail loses nothing.
  void bring(std::span<const unsigned char> part, const unsigned char* end);

 private:
  bool mark(std::uintptr_t piece);

  std::uintptr_t begin_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> marks_;  // a bit for each piece, from that on
};

class Segment {
 public:
  // Creates the memory, zeroed, its pages reserved. Throws CapacityError with the numbers.
  static Segment create(const Geometry& geometry);
  // Maps a segment that another process passed: its layout is checked, and that its memory cannot
  // shrink. Takes over the descriptor. Throws SegmentError.
  static Segment attach(int descriptor) { return attach(descriptor, false); }
  // The same for a descriptor that may only be read: nothing of this process can write there.
  static Segment attach_to_read(int descriptor) { return attach(descriptor, true); }
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  // Writes the sizes and offsets of such a segment into a zeroed header.
  static void plan(const Geometry& geometry, Header& header);

  const OwnDescriptor& descriptor() const { return descriptor_; }
  Header* header() const { return reinterpret_cast<Header*>(base_); }
  template <typename T>
  T* at(std::uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  Mapped& mapped() { return mapped_; }

 private:
  Segment(OwnDescriptor descriptor, unsigned char* base, std::uint64_t bytes)
      : descriptor_(std::move(descriptor)), base_(base), bytes_(bytes), mapped_(base, bytes) {}
  static Segment attach(int descriptor, bool to_read);

  OwnDescriptor descriptor_;
  unsigned char* base_;
  std::uint64_t bytes_;
  Mapped mapped_;
};

}  // namespace stoker
