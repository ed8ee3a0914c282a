// stoker._images: from JPEG files or pixels to resized parts, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <list>
#include <span>
#include <tuple>
#include <vector>

#include "gil.h"
#include "stoker/jpeg.h"
#include "stoker/resample.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_errors(nb::module_& m);

namespace {

using Pixels = nb::ndarray<const std::uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;
using Out = nb::ndarray<std::uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;
using Whole = nb::ndarray<std::uint8_t, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;
using Sides = std::tuple<std::uint32_t, std::uint32_t>;
using Seen = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
using Box = std::tuple<double, double, double, double>;

// A bytes-like object, held while the GIL is released.
class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  std::span<const std::uint8_t> bytes() const {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

stoker::Square square_of(const Out& out) {
  if (out.shape(0) != out.shape(1)) throw nb::value_error("out is no square");
  return {out.data(), static_cast<std::uint32_t>(out.shape(0)), out.stride(0), out.stride(1),
          out.stride(2)};
}

// One file, its part and its place, held while the GIL is released.
class Job {
 public:
  explicit Job(const nb::tuple& values)
      : view_(values[0]), out_(nb::cast<Out>(values[6], false)), square_(square_of(out_)) {
    const auto [width, height] = nb::cast<Sides>(values[1]);
    const auto [left, top, right, bottom] = nb::cast<Seen>(values[3]);
    const auto [x, y, across, down] = nb::cast<Box>(values[4]);
    part_ = {width,
             height,
             nb::cast<std::uint32_t>(values[2]),
             {x, across, left, right},
             {y, down, top, bottom},
             nb::cast<bool>(values[5])};
  }
  bool run() const { return stoker::cut_jpeg(view_.bytes(), part_, square_); }

 private:
  const View view_;
  const Out out_;
  const stoker::Square square_;
  stoker::JpegPart part_;
};

std::vector<bool> cut_jpegs(const nb::list& values) {
  std::list<Job> jobs;
  for (const nb::handle each : values) {
    const auto job = nb::cast<nb::tuple>(each);
    if (job.size() != 7) throw nb::value_error("a job has seven values");
    jobs.emplace_back(job);
  }
  std::vector<bool> taken;
  taken.reserve(jobs.size());
  const GilReleased released;
  for (const Job& job : jobs) taken.push_back(job.run());
  return taken;
}

bool decode_jpeg(nb::handle data, const Sides& sides, std::uint32_t shrink, const Whole& out) {
  const View view(data);
  const auto [width, height] = sides;
  const auto fits = [&](std::size_t of_out, std::uint32_t side) {
    return shrink > 0 && of_out == (std::uint64_t{side} + shrink - 1) / shrink;
  };
  if (!fits(out.shape(0), height) || !fits(out.shape(1), width)) {
    throw nb::value_error("out has not the size of the image");
  }
  const GilReleased released;
  return stoker::decode_jpeg(view.bytes(), width, height, shrink, out.data());
}

void resize(const Pixels& pixels, const Box& box, bool mirrored, const Out& out) {
  const auto [x, y, across, down] = box;
  const auto width = static_cast<std::uint32_t>(pixels.shape(1));
  const auto height = static_cast<std::uint32_t>(pixels.shape(0));
  if (pixels.stride(2) != 1) throw nb::value_error("the colours of a pixel do not lie together");
  const stoker::Square square = square_of(out);
  const GilReleased released;
  stoker::Resampler resampler({x, across, 0, width}, {y, down, 0, height}, width, mirrored, square);
  for (std::int64_t row = 0; !resampler.done(); ++row) {
    resampler.push(pixels.data() + row * pixels.stride(0), pixels.stride(1));
  }
}

}  // namespace

NB_MODULE(_images, m) {
  nb::set_leak_warnings(false);  // a daemon thread may outlive the interpreter
  m.doc() = "What decodes parts of JPEG files; use it through stoker.images.";
  bind_errors(m);
  m.attr("JPEG_VERSION") = stoker::jpeg_version();
  m.attr("MOST_SHRINK") = stoker::Resampler::kMostShrink;
  m.def("cut_jpegs", &cut_jpegs, "jobs"_a,
        "Resize parts of JPEGs; return which ones, as others are left to another decoder. A job is "
        "(data, sides, shrink, seen, box, mirrored, out): box (left, top, width, height) of a file "
        "whose sides are (width, height) goes into out u8[size, size, 3]. box and seen (left, top, "
        "right, bottom), the pixels that the filter looks at, are those of the image at one "
        "shrink-th of its size.");
  m.def(
      "decode_jpeg", &decode_jpeg, "data"_a, "sides"_a, "shrink"_a, "out"_a.noconvert(),
      "Decode a JPEG whose sides are (width, height), at a shrink-th of them rounded up, into out "
      "u8[height, width, 3]; return whether it did, as others are left to another decoder.");
  m.def("resize", &resize, "pixels"_a.noconvert(), "box"_a, "mirrored"_a, "out"_a.noconvert(),
        "Resize box (left, top, width, height) of pixels u8[height, width, 3] into out "
        "u8[size, size, 3].");
}
