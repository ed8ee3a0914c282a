// A change of files that a call of the program's makes, marked before the call and after it. None
// of these functions changes errno.
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct change {
  uint32_t marks[4];
  int count;
  bool all;
};

// Of a call that makes a file of this name.
struct change change_of_name(int dirfd, const char* path);

// The call is over. Returns its result.
int change_made(const struct change* change, int result);
// Like change_made, for a call that opened the file for writing.
int change_by_writer(const struct change* change, int fd);
