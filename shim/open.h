// What fopen and freopen use of open.
#pragma once

// Like open(path, flags), for a descriptor that becomes a stream's.
int open_for_stream(const char* path, int flags);
