// Decides, for a file opened for reading, between the source and its copy.
#pragma once

#include <stdbool.h>
#include <sys/types.h>

#include "paths.h"

struct opening {
  int dirfd;
  const char* path;
  struct named_place known_as;  // its `path` is NULL where its directory cannot be remembered
  int flags;                    // of open
  bool stream;                  // for a FILE: its reads cannot be seen, so it is not watched
  bool outside;                 // its directory is remembered as one of other files
  uint32_t moment;              // when the opening began, as mark_moment gives it
  bool asked;                   // the daemon knows of the file
  bool waited;                  // for the copy, long enough
  bool slow;                    // the source took long to open
  bool refused;                 // there will be no copy
  bool refuted;                 // the copy is not to be used, which the daemon knows
};

// Before the source is opened: a descriptor of the copy, or -1 where the source is to be opened.
int place_open(const struct named_file* file, struct opening* opening);

// After the source was opened as `fd`: puts the copy in its place where there is one by now. `file`
// is NULL when the path alone did not tell.
void place_settle(int fd, const struct named_file* file, struct opening* opening);

// The source of an entry, by the first of its spellings: a descriptor, or -1; its status.
int place_open_source(const struct stoker_entry* entry, int flags);
bool place_stat_source(const struct stoker_entry* entry, struct stat* status);

// A checked descriptor of the copy, complete or (state copying) not; -1 with errno.
int place_open_copy(uint32_t number, const struct stoker_entry* entry, int flags);
