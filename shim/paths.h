// From the paths a program uses to the names of the table.
#pragma once

#include <limits.h>
#include <stdbool.h>

#include "map.h"

// A path that names its file without help: absolute, and neither `.`, `..` nor an empty part below
// the source. True and `file` (which points into `path`) when it lies under a source.
bool path_is_under_source(const char* path, struct named_file* file);

// Whether path_join may find more: relative paths, and absolute ones with `.` or empty parts or
// below /proc/self/cwd.
bool path_needs_joining(const char* path);

// Writes the absolute form of `path`, relative to `dirfd`, into `joined`. False where only the
// kernel can tell: `..` after a named part, which may be a symbolic link; a `/` or `.` at the end.
bool path_join(int dirfd, const char* path, char joined[PATH_MAX]);

// The hash of the file's name, if the path names one below a source without the kernel's help.
bool path_hash(int dirfd, const char* path, uint32_t* hash);

// Whether the path without its last part leads to a directory of a source; asks the kernel.
bool path_leads_under_source(int dirfd, const char* path);

// Which directories hold no file of a source is remembered for some seconds, as far as there is
// room, because the kernel takes microseconds to say where a link has led to. It is a guess: a link
// to a source's file, in a directory of other files, may be taken for one of these, and read the
// source.
struct named_place {
  const char* path;
  uint64_t from;  // 0: absolute; else what tells the directory that it is relative to
};
bool path_is_outside(struct named_place place);
// `found` is where the kernel went.
void path_remember_outside(struct named_place place, const char* found);

// The working directory, as `from`: another number after each change of it.
uint64_t path_working_directory(void);
void path_working_directory_changed(void);

// The path of an open file as the kernel knows it.
bool path_of_descriptor(int fd, char path[PATH_MAX]);
