// Copies bytes that another process may be writing. The caller verifies a version afterwards and
// throws a torn copy away.
//
// The shared side is copied word by word with relaxed atomics where ThreadSanitizer looks, and by
// memcpy elsewhere; order comes from the fences below either way. ThreadSanitizer runs the fences
// and does not model them: it misses orders that they make, which only matters to accesses that are
// not atomic, and here all are that two threads share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_THREAD__)
#define STOKER_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STOKER_THREAD_SANITIZER
#endif
#endif

namespace stoker {

#if defined(STOKER_THREAD_SANITIZER)

template <typename Word, typename Copy>
std::size_t each_word(std::size_t at, std::size_t bytes, const void* shared, Copy copy) {
  const auto begin = reinterpret_cast<std::uintptr_t>(shared);
  for (; at + sizeof(Word) <= bytes && (begin + at) % sizeof(Word) == 0; at += sizeof(Word)) {
    copy(at);
  }
  return at;
}

template <typename Word>
std::size_t load_words(std::size_t at, void* to, const void* shared, std::size_t bytes) {
  return each_word<Word>(at, bytes, shared, [&](std::size_t i) {
    const auto* from = reinterpret_cast<const Word*>(static_cast<const unsigned char*>(shared) + i);
    const Word word = __atomic_load_n(from, __ATOMIC_RELAXED);
    std::memcpy(static_cast<unsigned char*>(to) + i, &word, sizeof(Word));
  });
}

template <typename Word>
std::size_t store_words(std::size_t at, void* shared, const void* from, std::size_t bytes) {
  return each_word<Word>(at, bytes, shared, [&](std::size_t i) {
    Word word;
    std::memcpy(&word, static_cast<const unsigned char*>(from) + i, sizeof(Word));
    auto* to = reinterpret_cast<Word*>(static_cast<unsigned char*>(shared) + i);
    __atomic_store_n(to, word, __ATOMIC_RELAXED);
  });
}

inline void racy_read(void* to, const void* shared, std::size_t bytes) {
  const std::size_t words = load_words<std::uint64_t>(0, to, shared, bytes);
  load_words<unsigned char>(words, to, shared, bytes);
}

inline void racy_write(void* shared, const void* from, std::size_t bytes) {
  const std::size_t words = store_words<std::uint64_t>(0, shared, from, bytes);
  store_words<unsigned char>(words, shared, from, bytes);
}

#else

inline void racy_read(void* to, const void* from, std::size_t bytes) {
  // The processor's own prefetch ends at a page of 4 KiB: ask for the first lines two pages ahead,
  // which also fills the address cache. A tenth of the time of 100 KB out of pages of 4 KiB.
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kLines = 8 * 64;
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  for (; bytes > 3 * kPage; bytes -= kPage, in += kPage, out += kPage) {
    for (std::size_t line = 0; line < kLines; line += 64) __builtin_prefetch(in + 2 * kPage + line);
    std::memcpy(out, in, kPage);
  }
  std::memcpy(out, in, bytes);
}

inline void racy_write(void* shared, const void* from, std::size_t bytes) {
  racy_read(shared, from, bytes);
}

#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"  // that the fences are not modelled: see above
#endif

// After a racy read, before the version is looked at again.
inline void read_fence() { std::atomic_thread_fence(std::memory_order_acquire); }
// Between taking blocks over, whose readers must see that their version has gone, and writing.
inline void write_fence() { std::atomic_thread_fence(std::memory_order_release); }

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

}  // namespace stoker
