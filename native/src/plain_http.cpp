#include "stoker/plain_http.h"

#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "stoker/racy_copy.h"

namespace stoker {
namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::size_t kMostHead = 8192;
constexpr std::size_t kUsualHead = 1024;
constexpr std::size_t kSmallBody = 4096;  // comes with the head: a copy is cheaper than a call
constexpr int kOk = 200;

bool is_same(std::string_view one, std::string_view other) {
  return one.size() == other.size() && ::strncasecmp(one.data(), other.data(), one.size()) == 0;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const auto begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

bool has_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) <= ' ' || c == 0x7f; });
}

// Scheme and host of an address.
std::string_view origin_of(std::string_view address) {
  return address.substr(0, address.find_first_of("/?", kScheme.size()));
}

std::optional<std::uint64_t> number_of(std::string_view digits) {
  std::uint64_t number = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, number);
  if (digits.empty() || error != std::errc() || stop != end) return std::nullopt;
  return number;
}

}  // namespace

double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Stated::note(std::string_view line) {
  const auto note = [&](std::string_view name, std::string& field) {
    if (line.size() < name.size() || !field.empty()) return;
    if (is_same(line.substr(0, name.size()), name)) field = trimmed(line.substr(name.size()));
  };
  note("etag:", etag);
  note("x-amz-version-id:", version);
  note("last-modified:", changed);
}

Incoming::Incoming(std::string from, Parts parts, std::uint64_t number)
    : address(std::move(from)), ticket(number), parts_(std::move(parts)) {
  for (const auto& part : parts_) size += part.size();
}

bool Incoming::take(const char* data, std::size_t bytes) {
  if (bytes > size - received) return false;
  while (bytes > 0) {
    const auto part = parts_[part_].subspan(at_);
    const std::size_t here = std::min(bytes, part.size());
    racy_write(part.data(), data, here);
    advance(here);
    data += here;
    bytes -= here;
  }
  return true;
}

ssize_t Incoming::receive(int socket) {
#if defined(STOKER_THREAD_SANITIZER)
  char copy[65536];  // the kernel's writes are not atomic, which readers of old samples would race
  const ssize_t got =
      ::recv(socket, copy, std::min<std::uint64_t>(sizeof copy, size - received), 0);
  if (got > 0) take(copy, static_cast<std::size_t>(got));
  return got;
#else
  iovec into[kMostParts];
  std::size_t count = 0;
  for (std::size_t part = part_; part < parts_.size() && count < kMostParts; ++part) {
    const auto room = part == part_ ? parts_[part].subspan(at_) : parts_[part];
    into[count++] = {room.data(), room.size()};
  }
  msghdr message{};
  message.msg_iov = into;
  message.msg_iovlen = count;
  const ssize_t got = ::recvmsg(socket, &message, 0);
  if (got > 0) advance(static_cast<std::size_t>(got));
  return got;
#endif
}

void Incoming::begin_again() {
  received = part_ = at_ = 0;
  stated = {};
}

void Incoming::advance(std::size_t bytes) {
  received += bytes;
  while (bytes > 0) {
    const std::size_t here = std::min(bytes, parts_[part_].size() - at_);
    at_ += here;
    bytes -= here;
    if (at_ == parts_[part_].size()) {
      ++part_;
      at_ = 0;
    }
  }
}

std::optional<Answer> answer_of(std::string_view head) {
  constexpr std::string_view kVersion = "HTTP/1.1 ";
  constexpr std::size_t kCode = 3;
  if (!head.starts_with(kVersion)) return std::nullopt;
  const std::size_t begin = head.find("\r\n") + 2;
  const std::string_view after = head.substr(kVersion.size(), begin - 2 - kVersion.size());
  if (after.size() > kCode && after[kCode] != ' ') return std::nullopt;
  const auto status = number_of(after.substr(0, kCode));
  if (!status || *status < 200 || *status > 999) return std::nullopt;
  Answer answer;
  answer.status = static_cast<int>(*status);
  std::optional<std::uint64_t> length;
  for (head = head.substr(begin); !head.starts_with("\r\n");) {
    const std::size_t end = head.find("\r\n");
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = head.substr(0, end);
    head = head.substr(end + 2);
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos || colon == 0 || has_control(line.substr(0, colon)) ||
        line.find_first_of(std::string_view("\0\r\n", 3)) != std::string_view::npos) {
      return std::nullopt;
    }
    const std::string_view name = line.substr(0, colon);
    const std::string_view value = trimmed(line.substr(colon + 1));
    if (is_same(name, "content-length")) {
      const auto number = number_of(value);
      if (!number || (length && *length != *number)) return std::nullopt;
      length = number;
    } else if (is_same(name, "connection")) {
      answer.keeps_alive = answer.keeps_alive && is_same(value, "keep-alive");
    } else if (is_same(name, "transfer-encoding") || is_same(name, "content-encoding")) {
      return std::nullopt;
    } else {
      answer.stated.note(line);
    }
  }
  if (!length) return std::nullopt;
  answer.length = *length;
  return answer;
}

struct PlainHttp::Connection {
  int socket;
  std::string origin;
  std::unique_ptr<Incoming> incoming;  // none: it is idle
  std::string text;                    // what is not sent yet
  std::string head;                    // as far as it has come
  bool is_used = false;                // for an earlier object
  bool is_answered = false;            // something has come
  bool has_head = false;
  bool keeps_alive = true;
  double over_at = 0, stalled_at = 0;
};

PlainHttp::PlainHttp(int epoll, const Limits& limits) : epoll_(epoll), limits_(limits) {
  bool accepts = false;
  for (const std::string& header : limits.headers) {
    const std::string_view name = std::string_view(header).substr(0, header.find(':'));
    accepts = accepts || is_same(name, "accept");
    // What changes the meaning of a request is libcurl's, as is a header that is none.
    may_ = may_ && !name.empty() && name.size() < header.size() && !has_control(name) &&
           header.find_first_of(std::string_view("\0\r\n", 3)) == std::string::npos;
    for (const char* special : {"host", "connection", "transfer-encoding", "content-length"}) {
      may_ = may_ && !is_same(name, special);
    }
    lines_ += header + "\r\n";
  }
  if (!accepts) lines_ += "Accept: */*\r\n";
  for (const char* proxy : {"http_proxy", "all_proxy", "ALL_PROXY"}) {
    const char* const value = std::getenv(proxy);
    may_ = may_ && (value == nullptr || *value == '\0');
  }
}

PlainHttp::~PlainHttp() {
  for (const auto& [socket, connection] : connections_) ::close(socket);
}

bool PlainHttp::takes(std::string_view address) const {
  if (!may_ || !address.starts_with(kScheme)) return false;
  const std::string_view origin = origin_of(address);
  const std::string_view path = address.substr(origin.size());
  return origin.size() > kScheme.size() && path.starts_with("/") && !has_control(address) &&
         origin.find('@') == std::string_view::npos && path.find('#') == std::string_view::npos &&
         path.find("/.") == std::string_view::npos && !odd_.contains(std::string(origin));
}

bool PlainHttp::start(std::unique_ptr<Incoming>& incoming) {
  const auto found = idle_.find(std::string(origin_of(incoming->address)));
  if (found == idle_.end() || found->second.empty()) return false;
  Connection& connection = *connections_.at(found->second.back());
  found->second.pop_back();
  request(connection, std::move(incoming));
  return true;
}

void PlainHttp::start(std::unique_ptr<Incoming> incoming, int socket) {
  auto made = std::make_unique<Connection>();
  made->socket = socket;
  made->origin = origin_of(incoming->address);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = socket;
  ::epoll_ctl(epoll_, EPOLL_CTL_ADD, socket, &event);
  Connection& connection = *(connections_[socket] = std::move(made));
  request(connection, std::move(incoming));
}

void PlainHttp::fail(std::unique_ptr<Incoming> incoming) {
  outcomes_.push_back({std::move(incoming), false, false});
}

void PlainHttp::request(Connection& connection, std::unique_ptr<Incoming> incoming) {
  const std::string_view path =
      std::string_view(incoming->address).substr(connection.origin.size());
  connection.text.assign("GET ").append(path).append(" HTTP/1.1\r\nHost: ");
  connection.text.append(connection.origin, kScheme.size()).append("\r\n").append(lines_);
  connection.text += "\r\n";
  connection.incoming = std::move(incoming);
  connection.head.clear();
  connection.has_head = connection.is_answered = false;
  const double now = monotonic_seconds();
  connection.over_at = now + limits_.total_seconds;
  connection.stalled_at = now + limits_.stalled_seconds;
  send(connection);
}

void PlainHttp::send(Connection& connection) {
  const std::string& text = connection.text;
  const ssize_t sent = ::send(connection.socket, text.data(), text.size(), MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) return drop(connection, connection.is_used);
  const bool was_whole = sent == static_cast<ssize_t>(text.size());
  connection.text.erase(0, static_cast<std::size_t>(std::max<ssize_t>(0, sent)));
  if (was_whole) return;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT;
  event.data.fd = connection.socket;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.socket, &event);
}

bool PlainHttp::advance(int socket, bool may_write) {
  const auto found = connections_.find(socket);
  if (found == connections_.end()) return false;
  Connection& connection = *found->second;
  if (may_write && !connection.text.empty()) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = socket;
    ::epoll_ctl(epoll_, EPOLL_CTL_MOD, socket, &event);
    send(connection);  // which waits again if need be
    return true;
  }
  if (connection.incoming == nullptr) {
    drop(connection, false);  // closed by the server, or bytes come that are no answer
  } else {
    receive(connection);
  }
  return true;
}

void PlainHttp::receive(Connection& connection) {
  if (!connection.has_head && !read_head(connection)) return;
  Incoming& incoming = *connection.incoming;
  while (!incoming.is_whole()) {
    const std::uint64_t left = incoming.size - incoming.received;
    const ssize_t got = incoming.receive(connection.socket);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return drop(connection, false);
    connection.stalled_at = monotonic_seconds() + limits_.stalled_seconds;
    if (static_cast<std::uint64_t>(got) < left) return;
  }
  finish(connection, true);
}

// True once the body is to be read; the connection may be gone otherwise.
bool PlainHttp::read_head(Connection& connection) {
  Incoming& incoming = *connection.incoming;
  char part[kUsualHead + kSmallBody];
  const std::size_t most = kUsualHead + (incoming.size <= kSmallBody ? incoming.size : 0);
  const ssize_t got = ::recv(connection.socket, part, most, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got <= 0) {  // a connection that is used again may have been closed meanwhile
    drop(connection, connection.is_used && !connection.is_answered);
    return false;
  }
  connection.is_answered = true;
  connection.stalled_at = monotonic_seconds() + limits_.stalled_seconds;
  std::string& head = connection.head;
  const std::size_t before = head.size();
  head.append(part, static_cast<std::size_t>(got));
  const std::size_t end = head.find("\r\n\r\n", before < 3 ? 0 : before - 3);
  if (end == std::string::npos) {
    if (head.size() > kMostHead) drop(connection, true);
    return false;
  }
  const std::string_view body = std::string_view(head).substr(end + 4);
  std::optional<Answer> answer = answer_of(std::string_view(head).substr(0, end + 4));
  if (!answer) {
    odd_.insert(connection.origin);
    drop(connection, true);
    return false;
  }
  connection.keeps_alive = answer->keeps_alive;
  connection.has_head = true;
  incoming.stated = std::move(answer->stated);
  const bool is_it = answer->status == kOk && answer->length == incoming.size;
  if (!is_it || !incoming.take(body.data(), body.size())) {
    drop(connection, false);
    return false;
  }
  return true;
}

void PlainHttp::finish(Connection& connection, bool is_whole) {
  outcomes_.push_back({std::move(connection.incoming), is_whole, false});
  connection.is_used = true;
  if (!connection.keeps_alive) return drop(connection, false);
  idle_[connection.origin].push_back(connection.socket);
}

// Ends a connection, and what it was getting.
void PlainHttp::drop(Connection& connection, bool is_odd) {
  const int socket = connection.socket;
  if (connection.incoming != nullptr) {
    if (is_odd) connection.incoming->begin_again();
    outcomes_.push_back({std::move(connection.incoming), false, is_odd});
  } else {
    std::erase(idle_[connection.origin], socket);
  }
  ::close(socket);
  connections_.erase(socket);
}

double PlainHttp::expire(double now) {
  double next = kNever;
  std::vector<Connection*> late;
  for (const auto& [socket, connection] : connections_) {
    if (connection->incoming == nullptr) continue;
    const double at = std::min(connection->over_at, connection->stalled_at);
    if (at <= now) late.push_back(connection.get());
    next = std::min(next, at);
  }
  for (Connection* const each : late) drop(*each, false);
  return late.empty() ? next : now;
}

std::vector<PlainHttp::Outcome> PlainHttp::take_outcomes() { return std::exchange(outcomes_, {}); }

}  // namespace stoker
