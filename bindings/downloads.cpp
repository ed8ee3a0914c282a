// stoker._core.Downloads: objects over HTTP into bytes objects or an arena, with the GIL released.
#include "stoker/downloads.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
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
#include "rooms.h"
#include "stoker/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

class PyDownloads {
 public:
  PyDownloads(const std::string& library, std::vector<std::string> headers,
              const std::string& authorities, long connect_ms, long total_ms, long stalled_ms)
      : downloads_(std::make_unique<stoker::Downloads>(
            library, stoker::Downloads::Options{std::move(headers), authorities, connect_ms,
                                                total_ms, stalled_ms})) {}

  void start(const std::vector<std::string>& addresses, const std::vector<std::uint64_t>& sizes,
             const nb::list& tickets, const nb::list& rooms) {
    if (sizes.size() != addresses.size() || tickets.size() != addresses.size() ||
        rooms.size() != addresses.size()) {
      throw stoker::ConfigError("give one size, one ticket and one room for each address");
    }
    stoker::Downloads& downloads = open();
    std::vector<std::pair<std::uint64_t, stoker::Downloads::Parts>> places;
    places.reserve(sizes.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Pending pending{{}, nb::borrow(tickets[i])};
      places.push_back({next_, place_of(sizes[i], rooms[i], pending.into)});
      pending_.emplace(next_++, std::move(pending));
    }
    const GilReleased released;
    for (std::size_t i = 0; i < places.size(); ++i) {
      downloads.start(addresses[i], std::move(places[i].second), places[i].first);
    }
  }

  void look(const std::vector<std::string>& addresses, const nb::list& tickets) {
    if (tickets.size() != addresses.size()) {
      throw stoker::ConfigError("give one ticket for each address");
    }
    stoker::Downloads& downloads = open();
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      pending_.emplace(next_, Pending{nb::bytes("", 0), nb::borrow(tickets[i])});
      downloads.look(addresses[i], next_++);
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
      const bool is_placed = nb::isinstance<nb::tuple>(pending.into);
      nb::object data = !each.whole ? nb::none()
                        : is_placed ? nb::object(nb::bytes("", 0))
                                    : std::move(pending.into);
      answers.append(nb::make_tuple(pending.ticket, data, each.received,
                                    nb::bytes(each.version.data(), each.version.size()),
                                    each.is_date, each.length));
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

  // Where an object goes; `into` keeps that in memory until it has arrived, and is the answer then.
  static stoker::Downloads::Parts place_of(std::uint64_t size, nb::handle room, nb::object& into) {
    if (!room.is_none()) {
      const auto [rooms, index] = nb::cast<std::pair<PyRooms, std::size_t>>(room);
      if (index >= rooms.rooms->count() || rooms.rooms->size_of(index) != size) {
        throw stoker::ConfigError("there is no such room");
      }
      if (rooms.rooms->has(index)) {
        into = nb::borrow(room);
        return rooms.rooms->parts(index);
      }
    }
    // Nothing else refers to it until it has arrived, so that it may be written to.
    PyObject* const bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (bytes == nullptr) throw nb::python_error();
    into = nb::steal(bytes);
    return {{reinterpret_cast<unsigned char*>(PyBytes_AsString(bytes)), size}};
  }

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
           "library"_a, "headers"_a, "authorities"_a, "connect_ms"_a, "total_ms"_a, "stalled_ms"_a)
      .def(
          "start", &PyDownloads::start, "addresses"_a, "sizes"_a, "tickets"_a, "rooms"_a,
          "Begin to get the objects; a ticket is any object. rooms: for each (Rooms, index), where "
          "it is written to, or None.")
      .def("look", &PyDownloads::look, "addresses"_a, "tickets"_a,
           "Begin to ask what there is; nothing is received.")
      .def("wait", &PyDownloads::wait, "seconds"_a,
           "Return (ticket, bytes or None, bytes received, version, whether it is a date, length "
           "as stated or -1) of what has arrived or failed, empty bytes of what is in its room or "
           "was looked at; wait for so long unless there is something. An empty list also after "
           "wake() and signals.")
      .def("wake", &PyDownloads::wake, "End a wait that is under way, or the next; any thread.")
      .def("close", &PyDownloads::close, "Give up what is under way.");
}
