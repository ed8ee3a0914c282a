// A region as Python describes it: a dictionary of its fields, rules by name.
#pragma once

#include <nanobind/nanobind.h>

#include "stoker/arena.h"

/// Throws ConfigError for a rule that is not known.
stoker::RegionSpec region_spec(const nanobind::dict& rules);
