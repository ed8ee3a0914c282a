// Memory that is handed over to NumPy arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace nb = nanobind;

template <typename T>
using Array1 = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// Large batches go into pages of 2 MiB where the kernel gives them, as numpy's own arrays do: a
// copy of 100 KB into pages of 4 KiB takes a fifth longer.
inline constexpr std::size_t kLargeBatch = std::size_t{4} << 20;
inline constexpr std::uintptr_t kPage = 4096;

template <typename T>
T* allocate(std::size_t count) {
  const std::size_t bytes = std::max<std::size_t>(1, count * sizeof(T));
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  if (bytes >= kLargeBatch) {
    const auto page = (reinterpret_cast<std::uintptr_t>(memory) + kPage - 1) & ~(kPage - 1);
    madvise(reinterpret_cast<void*>(page), bytes - kPage, MADV_HUGEPAGE);  // may fail
  }
  return static_cast<T*>(memory);
}

// Hands malloc'ed memory over to a numpy array.
template <typename T>
Array1<T> own(T* memory, std::size_t count) {
  nb::capsule owner(memory, [](void* block) noexcept { std::free(block); });
  return Array1<T>(memory, {count}, owner);
}

template <typename T>
struct Buffer {
  explicit Buffer(std::size_t count) : memory(allocate<T>(count), &std::free), size(count) {}
  Array1<T> array() { return own(memory.release(), size); }
  T* get() { return memory.get(); }
  std::unique_ptr<T, decltype(&std::free)> memory;
  std::size_t size;
};

// Memory of earlier batches for later ones: fresh from the kernel it would have to be cleared,
// which takes as long as to copy a batch into it.
class Spares {
 public:
  Spares() { spares_.reserve(kMost / kLargeBatch + 1); }
  ~Spares() {
    for (const Spare& spare : spares_) std::free(spare.memory);
  }
  // Memory for a batch, and how large that is.
  std::pair<std::uint8_t*, std::size_t> take(std::size_t bytes) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {  // never, after some forks
      for (auto spare = spares_.rbegin(); spare != spares_.rend(); ++spare) {
        if (spare->bytes < bytes || spare->bytes / 2 > bytes) continue;
        const Spare found = *spare;
        spares_.erase(std::next(spare).base());
        kept_ -= found.bytes;
        return {found.memory, found.bytes};
      }
    }
    return {allocate<std::uint8_t>(bytes), bytes};
  }
  void give_back(std::uint8_t* memory, std::size_t bytes) noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || bytes > kMost || spares_.size() == spares_.capacity()) return std::free(memory);
    spares_.push_back({memory, bytes});
    for (kept_ += bytes; kept_ > kMost; spares_.erase(spares_.begin())) {
      kept_ -= spares_.front().bytes;
      std::free(spares_.front().memory);
    }
  }

 private:
  static constexpr std::size_t kMost = std::size_t{64} << 20;  // bytes that are kept
  struct Spare {
    std::uint8_t* memory;
    std::size_t bytes;
  };
  std::mutex mutex_;
  std::vector<Spare> spares_;
  std::size_t kept_ = 0;
};

// Hands a batch to NumPy; its memory is a spare one once nothing refers to it.
inline Array1<std::uint8_t> lend(const std::shared_ptr<Spares>& spares, std::uint8_t* memory,
                                 std::size_t bytes, std::size_t count) {
  struct Loan {
    std::shared_ptr<Spares> spares;
    std::uint8_t* memory;
    std::size_t bytes;
  };
  nb::capsule owner(new Loan{spares, memory, bytes}, [](void* loan) noexcept {
    const std::unique_ptr<Loan> own(static_cast<Loan*>(loan));
    own->spares->give_back(own->memory, own->bytes);
  });
  return Array1<std::uint8_t>(memory, {count}, owner);
}
