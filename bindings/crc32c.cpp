// stoker._core.crc32c: the checksum of a buffer, with the GIL released.
#include "stoker/crc32c.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint32_t crc32c(const Bytes& data, std::uint32_t crc) {
  const GilReleased released;
  return stoker::crc32c(crc, data.data(), data.size());
}

}  // namespace

void bind_crc32c(nb::module_& m) {
  m.def("crc32c", &crc32c, "data"_a.noconvert(), "crc"_a = 0,
        "Return the CRC-32C (Castagnoli) of data u8[n]; crc: that of what comes before it.");
}
