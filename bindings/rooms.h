// What stoker._core.Arena.reserve returns, and stoker._core.Downloads writes to.
#pragma once

#include <memory>

#include "stoker/rooms.h"

struct PyRooms {
  std::shared_ptr<stoker::Rooms> rooms;
};
