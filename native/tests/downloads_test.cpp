// Downloads against a web server of this process, with the system's libcurl: left out without one.
#include "stoker/downloads.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "stoker/error.h"

namespace {

std::atomic<int> acknowledged_at_once, waits;

}  // namespace

// Stands before that of the system; libraries of C declare it with noexcept or without.
extern "C" int setsockopt(int descriptor, int level, int name, const void* value,
                          socklen_t length) noexcept(noexcept(::setsockopt(0, 0, 0, nullptr, 0))) {
  if (level == IPPROTO_TCP && name == TCP_QUICKACK) ++acknowledged_at_once;
  return static_cast<int>(::syscall(SYS_setsockopt, descriptor, level, name, value, length));
}

extern "C" int epoll_wait(int descriptor, epoll_event* events, int most,
                          int milliseconds) noexcept(noexcept(::epoll_wait(0, nullptr, 0, 0))) {
  ++waits;
  return static_cast<int>(
      ::syscall(SYS_epoll_pwait, descriptor, events, most, milliseconds, nullptr, std::size_t{8}));
}

namespace {

constexpr char kLibrary[] = "libcurl.so.4";

std::string answer(const std::string& status, const std::string& headers, const std::string& body) {
  return "HTTP/1.1 " + status + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" +
         headers + "\r\n" + body;
}

using Answers = std::map<std::string, std::string>;

// Gives each path its answer, however many come over one connection.
class Server {
 public:
  explicit Server(Answers answers) : answers_(std::move(answers)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    CHECK(::bind(socket_, reinterpret_cast<sockaddr*>(&address), length) == 0);
    CHECK(::listen(socket_, 16) == 0);
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~Server() {
    ::shutdown(socket_, SHUT_RDWR);
    accepting_.join();
    for (std::thread& each : serving_) each.join();
    ::close(socket_);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& url() const { return url_; }
  int connections() const { return connections_; }

 private:
  void accept_all() {
    for (;;) {
      const int client = ::accept(socket_, nullptr, nullptr);
      if (client < 0) return;
      ++connections_;
      serving_.emplace_back([this, client] { serve(client); });
    }
  }
  void serve(int client) {
    std::string request;
    char part[4096];
    for (ssize_t got; (got = ::recv(client, part, sizeof part, 0)) > 0;) {
      request.append(part, static_cast<std::size_t>(got));
      for (std::size_t end; (end = request.find("\r\n\r\n")) != std::string::npos;) {
        const std::size_t path = request.find(' ') + 1;
        const std::string& all = answers_[request.substr(path, request.find(' ', path) - path)];
        request.erase(0, end + 4);
        if (all.empty()) continue;  // never answered
        if (all.find("X-Waits") != std::string::npos) {
          if (!send_once_acknowledged(client, all)) break;
        } else if (all.find("X-In-Pieces") != std::string::npos) {
          for (const char& each : all) ::send(client, &each, 1, MSG_NOSIGNAL);
        } else {
          ::send(client, all.data(), all.size(), MSG_NOSIGNAL);
        }
        if (all.find("X-Then-Gone") == std::string::npos) continue;
        ::close(client);
        return;
      }
    }
    ::close(client);
  }

  // The rest of an answer only once its beginning is acknowledged at once.
  static bool send_once_acknowledged(int client, const std::string& all) {
    const int before = acknowledged_at_once;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const std::size_t first = all.size() - 3;
    ::send(client, all.data(), first, MSG_NOSIGNAL);
    while (acknowledged_at_once == before) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::yield();
    }
    ::send(client, all.data() + first, all.size() - first, MSG_NOSIGNAL);
    return true;
  }

  Answers answers_;
  const int socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string url_;
  std::atomic<int> connections_{0};
  std::vector<std::thread> serving_;
  std::thread accepting_;
};

stoker::Downloads::Options patient() {
  stoker::Downloads::Options options;
  options.headers = {"X-Token: secret"};
  options.connect_ms = 5'000;
  options.total_ms = 30'000;
  options.stalled_ms = 15'000;
  return options;
}

stoker::Downloads::Done one(stoker::Downloads& downloads) {
  for (;;) {
    const auto done = downloads.wait(30.0);
    if (done.empty()) continue;
    CHECK(done.size() == 1);
    return done[0];
  }
}

void objects_come_whole_and_with_their_version() {
  const std::string large(3 << 20, 'x');
  Server server({{"/etag", answer("200 OK", "ETag: \"v1\"\r\n", "tagged")},
                 {"/both", answer("200 OK", "x-amz-version-id: 7\r\nETAG:\"v2\"\r\n", "tagged")},
                 {"/amz", answer("200 OK", "X-Amz-Version-Id: 7\r\n", "tagged")},
                 {"/date", answer("200 OK", "Last-Modified: Tue\r\n", "tagged")},
                 {"/none", answer("200 OK", "", "tagged")},
                 {"/large", answer("200 OK", "", large)}});
  stoker::Downloads downloads(kLibrary, patient());
  const auto expect = [&](const std::string& path, const std::string& version, bool is_date) {
    std::vector<unsigned char> into(6);
    downloads.start(server.url() + path, {into}, 5);
    const auto done = one(downloads);
    CHECK(done.ticket == 5 && done.whole && done.received == 6);
    CHECK(done.version == version && done.is_date == is_date);
    CHECK(std::string(into.begin(), into.end()) == "tagged");
  };
  expect("/etag", "\"v1\"", false);
  expect("/both", "\"v2\"", false);
  expect("/amz", "7", false);
  expect("/date", "Tue", true);
  expect("/none", "", true);
  std::vector<unsigned char> into(large.size());
  downloads.start(server.url() + "/large", {into}, 6);
  CHECK(one(downloads).whole);
  CHECK(std::string(into.begin(), into.end()) == large);
  CHECK(server.connections() == 1);  // which is kept
}

void what_is_not_as_listed_is_not_whole() {
  Server server({{"/short", answer("200 OK", "", "12345")},
                 {"/long", answer("200 OK", "", "1234567")},
                 {"/gone", answer("404 Not Found", "", "123456")},
                 {"/endless", "HTTP/1.1 200 OK\r\n\r\n1234567890"}});
  stoker::Downloads downloads(kLibrary, patient());
  for (const std::string path : {"/short", "/long", "/gone", "/endless"}) {
    std::vector<unsigned char> into(7, 0xee);
    downloads.start(server.url() + path, {std::span(into).first(6)}, 1);
    const auto done = one(downloads);
    CHECK(!done.whole && done.received <= 6);
    CHECK(into[6] == 0xee);  // nothing is written beyond
  }
}

void many_at_once_come_once_each() {
  Answers answers;
  for (int i = 0; i < 64; ++i) {
    answers["/" + std::to_string(i)] = answer("200 OK", "", std::string(10'000, char('0' + i)));
  }
  Server server(answers);
  stoker::Downloads downloads(kLibrary, patient());
  std::vector<std::vector<unsigned char>> into(64, std::vector<unsigned char>(10'000));
  std::vector<int> came(64);
  for (int i = 0; i < 64; ++i) {
    downloads.start(server.url() + "/" + std::to_string(i), {into[std::size_t(i)]},
                    std::uint64_t(i));
  }
  for (int left = 64; left > 0;) {
    for (const auto& done : downloads.wait(30.0)) {
      CHECK(done.whole);
      ++came[done.ticket];
      CHECK(into[done.ticket] ==
            std::vector<unsigned char>(10'000, static_cast<unsigned char>('0' + done.ticket)));
      --left;
    }
  }
  CHECK(came == std::vector<int>(64, 1));
}

void get(stoker::Downloads& downloads, const std::string& address, bool is_there) {
  std::vector<unsigned char> into(6, '?');
  const std::span all(into);
  downloads.start(address, {all.first(2), all.subspan(2, 1), all.subspan(3)}, 1);
  CHECK(one(downloads).whole == is_there);
  CHECK(!is_there || std::string(into.begin(), into.end()) == "object");
}

// One object in 150 of a web server took 47 ms, where the others took 2.
void no_server_waits_for_an_acknowledgement() {
  Server server({{"/object", answer("200 OK", "X-Waits: 1\r\n", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  for (int i = 0; i < 50; ++i) get(downloads, server.url() + "/object", true);
  CHECK(server.connections() == 1);
}

void what_came_whole_is_not_acknowledged_apart() {
  Server server({{"/object", answer("200 OK", "", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  get(downloads, server.url() + "/object", true);
  const int before = acknowledged_at_once;
  for (int i = 0; i < 3; ++i) get(downloads, server.url() + "/object", true);
  CHECK(acknowledged_at_once == before);
  CHECK(server.connections() == 1);
}

void a_connection_that_ends_between_two_objects_is_replaced() {
  Server server({{"/told", answer("200 OK", "Connection: close\r\nX-Then-Gone: 1\r\n", "object")},
                 {"/untold", answer("200 OK", "X-Then-Gone: 1\r\n", "object")},
                 {"/next", answer("200 OK", "", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  for (int i = 0; i < 5; ++i) {
    for (const char* path : {"/told", "/untold", "/next", "/next"}) {
      get(downloads, server.url() + path, true);
    }
  }
}

void a_connection_that_ends_while_it_is_idle_costs_nothing() {
  Server server({{"/last", answer("200 OK", "X-Then-Gone: 1\r\n", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  get(downloads, server.url() + "/last", true);
  const int before = waits;
  CHECK(downloads.wait(0.6).empty());
  CHECK(waits - before < 10);
}

void an_answer_comes_in_pieces_of_any_size() {
  const std::string filler = "X-Filler: " + std::string(3000, 'x') + "\r\n";
  Server server({{"/bytes", answer("200 OK", "X-In-Pieces: 1\r\nETag: a\r\n", "object")},
                 {"/long", answer("200 OK", filler, "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  for (const char* path : {"/bytes", "/long", "/bytes"}) {
    get(downloads, server.url() + path, true);
  }
  CHECK(server.connections() == 1);
}

void chunked_answers_come_too() {
  const std::string chunked =
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nob\r\n4\r\nject\r\n0\r\n\r\n";
  Server server({{"/chunked", chunked}, {"/plain", answer("200 OK", "", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  for (const char* path : {"/plain", "/chunked", "/chunked", "/plain"}) {
    get(downloads, server.url() + path, true);
  }
}

void a_server_that_stalls_is_given_up() {
  Server server({{"/stalls", "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nobj"}, {"/silent", ""}});
  for (const char* path : {"/stalls", "/silent"}) {
    auto options = patient();
    options.stalled_ms = 200;
    stoker::Downloads downloads(kLibrary, options);
    get(downloads, server.url() + path, false);
  }
  auto options = patient();
  options.total_ms = 50;
  stoker::Downloads downloads(kLibrary, options);
  get(downloads, server.url() + "/stalls", false);
}

// libcurl was left to find that out, and did not where another one came meanwhile.
void one_of_several_that_stalls_is_given_up() {
  Server server({{"/silent", ""}, {"/object", answer("200 OK", "", "object")}});
  auto options = patient();
  options.stalled_ms = 200;
  stoker::Downloads downloads(kLibrary, options);
  std::vector<std::vector<unsigned char>> into(4, std::vector<unsigned char>(6));
  for (std::uint64_t i = 0; i < 4; ++i) {
    downloads.start(server.url() + (i < 2 ? "/silent" : "/object"), {into[i]}, i);
  }
  std::map<std::uint64_t, bool> came;
  while (came.size() < 4) {
    for (const auto& done : downloads.wait(30.0))
      CHECK(came.emplace(done.ticket, done.whole).second);
  }
  CHECK((came == std::map<std::uint64_t, bool>{{0, false}, {1, false}, {2, true}, {3, true}}));
  get(downloads, server.url() + "/object", true);
}

void a_wait_ends_in_time_when_woken_and_with_it_all() {
  Server server(Answers{{"/silent", ""}});
  stoker::Downloads downloads(kLibrary, patient());
  CHECK(downloads.wait(0.0).empty());
  downloads.wake();
  CHECK(downloads.wait(1e6).empty());
  std::vector<unsigned char> into(1);
  downloads.start(server.url() + "/silent", {into}, 1);
  CHECK(downloads.wait(0.01).empty());
  std::thread waker([&] { downloads.wake(); });
  CHECK(downloads.wait(1e6).empty());
  waker.join();
}  // what is under way is given up

void what_is_looked_at_is_not_received() {
  Server server({{"/tagged", "HTTP/1.1 200 OK\r\nContent-Length: 6000000000\r\nETag: a\r\n\r\n"},
                 {"/dated", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nLast-Modified: b\r\n\r\n"},
                 {"/unsized", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"},
                 {"/gone", "HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n"},
                 {"/object", answer("200 OK", "", "object")}});
  stoker::Downloads downloads(kLibrary, patient());
  const auto look = [&](const std::string& path) {
    downloads.look(server.url() + path, 7);
    const auto done = one(downloads);
    CHECK(done.ticket == 7 && done.received == 0);
    return done;
  };
  auto found = look("/tagged");
  CHECK(found.whole && found.length == 6'000'000'000 && found.version == "a" && !found.is_date);
  found = look("/dated");
  CHECK(found.whole && found.length == 0 && found.version == "b" && found.is_date);
  CHECK(look("/unsized").length == -1);
  CHECK(!look("/gone").whole);
  for (int i = 0; i < 3; ++i) {  // by the same handle, in turns
    get(downloads, server.url() + "/object", true);
    CHECK(look("/tagged").whole);
  }
  CHECK(server.connections() == 1);
}

void a_server_that_is_not_there_fails() {
  stoker::Downloads downloads(kLibrary, patient());
  std::vector<unsigned char> into(1);
  downloads.start("http://127.0.0.1:1/", {into}, 1);
  downloads.start("ftp://127.0.0.1:1/", {into}, 2);  // another protocol is not spoken
  for (int left = 2; left > 0;) {
    for (const auto& done : downloads.wait(30.0)) {
      CHECK(!done.whole);
      --left;
    }
  }
}

}  // namespace

int main() {
  CHECK_THROWS(stoker::ConfigError, stoker::Downloads("libnot-there.so", patient()));
  CHECK_THROWS(stoker::ConfigError, stoker::Downloads("libc.so.6", patient()));
  if (::dlopen(kLibrary, RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "left out: there is no %s\n", kLibrary);
    return check::failures();
  }
  objects_come_whole_and_with_their_version();
  what_is_not_as_listed_is_not_whole();
  many_at_once_come_once_each();
  no_server_waits_for_an_acknowledgement();
  what_came_whole_is_not_acknowledged_apart();
  a_connection_that_ends_between_two_objects_is_replaced();
  a_connection_that_ends_while_it_is_idle_costs_nothing();
  an_answer_comes_in_pieces_of_any_size();
  chunked_answers_come_too();
  a_server_that_stalls_is_given_up();
  one_of_several_that_stalls_is_given_up();
  a_wait_ends_in_time_when_woken_and_with_it_all();
  what_is_looked_at_is_not_received();
  a_server_that_is_not_there_fails();
  return check::failures();
}
