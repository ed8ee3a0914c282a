// The library of `stoker run`: see SYMBOLS.md for what it intercepts, table.h for what it is told.
//
//   open.c, stream.c ──────► place.c ────► paths.c   which file is meant
//   read.c, mmap.c, stat.c ► copied.c ──┐  watch.c   which descriptor is which
//   change.c ───────────────────────────┴► marks.c   what programs change
//                                          map.c     what the daemon's table says
//                                          wait.c, report.c   waiting for the daemon, telling it
//
// No function here allocates memory or takes a lock. A thread that finds the table not yet mapped
// goes to the real file.
#include "map.h"
#include "real.h"
#include "watch.h"

__attribute__((constructor)) static void prepare(void) {
  real_resolve_all();
  map_attach();
  watch_forks();
}
