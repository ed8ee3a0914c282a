// Bounded waits for the daemon. errno is not kept.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "map.h"

// Waits until the file has an entry, and with `whole` until that is no longer on its way. Returns
// the entry's number and reads it; NO_ENTRY when the daemon did not answer.
uint32_t wait_for_entry(const struct named_file* file, bool whole, struct stoker_entry* entry);

// Waits until the first `bytes` are copied; false when they will not be soon.
bool wait_for_bytes(uint32_t number, uint64_t bytes, struct stoker_entry* entry);
