#include "stoker/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace fs = std::filesystem;

namespace {

/// A directory of files with known contents, and the table of their paths.
class Folder {
 public:
  Folder() : root_(make_root() + "/") {}
  ~Folder() { fs::remove_all(root_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::uint32_t add(const std::string& name, const std::string& content) {
    std::ofstream(root_ + name, std::ios::binary) << content;
    return list(name, static_cast<std::int64_t>(content.size()));
  }

  /// Lists a name without making a file.
  std::uint32_t list(const std::string& name, std::int64_t size) {
    names_ += name;
    ends_.push_back(static_cast<std::int64_t>(names_.size()));
    sizes_.push_back(size);
    return static_cast<std::uint32_t>(sizes_.size() - 1);
  }

  stoker::PathTable table() const { return {root_, std::as_bytes(std::span(names_)), ends_}; }
  std::string path(const std::string& name) const { return root_ + name; }
  std::int64_t size(std::uint32_t id) const { return sizes_[id]; }

 private:
  static std::string make_root() {
    std::string pattern = (fs::temp_directory_path() / "reader_test.XXXXXX").string();
    return ::mkdtemp(pattern.data());
  }

  const std::string root_;
  std::string names_;
  std::vector<std::int64_t> ends_{0};
  std::vector<std::int64_t> sizes_;
};

/// A batch as the caller of Reader::read sees it.
struct Answer {
  std::string data;
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> status;

  std::string operator[](std::size_t i) const {
    return data.substr(static_cast<std::size_t>(offsets[i]),
                       static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
  }
};

Answer read(stoker::Reader& reader, const Folder& folder, const std::vector<std::uint32_t>& ids,
            bool drop_page_cache = false) {
  Answer answer;
  for (const auto id : ids) answer.offsets.push_back(answer.offsets.back() + folder.size(id));
  answer.data.resize(static_cast<std::size_t>(answer.offsets.back()));
  answer.status.assign(ids.size(), 99);
  reader.read(folder.table(), ids, std::as_writable_bytes(std::span(answer.data)), answer.offsets,
              answer.status, drop_page_cache);
  return answer;
}

std::string content(std::uint32_t i) {
  return std::string(i * 7919 % 20000, static_cast<char>('a' + i % 26));
}

void reads_what_is_there() {
  Folder folder;
  for (std::uint32_t i = 0; i < 60; ++i) folder.add(std::to_string(i), content(i));
  for (const unsigned threads : {0u, 1u, 16u}) {
    stoker::Reader reader(threads);
    for (const bool drop : {false, true}) {
      const Answer answer = read(reader, folder, {5, 0, 59, 5, 30}, drop);
      CHECK((answer.status == std::vector<std::int32_t>(5, stoker::kRead)));
      CHECK(answer[0] == content(5) && answer[1].empty() && answer[2] == content(59));
      CHECK(answer[3] == content(5) && answer[4] == content(30));
    }
    CHECK(read(reader, folder, {}).data.empty());
  }
}

void says_what_went_wrong_and_reads_the_rest() {
  Folder folder;
  const auto good = folder.add("good", "good");
  const auto shrank = folder.add("shrank", "12345");
  const auto grew = folder.add("grew", "12345");
  const auto emptied = folder.add("emptied", "12345");
  const auto missing = folder.list("missing", 3);
  const auto below_a_file = folder.list("good/below", 3);
  const auto directory = folder.list("directory", 3);
  const auto pipe = folder.list("pipe", 3);
  const auto loop = folder.list("loop", 3);
  std::ofstream(folder.path("shrank")) << "1234";
  std::ofstream(folder.path("grew")) << "123456";
  std::ofstream{folder.path("emptied")};
  fs::create_directory(folder.path("directory"));
  ::mkfifo(folder.path("pipe").c_str(), 0600);
  fs::create_symlink("loop", folder.path("loop"));
  stoker::Reader reader(4);
  const Answer answer =
      read(reader, folder,
           {good, shrank, grew, emptied, missing, below_a_file, directory, pipe, loop, good});
  const std::vector<std::int32_t> expected{
      stoker::kRead, stoker::kShrank,   stoker::kGrew,     stoker::kShrank, ENOENT,
      ENOTDIR,       stoker::kNotAFile, stoker::kNotAFile, ELOOP,           stoker::kRead};
  CHECK(answer.status == expected);
  CHECK(answer[0] == "good" && answer[9] == "good");
}

void unreadable_is_reported_to_those_without_the_right() {
  if (::getuid() != 0) return;
  Folder folder;
  ::chmod(folder.path("").c_str(), 0755);
  const auto id = folder.add("secret", "x");
  ::chmod(folder.path("secret").c_str(), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(2);
    stoker::Reader reader(2);
    ::_exit(read(reader, folder, {id}).status[0] == EACCES ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}

void stats_every_path() {
  Folder folder;
  folder.add("a", "123");
  folder.list("missing", 0);
  folder.add("b", "");
  folder.list("", 0);
  std::vector<std::int64_t> sizes(4, -1), mtimes(4, -1), ctimes(4, -1);
  std::vector<std::int32_t> status(4, -1);
  stoker::Reader reader(4);
  reader.stat(folder.table(), sizes, mtimes, ctimes, status);
  CHECK((status == std::vector<std::int32_t>{0, ENOENT, 0, stoker::kNotAFile}));
  CHECK(sizes[0] == 3 && sizes[1] == 0 && sizes[2] == 0);
  struct stat now;
  ::stat(folder.path("a").c_str(), &now);
  CHECK(mtimes[0] == std::int64_t{now.st_mtim.tv_sec} * 1'000'000'000 + now.st_mtim.tv_nsec);
  CHECK(ctimes[0] == std::int64_t{now.st_ctim.tv_sec} * 1'000'000'000 + now.st_ctim.tv_nsec);
}

void lengths_that_do_not_fit_are_refused() {
  Folder folder;
  folder.add("a", "123");
  stoker::Reader reader(1);
  std::vector<std::byte> data(3);
  std::vector<std::int32_t> status(1);
  const auto call = [&](std::vector<std::uint32_t> ids, std::vector<std::int64_t> offsets) {
    reader.read(folder.table(), ids, data, offsets, status, false);
  };
  CHECK_THROWS(std::out_of_range, call({1}, {0, 3}));
  CHECK_THROWS(std::invalid_argument, call({0}, {0}));
  CHECK_THROWS(std::invalid_argument, call({0}, {0, 4}));
  CHECK_THROWS(std::invalid_argument, call({0}, {1, 3}));
  CHECK_THROWS(std::invalid_argument, call({0, 0}, {0, 1, 3}));
  status.resize(2);
  CHECK_THROWS(std::invalid_argument, call({0, 0}, {0, 4, 3}));
  const std::vector<std::int64_t> outside{0, 9};
  const std::vector<std::int64_t> room{0, 3};
  const std::vector<std::uint32_t> ids{0};
  auto table = folder.table();
  table.offsets = outside;
  status.resize(1);
  CHECK_THROWS(std::invalid_argument, reader.read(table, ids, data, room, status, false));
  std::vector<std::int64_t> sizes(1), mtimes(1), ctimes(1);
  CHECK_THROWS(std::invalid_argument, reader.stat(table, sizes, mtimes, ctimes, status));
}

void threads_read_at_once() {
  Folder folder;
  for (std::uint32_t i = 0; i < 60; ++i) folder.add(std::to_string(i), content(i));
  stoker::Reader reader(4);
  std::vector<std::thread> callers;
  for (std::uint32_t t = 0; t < 6; ++t) {
    callers.emplace_back([&, t] {
      for (std::uint32_t round = 0; round < 50; ++round) {
        const std::uint32_t id = (t * 11 + round) % 59;
        const Answer answer = read(reader, folder, {id, id + 1});
        CHECK(answer[0] == content(id) && answer[1] == content(id + 1));
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

void cached_ranges_are_copied_up_to_the_first_that_is_not_there() {
  Folder folder;
  folder.add("a", "0123456789");
  const int fd = ::open(folder.path("a").c_str(), O_RDONLY | O_CLOEXEC);
  // Two that lie together, one of another file, one by itself, one past the end, one after that.
  const std::vector<std::int64_t> files{7, 7, 3, 7, 7, 7};
  const std::vector<std::int64_t> starts{2, 5, 0, 0, 9, 1};
  const std::vector<std::int64_t> bounds{0, 3, 4, 6, 8, 10, 11};
  std::string data(11, '-');
  bool done[6]{};
  const auto call = [&](std::span<const std::int64_t> bounds) {
    return stoker::read_cached(fd, 7, {files, starts, bounds},
                               std::as_writable_bytes(std::span(data)), done);
  };
  const auto reads = call(bounds);
  if (reads > 0) {  // else the file system or an emulator cannot tell
    CHECK(reads == 2);
    CHECK(data.substr(0, 8) == "2345--01" && data.back() == '-');
  }
  const bool copied = reads > 0;
  const std::vector<bool> expected{copied, copied, false, copied, false, false};
  CHECK(std::equal(expected.begin(), expected.end(), done));
  CHECK_THROWS(std::invalid_argument, call(std::span(bounds).first(6)));
  CHECK_THROWS(std::invalid_argument, call(std::vector<std::int64_t>{0, 3, 4, 6, 8, 10, 12}));
  CHECK_THROWS(std::invalid_argument, call(std::vector<std::int64_t>{0, 3, 2, 6, 8, 10, 11}));
  ::close(fd);
  CHECK(call(bounds) == 0);
}

}  // namespace

int main() {
  reads_what_is_there();
  says_what_went_wrong_and_reads_the_rest();
  unreadable_is_reported_to_those_without_the_right();
  stats_every_path();
  lengths_that_do_not_fit_are_refused();
  cached_ranges_are_copied_up_to_the_first_that_is_not_there();
  threads_read_at_once();
  return check::failures();
}
