#include "stoker/reader.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>

namespace stoker {
namespace {

/// A descriptor that is closed at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  // On Linux the descriptor is gone even when close() reports EINTR: never retry.
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

template <typename Call>
auto retried(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Returns the path of file `i` in a buffer of the calling thread, valid until its next call.
const char* path_of(const PathTable& paths, std::size_t i) {
  thread_local std::string path;
  const auto begin = static_cast<std::size_t>(paths.offsets[i]);
  const auto end = static_cast<std::size_t>(paths.offsets[i + 1]);
  path.assign(paths.root);
  path.append(reinterpret_cast<const char*>(paths.bytes.data()) + begin, end - begin);
  return path.c_str();
}

std::int32_t read_all(int fd, std::span<std::byte> into) {
  std::size_t done = 0;
  while (done < into.size()) {
    const auto got = retried([&] {
      return ::pread(fd, into.data() + done, into.size() - done, static_cast<off_t>(done));
    });
    if (got < 0) return errno;
    if (got == 0) return kShrank;
    done += static_cast<std::size_t>(got);
  }
  return kRead;
}

std::int32_t read_file(const char* path, std::span<std::byte> into, bool drop_page_cache) {
  // O_NONBLOCK: if the file has become a pipe, opening it must not wait for a writer.
  const Descriptor file(
      retried([&] { return ::open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK); }));
  if (file.get() < 0) return errno;
  struct stat now;
  if (::fstat(file.get(), &now) < 0) return errno;
  if (!S_ISREG(now.st_mode)) return kNotAFile;
  const auto size = static_cast<std::size_t>(now.st_size);
  if (size != into.size()) return size < into.size() ? kShrank : kGrew;
  const std::int32_t status = read_all(file.get(), into);
  if (drop_page_cache) ::posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);
  return status;
}

void check_table(const PathTable& paths, std::size_t i) {
  const auto begin = paths.offsets[i];
  const auto end = paths.offsets[i + 1];
  if (begin < 0 || end < begin || static_cast<std::size_t>(end) > paths.bytes.size()) {
    throw std::invalid_argument("path " + std::to_string(i) + " lies outside the path bytes");
  }
}

void check_room(std::span<const std::int64_t> offsets, std::size_t count, std::size_t room) {
  if (offsets.size() != count + 1 || offsets.front() != 0 ||
      static_cast<std::size_t>(offsets.back()) != room) {
    throw std::invalid_argument("offsets must go from 0 to the length of data, one more than ids");
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (offsets[i + 1] < offsets[i]) throw std::invalid_argument("offsets must not decrease");
  }
}

}  // namespace

void Reader::read(const PathTable& paths, std::span<const std::uint32_t> ids,
                  std::span<std::byte> data, std::span<const std::int64_t> offsets,
                  std::span<std::int32_t> status, bool drop_page_cache) {
  check_room(offsets, ids.size(), data.size());
  if (status.size() != ids.size()) throw std::invalid_argument("status must be as long as ids");
  for (const auto id : ids) {
    if (id >= paths.size()) throw std::out_of_range("id " + std::to_string(id) + " has no path");
    check_table(paths, id);
  }
  pool_.run(ids.size(), [&](std::size_t i) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    const auto size = static_cast<std::size_t>(offsets[i + 1]) - begin;
    status[i] = read_file(path_of(paths, ids[i]), data.subspan(begin, size), drop_page_cache);
  });
}

void Reader::stat(const PathTable& paths, std::span<std::int64_t> sizes,
                  std::span<std::int64_t> mtimes_ns, std::span<std::int64_t> ctimes_ns,
                  std::span<std::int32_t> status) {
  const std::size_t count = paths.size();
  if (sizes.size() != count || mtimes_ns.size() != count || ctimes_ns.size() != count ||
      status.size() != count) {
    throw std::invalid_argument("sizes, times and status must be as long as the path table");
  }
  const auto ns = [](const timespec& time) {
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  for (std::size_t i = 0; i < count; ++i) check_table(paths, i);
  pool_.run(count, [&](std::size_t i) {
    struct stat now{};
    const bool found = retried([&] { return ::stat(path_of(paths, i), &now); }) == 0;
    status[i] = !found ? errno : S_ISREG(now.st_mode) ? kRead : kNotAFile;
    sizes[i] = now.st_size;
    mtimes_ns[i] = ns(now.st_mtim);
    ctimes_ns[i] = ns(now.st_ctim);
  });
}

std::size_t read_cached(int fd, std::int64_t file, const Ranges& ranges, std::span<std::byte> into,
                        std::span<bool> done) {
  const auto [files, starts, bounds] = ranges;
  const std::size_t count = files.size();
  check_room(bounds, count, into.size());
  if (starts.size() != count || done.size() != count) {
    throw std::invalid_argument("starts and done must be as long as files");
  }
  std::size_t reads = 0;
  for (std::size_t first = 0, next; first < count; first = next) {
    next = first + 1;
    if (files[first] != file) continue;
    const auto begin = bounds[first];
    while (next < count && files[next] == file &&
           starts[next] - starts[first] == bounds[next] - begin) {
      ++next;
    }
    const iovec place{into.data() + begin, static_cast<std::size_t>(bounds[next] - begin)};
    // Not by preadv2(), which musl has only since 1.2.5; the 0 is the other half of the offset.
    const auto got = retried([&, from = starts[first]] {
      return ::syscall(SYS_preadv2, fd, &place, 1L, from, 0L, long{RWF_NOWAIT});
    });
    if (got != bounds[next] - begin) break;
    std::ranges::fill(done.subspan(first, next - first), true);
    ++reads;
  }
  return reads;
}

}  // namespace stoker
