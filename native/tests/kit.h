// What the arena's tests share: samples that describe themselves, and children that die.
#pragma once

#include <fcntl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "stoker/arena.h"
#include "stoker/error.h"
#include "stoker/futex.h"

namespace kit {

using Bytes = std::vector<unsigned char>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSlow = true;
#else
inline constexpr bool kSlow = false;
#endif

/// Byte `i` of the one sample that may ever be stored for this id and length.
inline unsigned char byte_of(std::uint32_t id, std::uint64_t length, std::uint64_t i) {
  const std::uint64_t mixed = (id * 0x9e3779b97f4a7c15ull) ^ (length * 0xc2b2ae3d27d4eb4full);
  return static_cast<unsigned char>(((mixed + i) * 0x9e3779b97f4a7c15ull) >> 56);
}

inline Bytes payload(std::uint32_t id, std::uint64_t length) {
  Bytes bytes(length);
  for (std::uint64_t i = 0; i < length; ++i) bytes[i] = byte_of(id, length, i);
  return bytes;
}

inline stoker::Geometry geometry(std::uint32_t num_ids, std::uint64_t capacity,
                                 std::uint64_t mean = 1000, bool on_disk = false) {
  return {num_ids, capacity, mean, on_disk, true, 1};
}

inline bool put(stoker::Arena& arena, std::uint32_t id, std::uint64_t length, double key = 0,
                std::uint32_t region = 0) {
  const Bytes bytes = payload(id, length);
  const stoker::Sample sample{bytes.data(), length};
  stoker::Arena::Placing placing{region};
  placing.keys = &key;
  bool admitted = false;
  arena.put({&id, 1}, &sample, placing, &admitted);
  return admitted;
}

/// The bytes of a sample, if it is there.
inline std::optional<Bytes> get(stoker::Arena& arena, std::uint32_t id) {
  stoker::Arena::Snapshot snapshot{};
  Bytes bytes(arena.measure({&id, 1}, &snapshot) + 1);
  std::int64_t offsets[2];
  bool found = false;
  const std::uint64_t length = arena.get({&id, 1}, &snapshot, bytes.data(), offsets, &found);
  if (!found) return std::nullopt;
  bytes.resize(length);
  return bytes;
}

/// Whether a sample is there; what is there must be right to the last byte.
inline bool there(stoker::Arena& arena, std::uint32_t id) {
  const std::optional<Bytes> bytes = get(arena, id);
  if (bytes) CHECK(*bytes == payload(id, bytes->size()));
  return bytes.has_value();
}

inline std::uint32_t count_there(stoker::Arena& arena) {
  std::uint32_t count = 0;
  for (std::uint32_t id = 0; id < arena.header().num_ids; ++id) count += there(arena, id);
  return count;
}

inline bool claim(stoker::Arena& arena, std::uint32_t id) {
  bool claimed = false;
  arena.claim({&id, 1}, &claimed);
  return claimed;
}

inline bool wait(stoker::Arena& arena, std::uint32_t id, double seconds) {
  bool found = false;
  arena.wait({&id, 1}, static_cast<std::int64_t>(seconds * 1e9), &found);
  return found;
}

inline void abandon(stoker::Arena& arena, std::uint32_t id) { arena.abandon({&id, 1}); }
inline void discard(stoker::Arena& arena, std::uint32_t id) { arena.discard({&id, 1}); }

/// No invariant may be broken, whatever happened before.
inline void check_sound(stoker::Arena& arena) {
  try {
    arena.verify();
  } catch (const stoker::SegmentError& error) {
    ++check::failed;
    std::fprintf(stderr, "verify: %s\n", error.what());
  }
}

inline void sleep_ms(long milliseconds) {
  timespec time{milliseconds / 1000, milliseconds % 1000 * 1'000'000};
  nanosleep(&time, nullptr);
}

inline double seconds_since(std::int64_t start) {
  return static_cast<double>(stoker::monotonic_ns() - start) / 1e9;
}

/// Runs `body` in a child that ends afterwards, or after a minute.
template <typename Body>
pid_t spawn(Body body) {
  const pid_t child = fork();
  if (child != 0) return child;
  check::failed = 0;
  alarm(60);
  try {
    body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
    _exit(2);
  }
  _exit(check::failed == 0 ? 0 : 1);
}

/// The wait status of a child that has ended.
inline int ended(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

inline bool succeeded(pid_t child) {
  const int status = ended(child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

inline void kill_and_wait(pid_t child) {
  kill(child, SIGKILL);
  ended(child);
}

/// Returns once a child has stopped itself.
inline bool stopped(pid_t child) {
  int status = 0;
  return waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status);
}

/// Whether a process can be followed step by step; not under an emulator.
inline bool can_trace() {
  return succeeded(spawn([] { _exit(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? 0 : 1); }));
}

/// A file name that no other test uses, removed at the end.
class Path {
 public:
  Path() {
    char name[] = "/tmp/stoker-test-XXXXXX";
    const int file = mkstemp(name);
    CHECK(file >= 0);
    close(file);
    unlink(name);
    name_ = name;
  }
  ~Path() { unlink(name_.c_str()); }
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;
  operator const std::string&() const { return name_; }
  const char* c_str() const { return name_.c_str(); }

 private:
  std::string name_;
};

}  // namespace kit
