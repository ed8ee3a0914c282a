#include "stoker/block_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "stoker/crc32c.h"
#include "stoker/error.h"
#include "stoker/racy_copy.h"
#include "stoker/segment.h"

namespace stoker {
namespace {

constexpr char kFileMagic[] = "STKRFILE";
constexpr char kBegunMagic[] = "STKRMAKE";  // its maker has not finished, or died
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

FileHeader file_header(const Header* header, const char* magic = kFileMagic) {
  FileHeader file{};
  std::memcpy(file.magic, magic, sizeof(file.magic));
  file.abi = kFileAbi;
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

int punch(int descriptor, std::uint64_t from, std::uint64_t bytes) {
  constexpr int kHow = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (bytes == 0) return 0;
  const int code = fallocate(descriptor, kHow, static_cast<off_t>(from), static_cast<off_t>(bytes));
  return code == 0 ? 0 : errno;
}

class MemoryBlocks : public BlockStore {
 public:
  MemoryBlocks(const Header* header, unsigned char* data, int descriptor)
      : header_(header), data_(data), descriptor_(descriptor) {}

  bool read(Extent extent, void* to, std::uint64_t bytes) const override {
    racy_read(to, at(extent), bytes);
    return true;
  }
  bool write(Extent extent, const void* from, std::uint64_t bytes) override {
    racy_write(at(extent), from, bytes);
    return true;
  }
  void prefetch(Extent extent) const override {
    const unsigned char* first = at(extent);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(first + 64 * line);
  }
  bool checksummed() const override { return false; }
  int take(std::uint32_t begin, std::uint32_t end) override {
    const auto from = static_cast<off_t>(end_of(*header_, begin));
    return reserve_pages(descriptor_, static_cast<off_t>(end_of(*header_, end)) - from, from);
  }
  int give_back(std::uint32_t begin) override {
    const std::uint64_t from = end_of(*header_, begin);
    return punch(descriptor_, from, header_->total_bytes - from);
  }

 private:
  unsigned char* at(Extent extent) const {
    return data_ + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  }
  const Header* header_;
  unsigned char* data_;
  int descriptor_;
};

}  // namespace

std::uint32_t BlockStore::self_crc(const Record& record) {
  return crc32c(0, &record, offsetof(Record, self_crc));
}

std::unique_ptr<BlockStore> memory_blocks(const Header* header, unsigned char* data,
                                          int descriptor) {
  return std::make_unique<MemoryBlocks>(header, data, descriptor);
}

FileBlocks::FileBlocks(const Header* header, const std::string& path)
    : header_(header), file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
  if (!file_.is_open()) throw SegmentError(describe_errno("open " + path, errno));
  if (!lock_file(file_.number(), F_WRLCK)) {
    throw SegmentError(path +
                       " is in use by another process: share its arena, or use another path");
  }
  const off_t found = size(path);
  if (found == 0 || begun()) {
    create(path);
  } else {
    check(path);
    if (found < bytes()) resize(path);  // it was cut: what lay there is a miss
  }
}

FileBlocks::FileBlocks(const Header* header, int descriptor)
    : header_(header), file_(OwnDescriptor(descriptor).reopen()) {  // for a lock of our own
  const std::string name = "the segment's file";
  if (!file_.is_open()) throw SegmentError(describe_errno("open " + name, errno));
  const off_t found = size(name);
  check(name);
  if (found < bytes()) throw SegmentError(name + " is truncated");
  share();
}

off_t FileBlocks::bytes() const {
  return static_cast<off_t>(end_of(*header_, header_->num_blocks));
}

off_t FileBlocks::size(const std::string& path) const {
  struct stat status{};
  if (fstat(file_.number(), &status) != 0) {
    throw SegmentError(describe_errno("stat " + path, errno));
  }
  if (!S_ISREG(status.st_mode)) throw SegmentError(path + " is not a file: use another path");
  return status.st_size;
}

// Whether a maker that died before the end left its mark.
bool FileBlocks::begun() const {
  FileHeader found{};
  return pread_all(file_.number(), &found, sizeof(found), 0) &&
         std::memcmp(found.magic, kBegunMagic, sizeof(found.magic)) == 0 &&
         found.self_crc == crc32c(0, &found, offsetof(FileHeader, self_crc));
}

void FileBlocks::resize(const std::string& path) {
  if (ftruncate(file_.number(), bytes()) != 0) {
    throw CapacityError(
        describe_errno("resize " + path + " to " + std::to_string(bytes()) + " bytes", errno));
  }
}

// A process that dies on the way, or a power cut, leaves a file that is empty or says what it is.
void FileBlocks::create(const std::string& path) {
  const auto write_header = [&](const char* magic) {
    const FileHeader file = file_header(header_, magic);
    if (!pwrite_all(file_.number(), &file, sizeof(file), 0) || fsync(file_.number()) != 0) {
      throw CapacityError(describe_errno("write " + path, errno));
    }
  };
  try {
    if (ftruncate(file_.number(), 0) != 0)
      throw CapacityError(describe_errno("cut " + path, errno));
    write_header(kBegunMagic);
    const std::uint32_t end = header_->reserved_blocks;
    if (const int code = take(0, end); code != 0) {
      const std::string bytes = std::to_string(end_of(*header_, end));
      throw CapacityError(describe_errno("reserve " + bytes + " bytes of disk in " + path, code));
    }
    resize(path);
    write_header(kFileMagic);
    is_new_ = true;
  } catch (...) {
    if (ftruncate(file_.number(), 0) == 0) unlink(path.c_str());
    throw;
  }
}

void FileBlocks::check(const std::string& path) const {
  FileHeader found{};
  const FileHeader wanted = file_header(header_);
  if (!pread_all(file_.number(), &found, sizeof(found), 0) ||
      std::memcmp(found.magic, kFileMagic, sizeof(found.magic)) != 0) {
    throw SegmentError(path + " is not a Stoker segment: use another path");
  }
  if (found.abi != kFileAbi) {
    throw SegmentError(path + " has layout version " + std::to_string(found.abi) +
                       ", this Stoker reads version " + std::to_string(kFileAbi));
  }
  if (std::memcmp(&found, &wanted, sizeof(found)) != 0) {
    throw SegmentError(path + " was made for " + std::to_string(found.num_ids) + " ids and " +
                       std::to_string(found.capacity) + " bytes, not " +
                       std::to_string(wanted.num_ids) + " ids and " +
                       std::to_string(wanted.capacity) + " bytes: use another path");
  }
}

void FileBlocks::share() { lock_file(file_.number(), F_RDLCK); }

bool FileBlocks::read(Extent extent, void* to, std::uint64_t bytes) const {
  const std::uint64_t at =
      header_->file_data_at + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  return pread_all(file_.number(), to, bytes, static_cast<off_t>(at));
}

bool FileBlocks::write(Extent extent, const void* from, std::uint64_t bytes) {
  const std::uint64_t at =
      header_->file_data_at + static_cast<std::uint64_t>(extent.first) * header_->block_size;
  return file_.is_ours() && pwrite_all(file_.number(), from, bytes, static_cast<off_t>(at));
}

bool FileBlocks::put_record(const Record& record) {
  return file_.is_ours() &&
         pwrite_all(file_.number(), &record, sizeof(record),
                    kPage + static_cast<off_t>(record.id) * static_cast<off_t>(sizeof(record)));
}

bool FileBlocks::get_records(std::uint32_t first, std::span<Record> records) const {
  return pread_all(file_.number(), records.data(), records.size_bytes(),
                   kPage + static_cast<off_t>(first) * static_cast<off_t>(sizeof(Record)));
}

int FileBlocks::take(std::uint32_t begin, std::uint32_t end) {
  if (!file_.is_ours()) return EBADF;
  const off_t from = begin == 0 ? 0 : static_cast<off_t>(end_of(*header_, begin));
  const off_t to = static_cast<off_t>(end_of(*header_, end));
  const int code = reserve_pages(file_.number(), to - from, from);
  return code == EOPNOTSUPP ? 0 : code;
}

int FileBlocks::give_back(std::uint32_t begin) {
  if (!file_.is_ours()) return EBADF;
  const std::uint64_t from = end_of(*header_, begin);
  const auto whole = static_cast<std::uint64_t>(bytes() + kPage - 1) / kPage * kPage;
  return punch(file_.number(), from,
               whole - from);  // the last page as well, though not all is ours
}

std::vector<Hole> FileBlocks::holes() const {
  std::vector<Hole> found;
  struct stat status{};
  if (fstat(file_.number(), &status) != 0 || status.st_blocks * 512 >= bytes()) return found;
  const auto first = static_cast<off_t>(header_->file_data_at);
  for (off_t at = first; at < bytes();) {
    const off_t begin = lseek(file_.number(), at, SEEK_HOLE);
    if (begin < 0 || begin >= bytes()) break;
    off_t end = lseek(file_.number(), begin, SEEK_DATA);
    if (end < 0 && errno != ENXIO) break;
    if (end < 0) end = bytes();
    found.push_back(
        {static_cast<std::uint64_t>(begin - first), static_cast<std::uint64_t>(end - first)});
    at = end;
  }
  return found;
}

}  // namespace stoker
