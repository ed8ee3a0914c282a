// Where the blocks are: in the segment's memory, or in a file read and written by pread and pwrite.
//
// A file holds nothing but blocks and one self-checksummed record per id. Nothing volatile is in
// it, and it is never mapped: an I/O error or a full disk is an error code, not a SIGBUS.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "stoker/layout.h"
#include "stoker/own_descriptor.h"

namespace stoker {

// What a file remembers of a published sample.
struct Record {
  std::uint64_t generation;
  std::uint32_t id;
  std::uint32_t length;
  std::uint32_t crc;  // of the payload
  std::uint32_t extents[4];
  std::uint32_t self_crc;  // of all the above
  std::uint32_t unused[6];
};
static_assert(sizeof(Record) == 64);

// Bytes of a file, from the first block on, that hold no data.
struct Hole {
  std::uint64_t begin;
  std::uint64_t end;
};

class BlockStore {
 public:
  virtual ~BlockStore() = default;
  // Both copy `bytes` at the start of `extent`; false on an I/O error.
  virtual bool read(Extent extent, void* to, std::uint64_t bytes) const = 0;
  virtual bool write(Extent extent, const void* from, std::uint64_t bytes) = 0;
  virtual void prefetch(Extent) const {}
  virtual bool checksummed() const = 0;
  virtual bool put_record(const Record&) { return true; }
  // Reads up to records.size() records from id `first` on; false on an I/O error.
  virtual bool get_records(std::uint32_t, std::span<Record>) const { return false; }
  virtual int descriptor() const { return -1; }
  // Has the system keep room for the blocks from `begin` to before `end`; 0 or the errno.
  virtual int take(std::uint32_t begin, std::uint32_t end) = 0;
  // Gives the system the room of all blocks from `begin` on, which read as zeros then; 0 or the
  // errno.
  virtual int give_back(std::uint32_t begin) = 0;

  static std::uint32_t self_crc(const Record& record);
};

// `descriptor`: of the memory; it stays the caller's.
std::unique_ptr<BlockStore> memory_blocks(const Header* header, unsigned char* data,
                                          int descriptor);

class FileBlocks : public BlockStore {
 public:
  // Opens or creates the file for this geometry and holds it under a shared lock, so that no
  // process rebuilds it in the meantime. One whose maker died before the end is begun again; no
  // other file is touched. Throws SegmentError (no segment, other geometry, in use) and
  // CapacityError (no room on the disk). A new one has room for the reserved blocks.
  FileBlocks(const Header* header, const std::string& path);
  // The file of a segment that was attached. Takes over the descriptor. Throws SegmentError.
  FileBlocks(const Header* header, int descriptor);

  bool read(Extent extent, void* to, std::uint64_t bytes) const override;
  bool write(Extent extent, const void* from, std::uint64_t bytes) override;
  bool checksummed() const override { return true; }
  bool put_record(const Record& record) override;
  bool get_records(std::uint32_t first, std::span<Record> records) const override;
  int descriptor() const override { return file_.number(); }
  // With the first blocks goes what lies before them. A file system that cannot keep room says 0,
  // and tells at each write instead.
  int take(std::uint32_t begin, std::uint32_t end) override;
  int give_back(std::uint32_t begin) override;
  bool is_new() const { return is_new_; }
  // In order; none where the file has all the room that it may have, or nothing is known.
  std::vector<Hole> holes() const;
  // Others may open the file from now on (through the segment).
  void share();

 private:
  off_t bytes() const;
  off_t size(const std::string& path) const;
  bool begun() const;
  void resize(const std::string& path);
  void create(const std::string& path);
  void check(const std::string& path) const;

  const Header* header_;
  OwnDescriptor file_;
  bool is_new_ = false;
};

}  // namespace stoker
