// stoker._core.Reader and read_cached: files and ranges in batches, with the GIL released.
#include "stoker/reader.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <span>
#include <string>

#include "gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<T> span_of(const Array<T>& array) {
  return {array.data(), array.size()};
}

stoker::PathTable table_of(const nb::bytes& root, const Array<const std::uint8_t>& paths,
                           const Array<const std::int64_t>& path_offsets) {
  return {{root.c_str(), root.size()}, std::as_bytes(span_of(paths)), span_of(path_offsets)};
}

void read_files(stoker::Reader& self, const nb::bytes& root, const Array<const std::uint8_t>& paths,
                const Array<const std::int64_t>& path_offsets,
                const Array<const std::uint32_t>& ids, const Array<std::uint8_t>& data,
                const Array<const std::int64_t>& offsets, const Array<std::int32_t>& status,
                bool drop_page_cache) {
  const auto table = table_of(root, paths, path_offsets);
  const auto room = std::as_writable_bytes(span_of(data));
  const GilReleased released;
  self.read(table, span_of(ids), room, span_of(offsets), span_of(status), drop_page_cache);
}

void stat_files(stoker::Reader& self, const nb::bytes& root, const Array<const std::uint8_t>& paths,
                const Array<const std::int64_t>& path_offsets, const Array<std::int64_t>& sizes,
                const Array<std::int64_t>& mtimes_ns, const Array<std::int64_t>& ctimes_ns,
                const Array<std::int32_t>& status) {
  const auto table = table_of(root, paths, path_offsets);
  const GilReleased released;
  self.stat(table, span_of(sizes), span_of(mtimes_ns), span_of(ctimes_ns), span_of(status));
}

std::size_t read_cached(int fd, std::int64_t file, const Array<const std::int64_t>& files,
                        const Array<const std::int64_t>& starts,
                        const Array<const std::int64_t>& bounds, const Array<std::uint8_t>& data,
                        const Array<bool>& done) {
  const stoker::Ranges ranges{span_of(files), span_of(starts), span_of(bounds)};
  const auto room = std::as_writable_bytes(span_of(data));
  const GilReleased released;
  return stoker::read_cached(fd, file, ranges, room, span_of(done));
}

}  // namespace

void bind_reader(nb::module_& m) {
  m.def("read_cached", &read_cached, "fd"_a, "file"_a, "files"_a.noconvert(),
        "starts"_a.noconvert(), "bounds"_a.noconvert(), "data"_a.noconvert(), "done"_a.noconvert(),
        "Copy ranges i of a file, those with files[i] == file (i64), from byte starts[i] on to "
        "data[bounds[i]:bounds[i + 1]], up to the first that the page cache does not have whole; "
        "set done[i] (bool) for each, and return how many reads that took.");
  nb::class_<stoker::Reader>(m, "Reader",
                             "Reads and stats many files at once through a bounded pool of "
                             "threads; safe in any thread and after a fork.")
      .def(nb::init<unsigned>(), "threads"_a)
      .def_prop_ro("threads", &stoker::Reader::threads, "Files read at once by the pool.")
      .def("read", &read_files, "root"_a, "paths"_a.noconvert(), "path_offsets"_a.noconvert(),
           "ids"_a.noconvert(), "data"_a.noconvert(), "offsets"_a.noconvert(),
           "status"_a.noconvert(), "drop_page_cache"_a = false,
           "Read file ids[i] (u32) into data[offsets[i]:offsets[i + 1]] and write 0, an errno, "
           "SHRANK, GREW or NOT_A_FILE to status[i] (i32). Path k is root + "
           "paths[path_offsets[k]:path_offsets[k + 1]].")
      .def("stat", &stat_files, "root"_a, "paths"_a.noconvert(), "path_offsets"_a.noconvert(),
           "sizes"_a.noconvert(), "mtimes_ns"_a.noconvert(), "ctimes_ns"_a.noconvert(),
           "status"_a.noconvert(),
           "Write size, times of modification and change in ns and status (0, errno or NOT_A_FILE) "
           "of every path.")
      .def_prop_ro_static("SHRANK", [](nb::handle) { return int{stoker::kShrank}; })
      .def_prop_ro_static("GREW", [](nb::handle) { return int{stoker::kGrew}; })
      .def_prop_ro_static("NOT_A_FILE", [](nb::handle) { return int{stoker::kNotAFile}; });
}
