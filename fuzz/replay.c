// Stands in for libFuzzer: hands a fuzzer each file of a folder once, and nothing at all first.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static void replay(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END) != 0) exit(2);
  const long size = ftell(file);
  uint8_t* data = malloc((size_t)size + 1);
  rewind(file);
  if (size < 0 || !data || fread(data, 1, (size_t)size, file) != (size_t)size) exit(2);
  fclose(file);
  LLVMFuzzerTestOneInput(data, (size_t)size);
  free(data);
}

int main(int count, char** arguments) {
  LLVMFuzzerTestOneInput((const uint8_t*)"", 0);
  DIR* folder = count == 2 ? opendir(arguments[1]) : NULL;
  if (!folder) {
    fprintf(stderr, "usage: %s CORPUS, a folder\n", arguments[0]);
    return 2;
  }
  int replayed = 0;
  for (struct dirent* entry; (entry = readdir(folder));) {
    char path[4096];
    if (entry->d_name[0] == '.') continue;
    snprintf(path, sizeof(path), "%s/%s", arguments[1], entry->d_name);
    replay(path);
    ++replayed;
  }
  closedir(folder);
  if (replayed == 0) fprintf(stderr, "%s is empty\n", arguments[1]);
  return replayed == 0;
}
