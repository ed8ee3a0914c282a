// Path tables of the reader: their offsets come from an index that lies on disk.
//
// The input: {paths:1, ids:1, offsets:8 each, ids:4 each, path bytes}. The root leads nowhere, so
// that nothing of this machine is opened.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "stoker/reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static stoker::Reader reader(1);
  if (size < 2) return 0;
  std::vector<std::int64_t> offsets(data[0] % 16u);
  std::vector<std::uint32_t> ids(data[1] % 16u);
  data += 2;
  size -= 2;
  const auto take = [&](auto& values) {
    const std::size_t bytes = values.size() * sizeof(values[0]);
    if (size < bytes) return false;
    if (bytes == 0) return true;
    std::memcpy(values.data(), data, bytes);
    data += bytes;
    size -= bytes;
    return true;
  };
  if (!take(offsets) || !take(ids)) return 0;
  const stoker::PathTable table{
      "/proc/no-such-folder/", {reinterpret_cast<const std::byte*>(data), size}, offsets};
  std::vector<std::int32_t> status(ids.size());
  std::vector<std::byte> room(4 * ids.size());
  std::vector<std::int64_t> at(ids.size() + 1);
  for (std::size_t i = 0; i < at.size(); ++i) at[i] = static_cast<std::int64_t>(4 * i);
  try {
    reader.read(table, ids, room, at, status, true);
  } catch (const std::logic_error&) {
  }
  std::vector<std::int64_t> sizes(table.size()), times(table.size()), changes(table.size());
  status.resize(table.size());
  try {
    reader.stat(table, sizes, times, changes, status);
  } catch (const std::logic_error&) {
  }
  return 0;
}
