// GET over HTTP/1.1, from the sockets straight into the memory of the objects.
//
// For plain answers only: one that is chunked, encoded or of unknown length, or does not follow the
// letter of RFC 9112, is not read, and its server is left to libcurl from then on.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace stoker {

// What an answer states of the version of its object: the first that is not empty counts.
struct Stated {
  std::string etag, version, changed;
  // Notes one line of a head, if it is of these.
  void note(std::string_view line);
};

// An object on its way into memory, in one piece or several.
struct Incoming {
  using Parts = std::vector<std::span<unsigned char>>;
  static constexpr int kMostParts = 8;  // that one call of the kernel fills

  Incoming(std::string from, Parts parts, std::uint64_t number);
  // Takes the next bytes; false, and takes none, if there is no room for them.
  bool take(const char* data, std::size_t bytes);
  // Takes what the socket has, and returns what `recv` does.
  ssize_t receive(int socket);
  // Forgets what has come, so that another attempt can be made.
  void begin_again();
  bool is_whole() const { return received == size; }

  std::string address;
  std::uint64_t ticket;
  std::uint64_t size = 0;
  std::uint64_t received = 0;
  Stated stated;

 private:
  void advance(std::size_t bytes);

  Parts parts_;
  std::size_t part_ = 0, at_ = 0;  // the next byte's
};

struct Answer {
  int status = 0;
  std::uint64_t length = 0;  // bytes of the body
  bool keeps_alive = true;
  Stated stated;
};
// What a head says, which ends with its empty line; nothing if it is not of a plain answer.
std::optional<Answer> answer_of(std::string_view head);

class PlainHttp {
 public:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Limits {
    std::vector<std::string> headers;  // "name: value"
    double total_seconds;              // of a request; kNever: no limit
    double stalled_seconds;            // in which nothing comes
  };
  struct Outcome {
    std::unique_ptr<Incoming> incoming;
    bool is_whole;
    bool is_odd;  // libcurl is to try
  };
  // Registers its sockets with `epoll`, by their numbers.
  PlainHttp(int epoll, const Limits& limits);
  ~PlainHttp();
  PlainHttp(const PlainHttp&) = delete;
  PlainHttp& operator=(const PlainHttp&) = delete;

  // Whether it can get this address, as far as is known.
  bool takes(std::string_view address) const;
  // Begins where a connection is idle. Else the caller connects, and gives that to the other one.
  bool start(std::unique_ptr<Incoming>& incoming);
  void start(std::unique_ptr<Incoming> incoming, int socket);
  void fail(std::unique_ptr<Incoming> incoming);
  // Reads or writes at a socket that is ready; false where it is not one of these connections.
  bool advance(int socket, bool may_write);
  // Gives up what takes too long; returns when to look again.
  double expire(double now);
  // What has arrived, failed or turned out to be odd since this was last asked.
  std::vector<Outcome> take_outcomes();

 private:
  struct Connection;
  void send(Connection& connection);
  void receive(Connection& connection);
  bool read_head(Connection& connection);
  void finish(Connection& connection, bool is_whole);
  void drop(Connection& connection, bool is_odd);
  void request(Connection& connection, std::unique_ptr<Incoming> incoming);

  const int epoll_;
  const Limits limits_;
  std::string lines_;  // of the headers
  bool may_ = true;
  std::unordered_map<int, std::unique_ptr<Connection>> connections_;
  std::unordered_map<std::string, std::vector<int>> idle_;  // by origin
  std::unordered_set<std::string> odd_;                     // origins
  std::vector<Outcome> outcomes_;
};

double monotonic_seconds();

}  // namespace stoker
