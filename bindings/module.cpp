// stoker._core: the table of contents of the native part.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

#if defined(Py_LIMITED_API)
#define STOKER_ABI "abi3"
#elif defined(Py_GIL_DISABLED)
#define STOKER_ABI "cp" NB_TOSTRING(PY_MAJOR_VERSION) NB_TOSTRING(PY_MINOR_VERSION) "t"
#else
#define STOKER_ABI "cp" NB_TOSTRING(PY_MAJOR_VERSION) NB_TOSTRING(PY_MINOR_VERSION)
#endif

void bind_errors(nb::module_& m);
void bind_arena(nb::module_& m);
void bind_crc32c(nb::module_& m);
void bind_downloads(nb::module_& m);
void bind_draws(nb::module_& m);
void bind_marks(nb::module_& m);
void bind_reader(nb::module_& m);
void bind_tables(nb::module_& m);

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a daemon thread may outlive the interpreter
  m.doc() = "The native part of Stoker; use it through the stoker package.";
  nb::dict build;
  build["version"] = STOKER_VERSION;
  build["commit"] = STOKER_COMMIT;
  build["compiler"] = STOKER_COMPILER;
  build["abi"] = STOKER_ABI;
  m.attr("BUILD") = build;
  bind_errors(m);
  bind_arena(m);
  bind_crc32c(m);
  bind_downloads(m);
  bind_draws(m);
  bind_marks(m);
  bind_reader(m);
  bind_tables(m);
}
