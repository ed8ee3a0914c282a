// Descriptors and what they stand for: a source may get a copy, and the source of a copy may be
// replaced.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "map.h"

// What the descriptor stands for. If it is a copy whose source was changed since, it is the source
// from now on, with the same offset. errno is kept.
uint64_t copied_watch(int fd);

// Lets the descriptor of a source be its copy, which is complete, if no other process shares it.
bool copied_become(int fd, uint64_t watch, const struct stoker_entry* entry);

// Lets the descriptor of a copy be the source, unless that is gone from its place. errno is kept.
void copied_leave(int fd);

// The entry of a descriptor that is watched as a source; false when there is no copy to expect,
// or when the number is another file's by now. Brings `watch` up to date. errno is not kept.
bool copied_entry(int fd, uint64_t* watch, struct stoker_entry* entry);

// Whether the copy holds the first `end` bytes, after a wait where one is due; brings `entry` up to
// date.
bool copied_reaches(int fd, uint64_t watch, uint64_t end, struct stoker_entry* entry);
