// The least a test needs: CHECK counts and prints what fails, main returns failures().
#pragma once

#include <atomic>
#include <cstdio>

namespace check {

inline std::atomic<int> failed{0};

/// The exit status for main(): 0 when every check held.
inline int failures() {
  if (failed == 0) return 0;
  std::fprintf(stderr, "%d checks failed\n", failed.load());
  return 1;
}

}  // namespace check

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      ++check::failed;                                                             \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                              \
  } while (false)

#define CHECK_THROWS(type, expression)                                                        \
  do {                                                                                        \
    bool thrown = false;                                                                      \
    try {                                                                                     \
      expression;                                                                             \
    } catch (const type&) {                                                                   \
      thrown = true;                                                                          \
    }                                                                                         \
    if (!thrown) {                                                                            \
      ++check::failed;                                                                        \
      std::fprintf(stderr, "%s:%d: no %s from %s\n", __FILE__, __LINE__, #type, #expression); \
    }                                                                                         \
  } while (false)
