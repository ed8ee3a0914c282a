// stoker._images: from JPEG files or pixels to resized parts, with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <span>
#include <tuple>

#include "gil.h"
#include "stoker/jpeg.h"
#include "stoker/resample.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_errors(nb::module_& m);

namespace {

using Pixels = nb::ndarray<const std::uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;
using Out = nb::ndarray<std::uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;
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

bool cut_jpeg(nb::handle data, const Sides& sides, std::uint32_t shrink, const Seen& seen,
              const Box& box, bool mirrored, const Out& out) {
  const View view(data);
  const auto [width, height] = sides;
  const auto [left, top, right, bottom] = seen;
  const auto [x, y, across, down] = box;
  const stoker::JpegPart part{
      width, height, shrink, {x, across, left, right}, {y, down, top, bottom}, mirrored};
  const stoker::Square square = square_of(out);
  const GilReleased released;
  return stoker::cut_jpeg(view.bytes(), part, square);
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
  m.def("cut_jpeg", &cut_jpeg, "data"_a, "sides"_a, "shrink"_a, "seen"_a, "box"_a, "mirrored"_a,
        "out"_a.noconvert(),
        "Resize box (left, top, width, height) of a JPEG whose sides are (width, height) into "
        "out u8[size, size, 3]; False if another decoder must read it. box and seen (left, top, "
        "right, bottom), the pixels that the filter looks at, are those of the image at one "
        "shrink-th of its size.");
  m.def("resize", &resize, "pixels"_a.noconvert(), "box"_a, "mirrored"_a, "out"_a.noconvert(),
        "Resize box (left, top, width, height) of pixels u8[height, width, 3] into out "
        "u8[size, size, 3].");
}
