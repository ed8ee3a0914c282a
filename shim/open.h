// What fopen and freopen use of open.
#pragma once

// As open(path, flags), for a descriptor that becomes a stream's.
int open_for_stream(const char* path, int flags);

// The file is about to be written, by other means than the open functions here.
void open_for_writing(const char* path);
