// Segments on disk: what a file holds is believed only as far as its checksums go.
#include <sys/resource.h>
#include <sys/stat.h>

#include "kit.h"
#include "stoker/block_store.h"
#include "stoker/crc32c.h"

using kit::geometry;
using kit::there;
using stoker::Arena;
using stoker::CapacityError;
using stoker::ConfigError;
using stoker::Record;
using stoker::SegmentError;

namespace {

constexpr std::uint32_t kIds = 60;
constexpr std::uint64_t kCapacity = 60'000;
constexpr off_t kRecords = 4096;

stoker::Geometry on_disk(std::uint64_t capacity = kCapacity) {
  return geometry(kIds, capacity, 1000, true);
}

Record record_of(const std::string& path, std::uint32_t id) {
  Record record{};
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK(pread(file, &record, sizeof(record), kRecords + off_t{id} * 64) == sizeof(record));
  close(file);
  return record;
}

void overwrite(const std::string& path, off_t at, const void* bytes, std::size_t count) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(pwrite(file, bytes, count, at) == static_cast<ssize_t>(count));
  close(file);
}

void spoil(const std::string& path, off_t at) {
  unsigned char byte = 0;
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(pread(file, &byte, 1, at) == 1);
  byte = static_cast<unsigned char>(~byte);
  CHECK(pwrite(file, &byte, 1, at) == 1);
  close(file);
}

off_t first_byte(const Arena& arena, const Record& record) {
  return static_cast<off_t>(arena.header().file_data_at +
                            std::uint64_t{record.extents[0]} * arena.header().block_size);
}

void fill(const std::string& path) {
  Arena arena(on_disk(), path);
  for (std::uint32_t id = 0; id < kIds; ++id) CHECK(kit::put(arena, id, 10 * id));
  kit::check_sound(arena);
}

void reopened_it_holds_the_same() {
  const kit::Path path;
  fill(path);
  for (int round = 0; round < 3; ++round) {
    Arena arena(on_disk(), path);
    kit::check_sound(arena);
    CHECK(kit::count_there(arena) == kIds && arena.counters().corrupt == 0);
    CHECK_THROWS(SegmentError, Arena(on_disk(), path));  // in use
    Arena other(dup(arena.memory_descriptor()), dup(arena.file_descriptor()));
    CHECK(there(other, 9));
  }
}

stoker::RegionSpec main_region(std::uint64_t budget, stoker::Order order = stoker::Order::kKey,
                               stoker::Pop pop = stoker::Pop::kEvict) {
  stoker::RegionSpec spec;
  spec.name = "kept";
  spec.budget = budget;
  spec.order = order;
  spec.pop = pop;
  return spec;
}

// The youngest stay, whatever orders them from then on.
void what_was_recovered_joins_the_first_region() {
  using stoker::Order;
  using stoker::Pop;
  const auto fill_backwards = [](const std::string& path) {
    Arena arena(on_disk(), path);
    for (std::uint32_t id = kIds; id-- > 0;) CHECK(kit::put(arena, id, 500));
  };
  const std::vector<stoker::RegionSpec> all = {
      main_region(kCapacity / 5), main_region(kCapacity / 5, Order::kRecency),
      main_region(kCapacity / 5, Order::kFrequency), main_region(kCapacity / 5, Order::kInsertion),
      main_region(kCapacity / 5, Order::kInsertion, Pop::kSieve)};
  for (const stoker::RegionSpec& spec : all) {
    const kit::Path path;
    fill_backwards(path);
    Arena arena(on_disk(), path);
    stoker::RegionSpec ghost;
    ghost.name = "ghost";
    ghost.budget = 1000;
    ghost.order = Order::kInsertion;
    ghost.holds_bytes = false;
    arena.configure({ghost, spec});
    kit::check_sound(arena);
    CHECK(arena.regions()[1].bytes == kCapacity / 5 && arena.counters().entries == 24);
    CHECK(kit::put(arena, 50, 500, 1e9, 1) && !there(arena, 23));  // the oldest left for it
    CHECK(kit::count_there(arena) == 24 && there(arena, 0) && there(arena, 22));
    CHECK_THROWS(ConfigError, arena.configure({spec}));  // in use by now
    kit::check_sound(arena);
  }
  const kit::Path path;
  fill_backwards(path);
  Arena arena(on_disk(), path);
  stoker::RegionSpec borrowing = main_region(kCapacity / 5);
  borrowing.strict = false;
  arena.configure({borrowing});
  CHECK(kit::count_there(arena) == kIds);
  kit::check_sound(arena);
}

void another_geometry_is_refused() {
  const kit::Path path;
  fill(path);
  CHECK_THROWS(SegmentError, Arena(on_disk(kCapacity + 1), path));
  CHECK_THROWS(SegmentError, Arena(geometry(kIds + 1, kCapacity, 1000, true), path));
  CHECK_THROWS(SegmentError, Arena(on_disk(), "/tmp"));
  CHECK_THROWS(SegmentError, Arena(on_disk(), "/nowhere/at/all"));
  spoil(path, 0);
  CHECK_THROWS(SegmentError, Arena(on_disk(), path));
  spoil(path, 0);
  Arena arena(on_disk(), path);
  CHECK(kit::count_there(arena) == kIds);
}

stoker::Geometry in_pieces(std::uint64_t capacity) {  // room that is taken by several calls
  return {20'000, capacity, 4096, true, true, 1};
}

// Lets a child begin to make a file and kills it at its n-th stop before or after a system call.
// False when it ended before that.
bool cut_short(const std::string& path, int stops) {
  const pid_t child = kit::spawn([&] {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    const Arena arena(in_pieces(80u << 20), path);
  });
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  for (int stop = 0; stop < stops && WIFSTOPPED(status); ++stop) {
    ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    waitpid(child, &status, 0);
  }
  if (!WIFSTOPPED(status)) return false;
  kit::kill_and_wait(child);
  return true;
}

// The next process finds the file finished, or makes it, with the size asked for then.
void n1_killed_at_any_call_while_a_file_is_made() {
  const std::uint64_t sizes[2] = {80u << 20, 70u << 20};
  int cuts = 0;
  int finished = 0;
  for (bool cut = true; cut; ++cuts) {
    for (const std::uint64_t size : sizes) {
      const kit::Path path;
      cut = cut_short(path, cuts + 1);
      if (!cut) break;
      if (size != sizes[0]) {
        try {
          const Arena arena(in_pieces(size), path);
        } catch (const SegmentError&) {
          const Arena whole(in_pieces(sizes[0]), path);
          ++finished;
        }
        continue;
      }
      Arena arena(in_pieces(size), path);
      CHECK(kit::put(arena, 1, 100) && there(arena, 1));
      kit::check_sound(arena);
    }
  }
  CHECK(cuts > 40 && finished > 0 && finished < cuts - 10);
}

// A file that only looks like one of ours is not touched.
void n1_what_is_not_marked_stays() {
  const kit::Path path;
  fill(path);
  const std::vector<char> zeros(4096, 0);
  overwrite(path, 0, zeros.data(), zeros.size());
  CHECK_THROWS(SegmentError, Arena(on_disk(), path));
  overwrite(path, 0, "STKRMAKE", 8);  // the mark has a checksum
  CHECK_THROWS(SegmentError, Arena(on_disk(), path));
  CHECK(record_of(path, 5).id == 5);
}

void n3_a_file_that_was_cut_gets_its_size_back() {
  const kit::Path path;
  fill(path);
  struct stat whole{};
  CHECK(stat(path.c_str(), &whole) == 0);
  CHECK(truncate(path.c_str(), whole.st_size / 2) == 0);
  Arena arena(on_disk(), path);
  struct stat now{};
  CHECK(stat(path.c_str(), &now) == 0 && now.st_size == whole.st_size);
  kit::check_sound(arena);
  kit::count_there(arena);
  CHECK(kit::put(arena, 7, 3000) && there(arena, 7));
}

// A process joins by descriptors: the second must be the file that the first one speaks of.
void n3_descriptors_that_do_not_belong_together() {
  const kit::Path path;
  const kit::Path elsewhere;
  fill(path);
  Arena arena(on_disk(), path);
  const auto join = [&](int file) { Arena(dup(arena.memory_descriptor()), file); };
  const int text = open(elsewhere.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(write(text, "text", 4) == 4);
  CHECK_THROWS(SegmentError, join(dup(text)));
  CHECK_THROWS(SegmentError, join(open("/dev/null", O_RDWR | O_CLOEXEC)));
  CHECK_THROWS(SegmentError, join(open("/tmp", O_RDONLY | O_CLOEXEC)));
  struct stat status{};
  CHECK(fstat(text, &status) == 0 && status.st_size == 4);
  CHECK(ftruncate(arena.file_descriptor(), 8192) == 0);
  CHECK_THROWS(SegmentError, join(dup(arena.file_descriptor())));
  close(text);
}

// The program has closed our descriptor and opened its own file under that number.
void n4_a_foreign_file_is_never_written() {
  const kit::Path path;
  const kit::Path foreign;
  Arena arena(on_disk(), path);
  CHECK(kit::put(arena, 1, 500));
  const int number = arena.file_descriptor();
  const int own = open(foreign.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(dup2(own, number) == number);
  CHECK(!kit::put(arena, 2, 500));
  there(arena, 1);
  struct stat status{};
  CHECK(fstat(own, &status) == 0 && status.st_size == 0);
  close(own);
}

// More samples of no bytes than there are nodes: their records outlive them, for nothing lies where
// they lay.
void n4_more_recovered_than_there_are_nodes() {
  constexpr std::uint32_t kMany = 60'000;
  const kit::Path path;
  const stoker::Geometry small{kMany, 65'536, 4096, true, false, 1};
  {
    Arena arena(small, path);
    for (std::uint32_t id = 0; id < kMany; ++id) kit::put(arena, id, 0, id);
    kit::check_sound(arena);
    for (std::uint32_t id = 0; id < kMany; id += 2) kit::discard(arena, id);
    for (std::uint32_t id = kMany; id-- > 0;) kit::put(arena, id, 0, id);
    kit::check_sound(arena);
  }
  Arena arena(small, path);
  kit::check_sound(arena);
  CHECK(arena.counters().entries > 1000);
  arena.configure({main_region(65'536, stoker::Order::kRecency)});
  kit::check_sound(arena);
}

void a_spoilt_payload_is_a_miss() {
  const kit::Path path;
  fill(path);
  Arena arena(on_disk(), path);
  spoil(path, first_byte(arena, record_of(path, 30)) + 299);
  CHECK(!there(arena, 30) && arena.counters().corrupt == 1);
  bool found = true;
  const std::uint32_t id = 30;
  arena.contains({&id, 1}, &found);
  CHECK(!found);
  CHECK(kit::put(arena, 30, 300) && there(arena, 30));
  CHECK(kit::count_there(arena) == kIds);
  kit::check_sound(arena);
}

void a_spoilt_record_is_ignored() {
  const kit::Path path;
  fill(path);
  for (std::uint32_t id = 0; id < kIds; id += 2) {
    spoil(path, kRecords + off_t{id} * 64 + off_t{id} % 40);
  }
  Record moved = record_of(path, 1);  // sound, but in another's place
  overwrite(path, kRecords + 3 * 64, &moved, sizeof(moved));
  Arena arena(on_disk(), path);
  kit::check_sound(arena);
  CHECK(kit::count_there(arena) == kIds / 2 - 1 && there(arena, 1) && !there(arena, 3));
}

// After a power cut some pages may be as they were long ago.
void reverted_pages_are_only_misses() {
  std::mt19937 random(2);
  for (int round = 0; round < (kit::kSlow ? 5 : 20); ++round) {
    const kit::Path path;
    std::vector<std::vector<char>> old;
    for (int pass = 0; pass < 2; ++pass) {
      Arena arena(on_disk(kCapacity / 4), path);
      for (int step = 0; step < 300; ++step) {
        const std::uint32_t id = random() % kIds;
        if (random() % 3 == 0) kit::discard(arena, id);
        kit::put(arena, id, random() % 1500, random() % 100);
      }
      kit::check_sound(arena);
      struct stat status{};
      CHECK(stat(path.c_str(), &status) == 0);
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      for (off_t at = 0; at < status.st_size; at += 512) {
        std::vector<char> sector(512);
        CHECK(pread(file, sector.data(), 512, at) > 0);
        if (pass == 0) {
          old.push_back(sector);
        } else if (at >= 4096 && random() % 3 == 0) {
          CHECK(pwrite(file, old[static_cast<std::size_t>(at / 512)].data(), 512, at) == 512);
        }
      }
      close(file);
    }
    Arena arena(on_disk(kCapacity / 4), path);
    kit::check_sound(arena);
    kit::count_there(arena);
    for (std::uint32_t id = 0; id < kIds; ++id) kit::put(arena, id, 50 + id);
    kit::count_there(arena);
    kit::check_sound(arena);
  }
}

// Bytes that change under a running arena, lists of extents among them: never a wrong byte, and
// nothing is freed by what a spoilt list says.
void spoilt_while_in_use() {
  const kit::Path path;
  // Samples much larger than the mean lie in many pieces.
  Arena arena(geometry(kIds, 200'000, 2000, true), path);
  std::mt19937 random(9);
  std::uint64_t read = 0;
  for (int step = 0; step < 12'000; ++step) {
    const std::uint32_t id = random() % kIds;
    const std::uint64_t length = random() % 30'000;  // not as arguments: their order is free
    kit::put(arena, id, length, random() % 100);
    if (step % 7 == 0) kit::discard(arena, random() % kIds);
    const std::uint32_t block = random() % arena.header().num_blocks;
    if (step % 3 == 0)
      spoil(path,
            static_cast<off_t>(arena.header().file_data_at + block * arena.header().block_size));
    read += there(arena, random() % kIds);
  }
  CHECK(read > 0 && arena.counters().corrupt > 0 && arena.counters().repairs > 0);
  for (std::uint32_t id = 0; id < kIds; ++id) kit::discard(arena, id);
  kit::check_sound(arena);
  CHECK(arena.counters().free_blocks == arena.header().num_blocks);
}

void killed_and_reopened() {
  std::mt19937 random(4);
  const kit::Path path;
  for (int round = 0; round < (kit::kSlow ? 10 : 50); ++round) {
    const unsigned seed = random();
    const pid_t child = kit::spawn([&] {
      Arena arena(on_disk(kCapacity / 4), path);
      std::mt19937 mine(seed);
      for (;;) {
        kit::put(arena, mine() % kIds, mine() % 2000, mine() % 100);
        there(arena, mine() % kIds);
      }
    });
    timespec time{0, 2'000'000 + static_cast<long>(random() % 4'000'000)};
    nanosleep(&time, nullptr);
    kit::kill_and_wait(child);
    Arena arena(on_disk(kCapacity / 4), path);
    kit::check_sound(arena);
    kit::count_there(arena);
    kit::check_sound(arena);
  }
}

// Writes fail while other files cannot grow: an error at creation, and later a put that fails.
void a_full_disk() {
  signal(SIGXFSZ, SIG_IGN);
  const kit::Path path;
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit before = limit;
  limit.rlim_cur = 20'000;
  setrlimit(RLIMIT_FSIZE, &limit);
  const pid_t refused = kit::spawn([&] {
    stoker::Header header{};
    stoker::Segment::plan(on_disk(), header);
    CHECK_THROWS(CapacityError, stoker::FileBlocks(&header, path));
    CHECK(access(path.c_str(), F_OK) != 0);  // no half a file
  });
  CHECK(kit::succeeded(refused));
  setrlimit(RLIMIT_FSIZE, &before);
  Arena arena(on_disk(), path);
  kit::put(arena, 1, 500);
  limit.rlim_cur = static_cast<rlim_t>(arena.header().file_data_at) + 2048;
  setrlimit(RLIMIT_FSIZE, &limit);
  CHECK(!kit::put(arena, 2, 5000));  // beyond what may be written
  CHECK(arena.io_errors() == 1);
  CHECK(kit::claim(arena, 2));  // and its claim was given back
  kit::abandon(arena, 2);
  setrlimit(RLIMIT_FSIZE, &before);
  kit::check_sound(arena);
  CHECK(there(arena, 1) && kit::put(arena, 2, 5000) && there(arena, 2));
}

}  // namespace

int main() {
  reopened_it_holds_the_same();
  what_was_recovered_joins_the_first_region();
  another_geometry_is_refused();
  if (kit::can_trace()) n1_killed_at_any_call_while_a_file_is_made();
  n1_what_is_not_marked_stays();
  n3_a_file_that_was_cut_gets_its_size_back();
  n3_descriptors_that_do_not_belong_together();
  n4_a_foreign_file_is_never_written();
  n4_more_recovered_than_there_are_nodes();
  a_spoilt_payload_is_a_miss();
  a_spoilt_record_is_ignored();
  reverted_pages_are_only_misses();
  spoilt_while_in_use();
  killed_and_reopened();
  a_full_disk();
  return check::failures();
}
