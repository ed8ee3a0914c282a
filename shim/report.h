// What the shim tells the daemon: counters and requests.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "map.h"

enum { SOURCE_ROW = 0 };  // row 1 + t is tier t

enum counted_event {
  COUNT_REQUESTS,
  COUNT_REQUESTS_LOST,
  COUNT_WAITS,
  COUNT_WAITS_GIVEN_UP,
  COUNT_CHECKS,
  COUNT_CHANGES,
  COUNT_ELSEWHERE,
};

void count_open(unsigned row);
void count_read(unsigned row, uint64_t bytes);
void count_event(enum counted_event event);

// Leaves a request where the daemon finds it, some time soon; false when there is no room. `entry`
// is NO_ENTRY in STOKER_OPENED. None of these waits, or keeps errno.
bool leave_request(enum stoker_request_kind kind, const struct named_file* file, uint32_t entry);

// Like leave_request for STOKER_OPENED, but wakes the daemon where its queue has room. The daemon
// gets a duplicate of `fd`, unless that is -1.
bool send_opened(const struct named_file* file, int fd);
