// The table of `stoker run`, as a program under the shim finds it.
//
// The input lies over a sound table. Whatever it holds, the program continues.
#include "../shim/map.c"
#include "../shim/paths.c"
#include "../shim/real.c"
#include "overlay.h"

enum {
  ENTRIES = sizeof(struct stoker_table),
  PATH_INDEX = ENTRIES + 8 * sizeof(struct stoker_entry),
  COPY_INDEX = PATH_INDEX + 4 * 32,
  ARENA = COPY_INDEX + 4 * 32,
  BYTES = ARENA + 1024,
};

static const char* const PATHS[] = {"one", "sub/two", "sub/three"};

static struct stoker_string add_string(char* table, const char* text) {
  struct stoker_table* head = (struct stoker_table*)(void*)table;
  const struct stoker_string added = {head->arena_used, (uint32_t)strlen(text), 0};
  memcpy(table + ARENA + added.offset, text, added.length + 1);
  head->arena_used += added.length + 1;
  return added;
}

static void add_to_index(char* table, uint32_t offset, uint32_t first, uint32_t number) {
  uint32_t* slots = (uint32_t*)(void*)(table + offset) + 16;
  while (slots[first] != 0) first = (first + 1) % 16;
  slots[first] = number + 1;
}

static void make_sound(char* table) {
  struct stoker_table* head = (struct stoker_table*)(void*)table;
  memset(table, 0, BYTES);
  memcpy(head->magic, STOKER_TABLE_MAGIC, sizeof(head->magic));
  head->version = STOKER_TABLE_VERSION;
  head->bytes = BYTES;
  head->entries_offset = ENTRIES;
  head->entries_limit = 8;
  head->path_index_offset = PATH_INDEX;
  head->copy_index_offset = COPY_INDEX;
  head->arena_offset = ARENA;
  head->arena_limit = BYTES - ARENA;
  head->index_limit_log2 = 4;
  head->path_index_log2 = head->copy_index_log2 = 4;
  head->source_count = head->tier_count = 1;
  head->heartbeat_ns = now_ns();
  head->heartbeat_ms = 1000000;
  head->sources[0].path = add_string(table, "/source");
  head->tiers[0].part_dir = add_string(table, "/tier/parts");
  head->tiers[0].dev = 7;
  head->copy_dirs[0][0] = add_string(table, "/tier/copies");
  for (uint32_t number = 0; number < 3; ++number) {
    struct stoker_entry* entry = (struct stoker_entry*)(void*)(table + ENTRIES) + number;
    const struct stoker_string path = add_string(table, PATHS[number]);
    const struct named_file file = map_name(0, PATHS[number], path.length);
    *entry = (struct stoker_entry){.word = STOKER_PLACED,
                                   .hash = file.hash,
                                   .path_length = path.length,
                                   .path_offset = path.offset,
                                   .copy_ino = 100 + number,
                                   .source_size = 10};
    add_to_index(table, PATH_INDEX, (file.hash * 0x9E3779B1u) >> 28, number);
    add_to_index(table, COPY_INDEX, (uint32_t)(entry->copy_ino * 0x9E3779B97F4A7C15ull >> 60),
                 number);
  }
  head->entry_count = 3;
}

// Reads what a string has, as its users do.
static void look(struct stoker_string string) {
  char copy[2048];
  const char* text = map_string(string);
  if (text) memcpy(copy, text, string.length < sizeof(copy) ? string.length : sizeof(copy));
}

static void use(void) {
  struct stoker_entry entry;
  struct named_file file;
  static const char* const asked[] = {"/", "/source", "/source/one", "/s", "/source/sub/two"};
  for (size_t i = 0; i < sizeof(asked) / sizeof(*asked); ++i) {
    char* path = strdup(asked[i]);  // with nothing behind it
    if (path_is_under_source(path, &file)) map_find(&file);
    free(path);
  }
  for (uint32_t number = 0; number < 10; ++number) {
    if (!map_read(number, &entry)) continue;
    map_unchanged(number, &entry);
    look(map_header()->copy_dirs[entry.source][entry.tier]);
    look(map_header()->tiers[entry.tier].part_dir);
    look((struct stoker_string){entry.path_offset, entry.path_length, 0});
    const struct stat status = {.st_mode = S_IFREG,
                                .st_dev = 7,
                                .st_ino = entry.copy_ino,
                                .st_size = (off_t)entry.source_size};
    map_find_copy(&status, &entry);
  }
  for (size_t i = 0; i < 3; ++i) {
    file = map_name(0, PATHS[i], (uint32_t)strlen(PATHS[i]));
    map_state(map_find(&file));
    (void)*map_changes(file.hash);
  }
  map_live();
  map_is_source_device(7);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static char sound[BYTES];
  if (sound[0] == '\0') {
    fill_crc_table();
    make_sound(sound);
  }
  unsigned char whole[BYTES];
  memcpy(whole, sound, BYTES);
  size_t bytes = overlay(whole, BYTES, BYTES, data, size);
  if (bytes < sizeof(header)) bytes = sizeof(header);  // what is shorter is not mapped
  char* table = malloc(bytes);                         // with nothing behind it
  memcpy(table, whole, bytes);
  mapped = table;
  memcpy(&header, table, sizeof(header));
  if (header_is_sound(table, bytes)) {
    atomic_store(&attached, true);
    use();
    atomic_store(&attached, false);
  }
  free(table);
  return 0;
}
