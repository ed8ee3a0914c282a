#include "stoker/block_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "stoker/crc32c.h"
#include "stoker/error.h"
#include "stoker/racy_copy.h"
#include "stoker/segment.h"

namespace stoker {
namespace {

constexpr char kFileMagic[8] = {'S', 'T', 'K', 'R', 'F', 'I', 'L', 'E'};
constexpr off_t kPage = 4096;

struct FileHeader {
  char magic[8];
  std::uint32_t abi;
  std::uint32_t num_ids;
  std::uint32_t block_size;
  std::uint32_t num_blocks;
  std::uint64_t capacity;
  std::uint32_t self_crc;
  std::uint32_t unused;
};

FileHeader file_header(const Header* header) {
  FileHeader file{};
  std::memcpy(file.magic, kFileMagic, sizeof(kFileMagic));
  file.abi = kAbi;
  file.num_ids = header->num_ids;
  file.block_size = header->block_size;
  file.num_blocks = header->num_blocks;
  file.capacity = header->capacity;
  file.self_crc = crc32c(0, &file, offsetof(FileHeader, self_crc));
  return file;
}

bool pread_all(int descriptor, void* to, std::uint64_t bytes, off_t at) {
  auto* out = static_cast<unsigned char*>(to);
  while (bytes > 0) {
    const ssize_t done = pread(descriptor, out, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    out += done;
    at += done;
    bytes -= static_cast<std::uint64_t>(done);
  }
  return true;
}

bool pwrite_all(int descriptor, const void* from, std::uint64_t bytes, off_t at) {
  const auto* in = static_cast<const unsigned char*>(from);
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor, in, bytes, at);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    in += done;
    at += done;
    bytes -= static_cast<std::uint64_t>(done);
  }
  return true;
}

bool lock_file(int descriptor, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = 0;
  lock.l_len = 1;
  return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

class MemoryBlocks : public BlockStore {
 public:
  MemoryBlocks(const Header* header, unsigned char* data) : header_(header), data_(data) {}

  bool read(Extent extent, void* to, std::uint64_t bytes) const override {
    racy_copy(to, at(extent), bytes);
    return true;
  }
  bool write(Extent extent, const void* from, std::uint64_t bytes) override {
    racy_copy(at(extent), from, bytes);
    return true;
  }
  void prefetch(Extent extent) const override {
    const unsigned char* first = at(extent);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(first + 64 * line);
  }
  bool checksummed() const override { return false; }

 private:
  unsigned char* at(Extent extent) const {
    return data_ + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  }
  const Header* header_;
  unsigned char* data_;
};

}  // namespace

std::uint32_t BlockStore::self_crc(const Record& record) {
  return crc32c(0, &record, offsetof(Record, self_crc));
}

std::unique_ptr<BlockStore> memory_blocks(const Header* header, unsigned char* data) {
  return std::make_unique<MemoryBlocks>(header, data);
}

FileBlocks::FileBlocks(const Header* header, const std::string& path) : header_(header) {
  descriptor_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor_ < 0) throw SegmentError(describe_errno("open " + path, errno));
  try {
    if (!lock_file(descriptor_, F_WRLCK)) {
      throw SegmentError(path +
                         " is in use by another process: share its arena, or use another path");
    }
    struct stat status{};
    if (fstat(descriptor_, &status) != 0) throw SegmentError(describe_errno("stat " + path, errno));
    if (status.st_size == 0 || unfinished(status.st_size)) {
      create(path);
    } else {
      check(path);
    }
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

FileBlocks::FileBlocks(const Header* header, int descriptor) : header_(header) {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);  // a lock of our own
  const int code = errno;
  close(descriptor);
  if (descriptor_ < 0) throw SegmentError(describe_errno("open the segment's file", code));
  lock_file(descriptor_, F_RDLCK);
}

FileBlocks::~FileBlocks() {
  if (descriptor_ >= 0) close(descriptor_);
}

off_t FileBlocks::bytes() const {
  return static_cast<off_t>(header_->file_data_at +
                            std::uint64_t{header_->num_blocks} * header_->block_size);
}

// Whether the file's maker died before it wrote the first page.
bool FileBlocks::unfinished(off_t size) const {
  const std::vector<char> zeros(kPage, 0);
  std::vector<char> first(kPage);
  return size == bytes() && pread_all(descriptor_, first.data(), first.size(), 0) && first == zeros;
}

void FileBlocks::create(const std::string& path) {
  // The room is taken now; a file system that cannot do that tells at each write instead.
  int code = reserve_pages(descriptor_, bytes());
  if (code == EOPNOTSUPP) code = ftruncate(descriptor_, bytes()) == 0 ? 0 : errno;
  if (code != 0) {
    if (ftruncate(descriptor_, 0) == 0) unlink(path.c_str());
    throw CapacityError(
        describe_errno("reserve " + std::to_string(bytes()) + " bytes of disk in " + path, code));
  }
  const FileHeader file = file_header(header_);
  if (!pwrite_all(descriptor_, &file, sizeof(file), 0)) {
    throw CapacityError(describe_errno("write " + path, errno));
  }
}

void FileBlocks::check(const std::string& path) const {
  FileHeader found{};
  const FileHeader wanted = file_header(header_);
  if (!pread_all(descriptor_, &found, sizeof(found), 0) ||
      std::memcmp(found.magic, kFileMagic, sizeof(kFileMagic)) != 0) {
    throw SegmentError(path + " is not a Stoker segment: use another path");
  }
  if (found.abi != kAbi) {
    throw SegmentError(path + " has layout version " + std::to_string(found.abi) +
                       ", this Stoker reads version " + std::to_string(kAbi));
  }
  if (std::memcmp(&found, &wanted, sizeof(found)) != 0) {
    throw SegmentError(path + " was made for " + std::to_string(found.num_ids) + " ids and " +
                       std::to_string(found.capacity) + " bytes, not " +
                       std::to_string(wanted.num_ids) + " ids and " +
                       std::to_string(wanted.capacity) + " bytes: use another path");
  }
}

void FileBlocks::share() { lock_file(descriptor_, F_RDLCK); }

bool FileBlocks::read(Extent extent, void* to, std::uint64_t bytes) const {
  const std::uint64_t at =
      header_->file_data_at + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  return pread_all(descriptor_, to, bytes, static_cast<off_t>(at));
}

bool FileBlocks::write(Extent extent, const void* from, std::uint64_t bytes) {
  const std::uint64_t at =
      header_->file_data_at + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  return pwrite_all(descriptor_, from, bytes, static_cast<off_t>(at));
}

bool FileBlocks::put_record(const Record& record) {
  return pwrite_all(descriptor_, &record, sizeof(record),
                    kPage + static_cast<off_t>(record.id) * static_cast<off_t>(sizeof(record)));
}

bool FileBlocks::get_records(std::uint32_t first, std::span<Record> records) const {
  return pread_all(descriptor_, records.data(), records.size_bytes(),
                   kPage + static_cast<off_t>(first) * static_cast<off_t>(sizeof(Record)));
}

}  // namespace stoker
