// The daemon's table, read. Nothing in it is trusted: every offset is checked before it is
// followed.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "table.h"

#define NO_ENTRY UINT32_MAX

// A file as the table names it: a path relative to a source, not NUL-terminated in general.
struct named_file {
  const char* path;
  uint32_t length;
  uint32_t hash;  // set by map_name
  uint8_t source;
  uint8_t row;  // of the table's sources, by which the program named it
};

// Maps table and counters of the run named by STOKER_TIERING, once; afterwards costs a load.
void map_attach(void);

// The header as it was when mapped and found sound; NULL without a table.
const struct stoker_table* map_header(void);
// Like map_header, but NULL also when the daemon is gone: then every call goes to the real file.
const struct stoker_table* map_live(void);
// NULL where the counters could not be mapped.
struct stoker_counters* map_counters(void);
// What lies behind the counters.
struct stoker_ring* map_ring(void);
// Shorter than 108 bytes; empty where there is none.
const char* map_socket_path(void);

uint64_t now_ns(void);

// The string's bytes, or NULL when it does not lie in the arena.
const char* map_string(struct stoker_string string);
// Whether `dev` is the device of a source's directory.
bool map_is_source_device(uint64_t dev);
// Whether the row's path still leads to the directory that the daemon copies from.
bool map_is_source_here(uint8_t row);
// Call when this program may have made a path lead elsewhere.
void map_look_again(void);
// Whether parts of the source may be other directories than for the daemon.
bool map_is_other_namespace(void);

// A row of the table, and a path below it.
struct named_file map_name(uint8_t row, const char* path, uint32_t length);
// The number of the file's newest entry, or NO_ENTRY.
uint32_t map_find(const struct named_file* file);
// The entry's state alone; 0 when there is none.
unsigned map_state(uint32_t number);
// A consistent copy of the entry; false when there is none or it keeps changing.
bool map_read(uint32_t number, struct stoker_entry* entry);
// Whether the entry is still in the state it was in when it was read.
bool map_unchanged(uint32_t number, const struct stoker_entry* entry);
// Whether a file with this status is the entry's source, unchanged.
bool map_is_source(const struct stoker_entry* entry, const struct stat* status);
// The newest entry of the file with this status, whose name has the hash; NO_ENTRY without one.
uint32_t map_find_source(uint32_t hash, const struct stat* status, struct stoker_entry* entry);
// The entry whose copy has this status; false for any other file.
bool map_find_copy(const struct stat* status, struct stoker_entry* entry);

// The word that goes up whenever an entry of this hash changes.
const uint32_t* map_changes(uint32_t hash);

static inline unsigned entry_state(const struct stoker_entry* entry) { return entry->word & 255; }

static inline int64_t time_ns(struct timespec time) {
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}
