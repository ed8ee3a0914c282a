// Reads many whole files at once, in the order asked for, into one buffer; or ranges of one file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "stoker/work_pool.h"

namespace stoker {

/// Paths of many files in one buffer: path `i` is `root` + `bytes[offsets[i], offsets[i + 1])`.
/// No path contains a NUL byte.
struct PathTable {
  std::string_view root;
  std::span<const std::byte> bytes;
  std::span<const std::int64_t> offsets;

  std::size_t size() const { return offsets.empty() ? 0 : offsets.size() - 1; }
};

/// What became of one file: 0, a positive errno, or one of these.
enum FileStatus : std::int32_t {
  kRead = 0,
  kShrank = -1,    ///< fewer bytes than expected
  kGrew = -2,      ///< more bytes than expected
  kNotAFile = -3,  ///< a directory, pipe, socket or device
};

/// Reads and stats files through a bounded pool of threads.
///
/// Safe to use from several threads at once and after fork(). A call returns when every file of
/// its batch has been dealt with; storage that never answers blocks it, as it blocks open(2).
class Reader {
 public:
  /// At most `threads` files are read at once besides those that the calling threads read.
  explicit Reader(unsigned threads) : pool_(threads) {}

  /// Reads file `ids[i]` into `data[offsets[i], offsets[i + 1])`; the length of that room is the
  /// expected size. Writes what became of it to `status[i]`; unless that is kRead, the room holds
  /// no meaning. `drop_page_cache` advises the kernel to forget the pages after reading.
  /// Throws std::out_of_range for an id without a path, std::invalid_argument when the
  /// lengths do not fit together.
  void read(const PathTable& paths, std::span<const std::uint32_t> ids, std::span<std::byte> data,
            std::span<const std::int64_t> offsets, std::span<std::int32_t> status,
            bool drop_page_cache);

  /// Writes size in bytes, times of modification and change in nanoseconds since 1970, and status
  /// (0, errno or kNotAFile) of every path in the table, following links. Throws
  /// std::invalid_argument as above.
  void stat(const PathTable& paths, std::span<std::int64_t> sizes,
            std::span<std::int64_t> mtimes_ns, std::span<std::int64_t> ctimes_ns,
            std::span<std::int32_t> status);

  unsigned threads() const { return pool_.threads(); }

 private:
  WorkPool pool_;
};

/// Ranges of files that are wanted in one buffer: range `i` begins at byte `starts[i]` of file
/// `files[i]`, and goes to [bounds[i], bounds[i + 1]) of the buffer.
struct Ranges {
  std::span<const std::int64_t> files, starts, bounds;
};

/// Copies the ranges of `file`, which is open as `fd`, into `into`, in order, up to the first that
/// the page cache does not have whole, or whose file system cannot tell; sets `done[i]` for each.
/// Neighbours that lie together in the file are one read. Returns how many reads succeeded; what
/// lies in the places of other ranges has no meaning. Never waits for storage. Throws
/// std::invalid_argument when the lengths do not fit together.
std::size_t read_cached(int fd, std::int64_t file, const Ranges& ranges, std::span<std::byte> into,
                        std::span<bool> done);

}  // namespace stoker
