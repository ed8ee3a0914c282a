// stoker._core: the table of contents of the native part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_arena(nb::module_& m);
void bind_crc32c(nb::module_& m);
void bind_marks(nb::module_& m);
void bind_reader(nb::module_& m);
void bind_tables(nb::module_& m);

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a daemon thread may outlive the interpreter
  m.doc() = "The native part of Stoker; use it through the stoker package.";
  bind_errors(m);
  bind_arena(m);
  bind_crc32c(m);
  bind_marks(m);
  bind_reader(m);
  bind_tables(m);
}
