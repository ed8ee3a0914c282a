// stoker._core.Downloads: objects over HTTP into bytes objects, with the GIL released.
#include "stoker/downloads.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gil.h"
#include "stoker/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

class PyDownloads {
 public:
  PyDownloads(const std::string& library, std::vector<std::string> headers,
              const std::string& authorities, long connect_ms, long total_ms, long stalled_seconds)
      : downloads_(std::make_unique<stoker::Downloads>(
            library, stoker::Downloads::Options{std::move(headers), authorities, connect_ms,
                                                total_ms, stalled_seconds})) {}

  void start(const std::vector<std::string>& addresses, const std::vector<std::uint64_t>& sizes,
             const nb::list& tickets) {
    if (sizes.size() != addresses.size() || tickets.size() != addresses.size()) {
      throw stoker::ConfigError("give one size and one ticket for each address");
    }
    std::vector<std::pair<std::uint64_t, std::span<unsigned char>>> places;
    places.reserve(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      // Nothing else refers to it until it has arrived, so that it may be written to.
      PyObject* const into = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(sizes[i]));
      if (into == nullptr) throw nb::python_error();
      auto* const memory = reinterpret_cast<unsigned char*>(PyBytes_AsString(into));
      places.push_back({next_, {memory, static_cast<std::size_t>(sizes[i])}});
      pending_.emplace(next_++, Pending{nb::steal(into), nb::borrow(tickets[i])});
    }
    stoker::Downloads& downloads = open();
    const GilReleased released;
    for (std::size_t i = 0; i < places.size(); ++i) {
      downloads.start(addresses[i], {places[i].second}, places[i].first);
    }
  }

  nb::list wait(double seconds) {
    stoker::Downloads& downloads = open();
    std::vector<stoker::Downloads::Done> done;
    {
      const GilReleased released;
      done = downloads.wait(seconds);
    }
    nb::list answers;
    for (const auto& each : done) {
      auto place = pending_.extract(each.ticket);
      Pending& pending = place.mapped();
      nb::object data = each.whole ? std::move(pending.into) : nb::none();
      answers.append(nb::make_tuple(pending.ticket, data, each.received,
                                    nb::bytes(each.version.data(), each.version.size()),
                                    each.is_date));
    }
    return answers;
  }

  void wake() {
    if (downloads_) downloads_->wake();
  }

  void close() {
    downloads_.reset();  // first, as it writes to what is pending
    pending_.clear();
  }

 private:
  struct Pending {
    nb::object into;
    nb::object ticket;
  };

  stoker::Downloads& open() {
    if (!downloads_) throw stoker::SegmentError("the downloads are closed: make others");
    return *downloads_;
  }

  std::unordered_map<std::uint64_t, Pending> pending_;  // outlives what writes to it
  std::uint64_t next_ = 0;
  std::unique_ptr<stoker::Downloads> downloads_;
};

}  // namespace

void bind_downloads(nb::module_& m) {
  nb::class_<PyDownloads>(
      m, "Downloads",
      "Whole objects over HTTP, many at once in one thread, by the libcurl that "
      "the loaded library at path library has; ConfigError where it has none.")
      .def(nb::init<const std::string&, std::vector<std::string>, const std::string&, long, long,
                    long>(),
           "library"_a, "headers"_a, "authorities"_a, "connect_ms"_a, "total_ms"_a,
           "stalled_seconds"_a)
      .def("start", &PyDownloads::start, "addresses"_a, "sizes"_a, "tickets"_a,
           "Begin to get the objects; a ticket is any object.")
      .def("wait", &PyDownloads::wait, "seconds"_a,
           "Return (ticket, bytes or None, bytes received, version, whether it is a date) of what "
           "has arrived or failed; wait for so long unless there is something. An empty list also "
           "after wake() and signals.")
      .def("wake", &PyDownloads::wake, "End a wait that is under way, or the next; any thread.")
      .def("close", &PyDownloads::close, "Give up what is under way.");
}
