// How far the copy is of a source that the program has open.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "map.h"

// The entry of a descriptor that is watched as a source; false when there is no copy to hope for,
// or when the number is another file's by now. errno is not kept.
bool copied_entry(int fd, uint32_t watch, struct stoker_entry* entry);

// Whether the copy holds the first `end` bytes, after a wait where one is due; brings `entry` up to
// date.
bool copied_reaches(int fd, uint32_t watch, uint64_t end, struct stoker_entry* entry);
