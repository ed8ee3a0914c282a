// What programs of the run change, told to all of them before the change takes effect: by these
// marks each program knows at once, without asking any process, which copies may be out of date.
//
// A file has a slot for its name and one for its inode, by which it is known however it is named.
// Files that share a slot by chance cost each other a look at the source. Marks only ever make
// programs look, or read the source: a program that dies after a mark, or marks nonsense, slows
// others and no more.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "map.h"

uint32_t mark_of_name(uint32_t hash);
uint32_t mark_of_inode(uint64_t ino);

// The file changes about now: call before and after the change.
void mark_changed(uint32_t slot);
// What lies below a directory, or behind a link to one, may be other files.
void mark_all_changed(void);

// The file is open for writing, from now until mark_written; false when it will count as being
// written for ever, because more than one has it open.
bool mark_writing(uint32_t slot);
void mark_written(uint32_t slot);
void mark_writing_for_ever(uint32_t slot);

// Whether the source must be looked at before its copy is used.
bool is_in_doubt(const struct stoker_entry* entry);
// Whether a program has the source open for writing: then no copy of it is used.
bool is_being_written(uint32_t slot);

// Moments of marks, in units of about a millisecond, which wrap.
uint32_t mark_moment(void);
// Whether the file of the slot changed after that moment, or may do so unmarked.
bool is_marked_since(uint32_t slot, uint32_t moment);
