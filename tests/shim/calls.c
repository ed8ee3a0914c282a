// One call of every intercepted function, by its name:
//   calls open  NAME PATH                 what NAME opens, copied to standard output
//   calls stat  NAME PATH                 what NAME says of a descriptor of PATH
//   calls read  NAME PATH OFFSET LENGTH   opens, waits for a line of input, reads LENGTH bytes in
//   all
//                                         by NAME from OFFSET on; then "\n" and the offset left
//                                         behind
//   calls early PATH                      what an open before any library's constructor got, then
//                                         what an open afterwards gets
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

int __open(const char*, int, ...);
int __open64(const char*, int, ...);
int __open_2(const char*, int);
int __open64_2(const char*, int);
int __openat_2(int, const char*, int);
int __openat64_2(int, const char*, int);
int __fxstat(int, int, struct stat*);
int __fxstat64(int, int, struct stat64*);
int __fxstatat(int, int, const char*, struct stat*, int);
int __fxstatat64(int, int, const char*, struct stat64*, int);
ssize_t __read(int, void*, size_t);
ssize_t __pread64(int, void*, size_t, off_t);
ssize_t __read_chk(int, void*, size_t, size_t);
ssize_t __pread_chk(int, void*, size_t, off_t, size_t);
ssize_t __pread64_chk(int, void*, size_t, off_t, size_t);
int __close(int);
int __dup2(int, int);

#ifdef __x86_64__
enum { STAT_VERSION = 1 };
#else
enum { STAT_VERSION = 0 };
#endif

static int is(const char* name, const char* other) { return strcmp(name, other) == 0; }

static void fail(const char* what) {
  perror(what);
  exit(1);
}

static int open_by(const char* name, const char* path) {
  if (is(name, "open")) return open(path, O_RDONLY);
  if (is(name, "open64")) return open64(path, O_RDONLY);
  if (is(name, "__open")) return __open(path, O_RDONLY);
  if (is(name, "__open64")) return __open64(path, O_RDONLY);
  if (is(name, "openat")) return openat(AT_FDCWD, path, O_RDONLY);
  if (is(name, "openat64")) return openat64(AT_FDCWD, path, O_RDONLY);
  if (is(name, "__open_2")) return __open_2(path, O_RDONLY);
  if (is(name, "__open64_2")) return __open64_2(path, O_RDONLY);
  if (is(name, "__openat_2")) return __openat_2(AT_FDCWD, path, O_RDONLY);
  if (is(name, "__openat64_2")) return __openat64_2(AT_FDCWD, path, O_RDONLY);
  if (is(name, "fopen")) return fileno(fopen(path, "r"));
  if (is(name, "fopen64")) return fileno(fopen64(path, "rbe"));
  if (is(name, "freopen")) return fileno(freopen(path, "r", stdin));
  if (is(name, "freopen64")) return fileno(freopen64(path, "r", fopen("/dev/null", "r")));
  if (is(name, "close") || is(name, "__close")) {
    const int first = open(path, O_RDONLY);
    if (is(name, "close") ? close(first) : __close(first)) fail(name);
    const int second = open(path, O_RDONLY);
    if (second != first) fail("the descriptor was not free again");
    return second;
  }
  if (is(name, "chdir") || is(name, "fchdir")) {
    char folder[4096];
    close(open("calls.c", O_RDONLY));  // so that the present directory is known to be another
    strcpy(folder, path);
    *strrchr(folder, '/') = '\0';
    if (is(name, "chdir") ? chdir(folder) : fchdir(open(folder, O_RDONLY))) fail(folder);
    return open(strrchr(path, '/') + 1, O_RDONLY);
  }
  const int fd = open(path, O_RDONLY);
  if (is(name, "dup")) return dup(fd);
  if (is(name, "dup2")) return dup2(fd, 50);
  if (is(name, "__dup2")) return __dup2(fd, 50);
  if (is(name, "dup3")) return dup3(fd, 50, O_CLOEXEC);
  if (is(name, "fcntl")) return fcntl(fd, F_DUPFD, 50);
  if (is(name, "fcntl64")) return fcntl64(fd, F_DUPFD_CLOEXEC, 50);
  fprintf(stderr, "unknown call %s\n", name);
  exit(2);
}

static void copy_out(int fd) {
  char buffer[4096];
  ssize_t count;
  while ((count = read(fd, buffer, sizeof(buffer))) > 0) {
    if (write(1, buffer, (size_t)count) != count) fail("write");
  }
  if (count < 0) fail("read");
}

static void show(const struct stat* s) {
  printf("%ju %ju %ju %ju %ju %ju %ju %ju %ju %jd %jd %jd\n", (uintmax_t)s->st_dev,
         (uintmax_t)s->st_ino, (uintmax_t)s->st_mode, (uintmax_t)s->st_nlink, (uintmax_t)s->st_uid,
         (uintmax_t)s->st_gid, (uintmax_t)s->st_size, (uintmax_t)s->st_blocks,
         (uintmax_t)s->st_blksize, (intmax_t)s->st_atim.tv_sec * 1000000000 + s->st_atim.tv_nsec,
         (intmax_t)s->st_mtim.tv_sec * 1000000000 + s->st_mtim.tv_nsec,
         (intmax_t)s->st_ctim.tv_sec * 1000000000 + s->st_ctim.tv_nsec);
}

static void show_statx(int fd) {
  struct statx x, size_only;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x)) fail("statx");
  if (statx(fd, "", AT_EMPTY_PATH, STATX_SIZE, &size_only)) fail("statx");
  if (size_only.stx_ino != x.stx_ino) fail("the inode depends on what is asked for");
  const struct stat s = {
      .st_dev = makedev(x.stx_dev_major, x.stx_dev_minor),
      .st_ino = x.stx_ino,
      .st_mode = x.stx_mode,
      .st_nlink = x.stx_nlink,
      .st_uid = x.stx_uid,
      .st_gid = x.stx_gid,
      .st_size = (off_t)x.stx_size,
      .st_blocks = (blkcnt_t)x.stx_blocks,
      .st_blksize = (blksize_t)x.stx_blksize,
      .st_atim = {x.stx_atime.tv_sec, x.stx_atime.tv_nsec},
      .st_mtim = {x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec},
      .st_ctim = {x.stx_ctime.tv_sec, x.stx_ctime.tv_nsec},
  };
  show(&s);
}

static int stat_by(const char* name, int fd, struct stat* s) {
  struct stat64* s64 = (struct stat64*)s;
  if (is(name, "fstat")) return fstat(fd, s);
  if (is(name, "fstat64")) return fstat64(fd, s64);
  if (is(name, "fstatat")) return fstatat(fd, "", s, AT_EMPTY_PATH);
  if (is(name, "fstatat64")) return fstatat64(fd, "", s64, AT_EMPTY_PATH);
  if (is(name, "__fxstat")) return __fxstat(STAT_VERSION, fd, s);
  if (is(name, "__fxstat64")) return __fxstat64(STAT_VERSION, fd, s64);
  if (is(name, "__fxstatat")) return __fxstatat(STAT_VERSION, fd, "", s, AT_EMPTY_PATH);
  if (is(name, "__fxstatat64")) return __fxstatat64(STAT_VERSION, fd, "", s64, AT_EMPTY_PATH);
  fprintf(stderr, "unknown call %s\n", name);
  exit(2);
}

static ssize_t read_by(const char* name, int fd, char* buffer, size_t size, off_t offset) {
  struct iovec parts[2] = {{buffer, size / 3}, {buffer + size / 3, size - size / 3}};
  if (is(name, "read")) return read(fd, buffer, size);
  if (is(name, "__read")) return __read(fd, buffer, size);
  if (is(name, "__read_chk")) return __read_chk(fd, buffer, size, size);
  if (is(name, "readv")) return readv(fd, parts, 2);
  if (is(name, "pread")) return pread(fd, buffer, size, offset);
  if (is(name, "pread64")) return pread64(fd, buffer, size, offset);
  if (is(name, "__pread64")) return __pread64(fd, buffer, size, offset);
  if (is(name, "__pread_chk")) return __pread_chk(fd, buffer, size, offset, size);
  if (is(name, "__pread64_chk")) return __pread64_chk(fd, buffer, size, offset, size);
  if (is(name, "preadv")) return preadv(fd, parts, 2, offset);
  if (is(name, "preadv64")) return preadv64(fd, parts, 2, offset);
  if (is(name, "preadv2")) return preadv2(fd, parts, 2, offset, 0);
  if (is(name, "preadv64v2")) return preadv64v2(fd, parts, 2, -1, 0);
  if (is(name, "mmap") || is(name, "mmap64")) {
    const off_t page = offset - offset % 4096;
    const size_t length = size + (size_t)(offset - page);
    const char* at = is(name, "mmap") ? mmap(NULL, length, PROT_READ, MAP_SHARED, fd, page)
                                      : mmap64(NULL, length, PROT_READ, MAP_PRIVATE, fd, page);
    if (at == MAP_FAILED) return -1;
    memcpy(buffer, at + (offset - page), size);
    return (ssize_t)size;
  }
  fprintf(stderr, "unknown call %s\n", name);
  exit(2);
}

static void read_all(const char* name, const char* path, off_t offset, size_t length) {
  const int fd = open(path, O_RDONLY);
  if (fd < 0 || lseek(fd, offset, SEEK_SET) != offset) fail(path);
  if (write(1, "opened\n", 7) != 7) fail("write");
  char line[2];
  if (read(0, line, 1) != 1) fail("standard input");
  char* buffer = malloc(length + 1);
  size_t done = 0;
  errno = 77;
  while (done < length) {
    const ssize_t count = read_by(name, fd, buffer + done, length - done, offset + (off_t)done);
    if (count < 0) fail(name);
    if (errno != 77) fail("errno was touched");
    if (count == 0) break;
    done += (size_t)count;
  }
  fwrite(buffer, 1, done, stdout);
  printf("\n%jd", (intmax_t)lseek(fd, 0, SEEK_CUR));
  free(buffer);
}

static int early_fd = -1;

static void open_early(int argc, char** argv, char** environment) {
  (void)environment;
  if (argc == 3 && is(argv[1], "early")) early_fd = open(argv[2], O_RDONLY);
}

__attribute__((section(".preinit_array"), used)) static void (*preinit)(int, char**,
                                                                        char**) = open_early;

int main(int argc, char** argv) {
  if (argc == 4 && is(argv[1], "open")) {
    copy_out(open_by(argv[2], argv[3]));
  } else if (argc == 4 && is(argv[1], "stat")) {
    const int fd = open(argv[3], O_RDONLY);
    struct stat status;
    if (is(argv[2], "statx")) {
      show_statx(fd);
    } else if (stat_by(argv[2], fd, &status)) {
      fail(argv[2]);
    } else {
      show(&status);
    }
  } else if (argc == 6 && is(argv[1], "read")) {
    read_all(argv[2], argv[3], atoll(argv[4]), (size_t)atoll(argv[5]));
  } else if (argc == 3 && is(argv[1], "early")) {
    copy_out(early_fd);
    copy_out(open(argv[2], O_RDONLY));
  } else {
    return 2;
  }
  return 0;
}
