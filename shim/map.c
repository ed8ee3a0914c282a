#include "map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "real.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "crc32 below reads words");

enum { MAX_PROBES = 4096 };  // an index that is full or garbage must not delay a program

// A daemon silent for this long is asked for by its lock, at most so often.
#define SILENCE_NS 1000000000ull
#define LOOK_AGAIN_NS 200000000ull

static const char* mapped;  // set once, by the attaching thread
static char table_path[1024];
static ino_t table_ino;
static struct stoker_table header;  // a private copy, checked
static struct stoker_counters* counters;
static bool other_namespace;
static char socket_path[108];  // empty when the directory's name is too long for it
static uint32_t crc_table[8][256];
static _Atomic(bool) attached;  // everything above is written

#define LOAD(pointer) __atomic_load_n((pointer), __ATOMIC_ACQUIRE)

static void fill_crc_table(void) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (0xEDB88320u & -(value & 1));
    crc_table[0][byte] = value;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int k = 1; k < 8; ++k) {
      uint32_t before = crc_table[k - 1][byte];
      crc_table[k][byte] = (before >> 8) ^ crc_table[0][before & 255];
    }
  }
}

static uint32_t crc32(uint32_t start, const char* bytes, size_t length) {
  uint32_t value = ~start;
  for (; length >= 8; bytes += 8, length -= 8) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    word ^= value;
    value = 0;
    for (int k = 0; k < 8; ++k) value ^= crc_table[7 - k][(word >> (8 * k)) & 255];
  }
  for (; length > 0; ++bytes, --length) {
    value = (value >> 8) ^ crc_table[0][(value ^ (unsigned char)*bytes) & 255];
  }
  return ~value;
}

static bool region_fits(uint64_t offset, uint64_t count, uint64_t size) {
  return offset % 8 == 0 && offset >= sizeof(header) && offset <= header.bytes &&
         count <= (header.bytes - offset) / size;
}

static bool string_fits(struct stoker_string string) {
  return string.offset < header.arena_limit && string.length < header.arena_limit - string.offset &&
         string.length > 0;
}

// One with a NUL inside would be compared with bytes beyond the end of a program's path.
static bool path_is_whole(const char* table, struct stoker_string path) {
  if (!string_fits(path)) return false;
  const char* bytes = table + header.arena_offset + path.offset;
  return bytes[0] == '/' && !memchr(bytes, '\0', path.length);
}

static bool header_is_sound(const char* table, uint64_t file_bytes) {
  if (memcmp(header.magic, STOKER_TABLE_MAGIC, sizeof(header.magic)) != 0) return false;
  if (header.version != STOKER_TABLE_VERSION || header.bytes > file_bytes) return false;
  if (header.index_limit_log2 > 30 || header.source_count > STOKER_MAX_SOURCES ||
      header.tier_count > STOKER_MAX_TIERS) {
    return false;
  }
  const uint64_t slots = 2ull << header.index_limit_log2;
  if (!region_fits(header.entries_offset, header.entries_limit, sizeof(struct stoker_entry)) ||
      !region_fits(header.path_index_offset, slots, 4) ||
      !region_fits(header.copy_index_offset, slots, 4) ||
      !region_fits(header.arena_offset, header.arena_limit, 1)) {
    return false;
  }
  for (uint32_t row = 0; row < header.source_count; ++row) {
    if (header.sources[row].number >= STOKER_MAX_SOURCES) return false;
    if (!path_is_whole(table, header.sources[row].path)) return false;
  }
  for (uint32_t tier = 0; tier < header.tier_count; ++tier) {
    if (!string_fits(header.tiers[tier].part_dir)) return false;
  }
  return true;
}

static bool name_file(const char* directory, const char* name, char* path, size_t size) {
  const size_t length = strlen(directory);
  if (length + strlen(name) + 2 > size) return false;
  memcpy(path, directory, length);
  path[length] = '/';
  strcpy(path + length + 1, name);
  return true;
}

// Most of the table is a hole, which still counts as address space: a program for which that is
// limited keeps it.
static bool is_affordable(uint64_t bytes) {
  struct rlimit limit;
  return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
         bytes <= limit.rlim_cur / 8;
}

// Maps a file of this user's (or root's) whole. NULL when it is another's, shorter than `least` or
// cannot be mapped.
static void* map_file(const char* path, int flags, uint64_t least, struct stat* status) {
  const int fd = raw_openat(AT_FDCWD, path, flags | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return NULL;
  void* address = MAP_FAILED;
  if (raw_fstat(fd, status) == 0 && S_ISREG(status->st_mode) &&
      (status->st_uid == geteuid() || status->st_uid == 0) && (uint64_t)status->st_size >= least &&
      is_affordable((uint64_t)status->st_size)) {
    const int protection = flags == O_RDWR ? PROT_READ | PROT_WRITE : PROT_READ;
    address = raw_mmap(NULL, (size_t)status->st_size, protection, MAP_SHARED, fd, 0);
  }
  raw_close(fd);
  return address == MAP_FAILED ? NULL : address;
}

static void attach_counters(const char* directory) {
  char path[1024];
  struct stat status;
  if (!name_file(directory, "counters", path, sizeof(path))) return;
  counters = map_file(path, O_RDWR, sizeof(*counters) + sizeof(struct stoker_ring), &status);
  if (counters && memcmp(counters->magic, STOKER_COUNTERS_MAGIC, sizeof(counters->magic)) != 0) {
    munmap(counters, (size_t)status.st_size);
    counters = NULL;
  }
}

static void attach(const char* directory) {
  struct stat status;
  if (!name_file(directory, "table", table_path, sizeof(table_path))) return;
  const char* table = map_file(table_path, O_RDONLY, sizeof(header), &status);
  if (!table) return;
  memcpy(&header, table, sizeof(header));
  if (!header_is_sound(table, (uint64_t)status.st_size)) {
    munmap((void*)table, (size_t)status.st_size);
    return;
  }
  mapped = table;
  table_ino = status.st_ino;
  if (!name_file(directory, "socket", socket_path, sizeof(socket_path))) socket_path[0] = '\0';
  attach_counters(directory);
  // Without /proc it cannot be known, and one check too many does no harm.
  other_namespace =
      header.mount_namespace != 0 && (raw_fstatat(AT_FDCWD, "/proc/self/ns/mnt", &status, 0) != 0 ||
                                      status.st_ino != header.mount_namespace);
}

void map_attach(void) {
  static atomic_flag begun = ATOMIC_FLAG_INIT;
  if (!environ) return;                          // a call before the C library is ready
  if (atomic_flag_test_and_set(&begun)) return;  // a second thread goes without until it is done
  const int saved = errno;
  const char* directory = getenv("STOKER_TIERING");
  if (directory && directory[0] == '/') {
    fill_crc_table();
    attach(directory);
    if (mapped) atomic_store_explicit(&attached, true, memory_order_release);
  }
  errno = saved;
}

const struct stoker_table* map_header(void) {
  return atomic_load_explicit(&attached, memory_order_acquire) ? &header : NULL;
}

static const struct stoker_table* shared(void) { return (const struct stoker_table*)mapped; }

// Whether a process holds the lock of the table that is mapped here, as its daemon does.
static bool is_table_held(void) {
  const int saved = errno;
  struct stat status;
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  const int fd = raw_openat(AT_FDCWD, table_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const bool held = fd >= 0 && raw_fstat(fd, &status) == 0 && status.st_ino == table_ino &&
                    raw_find_lock(fd, &lock) == 0 && lock.l_type != F_UNLCK;
  if (fd >= 0) raw_close(fd);
  errno = saved;
  return held;
}

static bool is_table_held_lately(uint64_t now) {
  static _Atomic(uint64_t) verdict;  // when it was found, and in the lowest bit, what
  const uint64_t last = atomic_load_explicit(&verdict, memory_order_relaxed);
  if (last != 0 && now - last < LOOK_AGAIN_NS) return last & 1;
  const bool held = is_table_held();
  atomic_store_explicit(&verdict, (now & ~1ull) | held, memory_order_relaxed);
  return held;
}

// A daemon on a busy machine is slow, not gone; one that stays stopped is useless.
const struct stoker_table* map_live(void) {
  if (!map_header()) return NULL;
  const uint64_t beat = LOAD(&shared()->heartbeat_ns);
  if (beat == 0) return NULL;
  const uint64_t now = now_ns();
  const uint64_t silence = now > beat ? now - beat : 0;
  if (silence <= SILENCE_NS) return &header;
  if (silence > header.heartbeat_ms * 1000000ull) return NULL;
  return is_table_held_lately(now) ? &header : NULL;
}

struct stoker_counters* map_counters(void) { return map_header() ? counters : NULL; }

struct stoker_ring* map_ring(void) {
  struct stoker_counters* before = map_counters();
  return before ? (struct stoker_ring*)(void*)(before + 1) : NULL;
}

const char* map_socket_path(void) { return socket_path; }

uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return (uint64_t)time_ns(time);
}

const char* map_string(struct stoker_string string) {
  return string_fits(string) ? mapped + header.arena_offset + string.offset : NULL;
}

bool map_is_source_device(uint64_t dev) {
  for (uint32_t row = 0; row < header.source_count; ++row) {
    if (header.sources[row].dev == dev) return true;
  }
  return false;
}

// When the source was last found at the path that it was opened by, which has no link in it.
static _Atomic(uint64_t) found_here;

// What the kernel has at hand is enough: a directory's numbers do not change. A path without a link
// is looked at once in a tick of the clock (some milliseconds), as that costs as much as half an
// open; a link is what people exchange under running programs, and is looked at each time.
bool map_is_source_here(uint8_t row) {
  const struct stoker_source* source = &header.sources[row];
  const uint64_t now = now_ns();
  if (row == 0 && atomic_load_explicit(&found_here, memory_order_relaxed) == now) return true;
  uint64_t dev, ino;
  if (!raw_find_directory(map_string(source->path), &dev, &ino)) return false;
  const bool here = dev == source->dev && ino == source->ino;
  if (row == 0 && here) atomic_store_explicit(&found_here, now, memory_order_relaxed);
  return here;
}

void map_look_again(void) { atomic_store_explicit(&found_here, 0, memory_order_relaxed); }

bool map_is_other_namespace(void) { return other_namespace; }

struct named_file map_name(uint8_t row, const char* path, uint32_t length) {
  const uint8_t source = (uint8_t)header.sources[row].number;
  return (struct named_file){path, length, crc32(source, path, length), source, row};
}

static const struct stoker_entry* entry_at(uint32_t number) {
  if (number >= header.entries_limit || number >= LOAD(&shared()->entry_count)) return NULL;
  return (const struct stoker_entry*)(mapped + header.entries_offset) + number;
}

// A way along an index, from the slot that the top bits of `spread` name to the first empty one.
struct walk {
  const uint32_t* slots;
  uint32_t mask;
  uint32_t slot;
  int probes;
};

static bool begin_walk(struct walk* walk, uint64_t offset, const uint32_t* log2, uint64_t spread) {
  const uint32_t size = LOAD(log2);
  if (size == 0 || size > header.index_limit_log2) return false;
  walk->slots = (const uint32_t*)(mapped + offset) + (1ull << size);
  walk->mask = (uint32_t)(1ull << size) - 1;
  walk->slot = (uint32_t)(spread >> (64 - size));
  walk->probes = 0;
  return true;
}

static uint32_t next_number(struct walk* walk) {
  if (walk->probes++ == MAX_PROBES) return NO_ENTRY;
  const uint32_t value = LOAD(walk->slots + walk->slot);
  walk->slot = (walk->slot + 1) & walk->mask;
  return value - 1;  // an empty slot's 0 becomes NO_ENTRY
}

static bool is_named(const struct stoker_entry* entry, const struct named_file* file) {
  if (entry->hash != file->hash || entry->source != file->source ||
      entry->path_length != file->length) {
    return false;
  }
  const char* path = map_string((struct stoker_string){entry->path_offset, entry->path_length, 0});
  return path && memcmp(path, file->path, file->length) == 0;
}

static bool begin_path_walk(struct walk* walk, uint32_t hash) {
  const uint64_t spread = (uint64_t)(hash * 0x9E3779B1u) << 32;
  return begin_walk(walk, header.path_index_offset, &shared()->path_index_log2, spread);
}

uint32_t map_find(const struct named_file* file) {
  struct walk walk;
  if (!begin_path_walk(&walk, file->hash)) return NO_ENTRY;
  for (;;) {
    const uint32_t number = next_number(&walk);
    if (number == NO_ENTRY) return NO_ENTRY;
    const struct stoker_entry* entry = entry_at(number);
    if (entry && is_named(entry, file)) return number;
  }
}

unsigned map_state(uint32_t number) {
  const struct stoker_entry* entry = entry_at(number);
  return entry ? LOAD(&entry->word) & 255 : 0;
}

bool map_read(uint32_t number, struct stoker_entry* entry) {
  const struct stoker_entry* shared_entry = entry_at(number);
  if (!shared_entry) return false;
  enum { WORDS = sizeof(*entry) / 8 };
  uint64_t words[WORDS];
  for (int attempt = 0; attempt < 8; ++attempt) {
    const uint32_t word = LOAD(&shared_entry->word);
    const uint64_t* from = (const uint64_t*)(const void*)shared_entry;
    for (int i = 0; i < WORDS; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (__atomic_load_n(&shared_entry->word, __ATOMIC_RELAXED) != word) continue;
    memcpy(entry, words, sizeof(*entry));
    return entry->word == word && entry->tier < STOKER_MAX_TIERS &&
           entry->source < STOKER_MAX_SOURCES;
  }
  return false;
}

bool map_unchanged(uint32_t number, const struct stoker_entry* entry) {
  const struct stoker_entry* shared_entry = entry_at(number);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return shared_entry && LOAD(&shared_entry->word) == entry->word;
}

// All of what the kernel says, because archives, rsync and builds set times at will. Where inode
// numbers do not last (some FUSE file systems), copies are made again.
bool map_is_source(const struct stoker_entry* entry, const struct stat* status) {
  return status->st_dev == entry->source_dev && status->st_ino == entry->source_ino &&
         (uint64_t)status->st_size == entry->source_size &&
         time_ns(status->st_mtim) == entry->source_mtime_ns &&
         time_ns(status->st_ctim) == entry->source_ctime_ns;
}

uint32_t map_find_source(uint32_t hash, const struct stat* status, struct stoker_entry* entry) {
  struct walk walk;
  if (!begin_path_walk(&walk, hash)) return NO_ENTRY;
  for (;;) {
    const uint32_t number = next_number(&walk);
    if (number == NO_ENTRY) return NO_ENTRY;
    if (map_read(number, entry) && entry->hash == hash && map_is_source(entry, status)) {
      return number;
    }
  }
}

static bool is_tier_device(uint64_t dev) {
  for (uint32_t tier = 0; tier < header.tier_count; ++tier) {
    if (header.tiers[tier].dev == dev) return true;
  }
  return false;
}

bool map_find_copy(const struct stat* status, struct stoker_entry* entry) {
  if (!map_header() || !S_ISREG(status->st_mode) || !is_tier_device(status->st_dev)) return false;
  struct walk walk;
  const uint64_t spread = status->st_ino * 0x9E3779B97F4A7C15ull;
  if (!begin_walk(&walk, header.copy_index_offset, &shared()->copy_index_log2, spread))
    return false;
  for (;;) {
    const uint32_t number = next_number(&walk);
    if (number == NO_ENTRY) return false;
    if (!map_read(number, entry) || entry->copy_ino != status->st_ino) continue;
    // An inode number is used again for another file once the copy is gone: so size and time count
    // too.
    if ((entry_state(entry) == STOKER_PLACED || entry_state(entry) == STOKER_DROPPED) &&
        header.tiers[entry->tier].dev == status->st_dev &&
        entry->source_size == (uint64_t)status->st_size &&
        entry->source_mtime_ns == time_ns(status->st_mtim)) {
      return true;
    }
  }
}

const uint32_t* map_changes(uint32_t hash) { return &shared()->changes[hash % STOKER_BUCKETS]; }
