// What the shim tells the daemon: counters, marks of written files, requests.
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
};

void count_open(unsigned row);
void count_read(unsigned row, uint64_t bytes);
void count_event(enum counted_event event);

void mark_written(uint32_t hash);
bool is_marked_written(uint32_t hash);

// Sends a request without waiting; false when it could not be delivered. `entry` is NO_ENTRY in
// STOKER_OPENED. errno is not kept.
bool send_request(enum stoker_request_kind kind, const struct named_file* file, uint32_t entry);
