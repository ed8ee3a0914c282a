// The core's exceptions become those of stoker.errors.
#include <nanobind/nanobind.h>

#include "stoker/error.h"

namespace nb = nanobind;

namespace {

void raise(const char* type, const char* message) {
  const nb::object errors = nb::module_::import_("stoker.errors");
  PyErr_SetString(errors.attr(type).ptr(), message);
}

}  // namespace

void bind_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const stoker::SegmentError& error) {
      raise("SegmentError", error.what());
    } catch (const stoker::CapacityError& error) {
      raise("CapacityError", error.what());
    } catch (const stoker::ConfigError& error) {
      raise("ConfigError", error.what());
    }
  });
}
