// The exceptions of the core; the bindings turn them into stoker.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace stoker {

struct SegmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct CapacityError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ConfigError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "what: strerror(code)".
std::string describe_errno(const std::string& what, int code);

}  // namespace stoker
