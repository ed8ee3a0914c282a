// A descriptor that knows its file. Programs close descriptors that are not theirs (a daemon's
// start, closefrom), and then the number comes to mean a file of the program's.
#pragma once

#include <sys/types.h>

namespace stoker {

// Which file a descriptor leads to; all zero where it leads to none.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileId&) const = default;
};
FileId file_of(int descriptor);

// Closes the descriptor at the end, unless its number means another file by then.
class OwnDescriptor {
 public:
  OwnDescriptor() = default;
  explicit OwnDescriptor(int descriptor) : number_(descriptor), file_(file_of(descriptor)) {}
  OwnDescriptor(OwnDescriptor&& other) noexcept { *this = static_cast<OwnDescriptor&&>(other); }
  OwnDescriptor& operator=(OwnDescriptor&& other) noexcept;
  ~OwnDescriptor() { reset(); }

  int number() const { return number_; }
  FileId file() const { return file_; }
  bool is_open() const { return number_ >= 0; }
  bool is_ours() const { return number_ >= 0 && file_of(number_) == file_; }
  void reset();
  // Opens the same file again, for locks that are not the old description's. Not open, with errno,
  // when that fails or the number means another file.
  OwnDescriptor reopen() const;

 private:
  int number_ = -1;
  FileId file_;
};

}  // namespace stoker
