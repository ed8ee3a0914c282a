#include "stoker/error.h"

#include <cstring>

namespace stoker {

std::string describe_errno(const std::string& what, int code) {
  return what + ": " + std::strerror(code);
}

}  // namespace stoker
