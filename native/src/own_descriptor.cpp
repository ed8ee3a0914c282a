#include "stoker/own_descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

namespace stoker {

FileId file_of(int descriptor) {
  struct stat status{};
  // Of none nothing is asked: errno still says why there is none.
  if (descriptor < 0 || fstat(descriptor, &status) != 0) return {};
  return {status.st_dev, status.st_ino};
}

OwnDescriptor& OwnDescriptor::operator=(OwnDescriptor&& other) noexcept {
  std::swap(number_, other.number_);
  std::swap(file_, other.file_);
  return *this;
}

void OwnDescriptor::reset() {
  if (is_ours()) close(number_);
  number_ = -1;
}

OwnDescriptor OwnDescriptor::reopen() const {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", number_);
  OwnDescriptor again(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
  if (again.is_open() && again.file() != file_) {
    again.reset();
    errno = EBADF;
  }
  return again;
}

}  // namespace stoker
