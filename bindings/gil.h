// Letting other Python threads run during a native call.
#pragma once

#include <Python.h>
#include <unistd.h>

/// Releases the GIL while it lives.
///
/// Unlike nb::gil_scoped_release it survives the end of the interpreter: until CPython 3.13, a
/// daemon thread that wants the GIL back then is ended by pthread_exit(), whose unwinding would
/// call std::terminate() in the first noexcept function on its way. It is parked instead, as
/// CPython 3.14 does itself; the process is about to exit.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // that unwinding: C throws nothing else, and libc++ has no name for it
      while (true) ::pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};
