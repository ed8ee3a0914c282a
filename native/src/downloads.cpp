#include "stoker/downloads.h"

#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "stoker/error.h"
#include "stoker/racy_copy.h"

namespace stoker {
namespace {

// From curl/curl.h and curl/multi.h, whose numbers never change.
enum Option : int {
  kWriteData = 10001,
  kUrl = 10002,
  kHttpHeader = 10023,
  kHeaderData = 10029,
  kCaInfo = 10065,
  kPrivate = 10103,
  kOpenSocketData = 10164,
  kCloseSocketData = 10209,
  kWriteFunction = 20011,
  kHeaderFunction = 20079,
  kOpenSocketFunction = 20163,
  kCloseSocketFunction = 20208,
  kNoBody = 44,
  kHttpGet = 80,
  kHttpVersion = 84,
  kBufferSize = 98,
  kNoSignal = 99,
  kTimeoutMs = 155,
  kConnectTimeoutMs = 156,
  kProtocols = 181,
  kMaxFileSizeLarge = 30117,
};
enum MultiOption : int {
  kSocketFunction = 20001,
  kTimerFunction = 20004,
  kTimerData = 10005,
  kSocketData = 10002,
};
constexpr int kInfoPrivate = 0x100000 + 21;
constexpr int kInfoResponseCode = 0x200000 + 2;
constexpr int kInfoRequestSize = 0x200000 + 12;
constexpr int kInfoContentLength = 0x600000 + 15;
constexpr long kHttpAndHttps = 3;
constexpr long kHttp11 = 2;  // as many connections as requests
constexpr int kPollIn = 1, kPollOut = 2, kPollRemove = 4;
constexpr int kSelectIn = 1, kSelectOut = 2, kSelectError = 4;
constexpr int kTimedOut = -1;  // in the place of a socket
constexpr long kOk = 200;

struct Address {
  int family, type, protocol;
};

struct Message {
  int kind;
  void* easy;
  union {
    void* whatever;
    int result;
  } data;
};

struct Curl {
  void* (*easy_init)();
  int (*easy_setopt)(void*, int, ...);
  int (*easy_getinfo)(void*, int, ...);
  void (*easy_cleanup)(void*);
  void* (*slist_append)(void*, const char*);
  void (*slist_free_all)(void*);
  void* (*multi_init)();
  int (*multi_setopt)(void*, int, ...);
  int (*multi_add_handle)(void*, void*);
  int (*multi_remove_handle)(void*, void*);
  int (*multi_socket_action)(void*, int, int, int*);
  Message* (*multi_info_read)(void*, int*);
  int (*multi_cleanup)(void*);
};

// `dlsym` looks into what the library depends on, too.
Curl found_in(const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = library == nullptr ? nullptr : ::dlsym(library, name);
    if (symbol == nullptr) {
      throw ConfigError(path + " is not loaded with a libcurl that has " + name +
                        ": give a library that is");
    }
    std::memcpy(&function, &symbol, sizeof symbol);
  };
  Curl curl{};
  find(curl.easy_init, "curl_easy_init");
  find(curl.easy_setopt, "curl_easy_setopt");
  find(curl.easy_getinfo, "curl_easy_getinfo");
  find(curl.easy_cleanup, "curl_easy_cleanup");
  find(curl.slist_append, "curl_slist_append");
  find(curl.slist_free_all, "curl_slist_free_all");
  find(curl.multi_init, "curl_multi_init");
  find(curl.multi_setopt, "curl_multi_setopt");
  find(curl.multi_add_handle, "curl_multi_add_handle");
  find(curl.multi_remove_handle, "curl_multi_remove_handle");
  find(curl.multi_socket_action, "curl_multi_socket_action");
  find(curl.multi_info_read, "curl_multi_info_read");
  find(curl.multi_cleanup, "curl_multi_cleanup");
  return curl;  // the library stays open, as its functions are used until the process ends
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kLook = 0.25;  // seconds between two looks for what has stalled, at least

// One handle of libcurl's, which keeps its connection, and the object it is getting.
struct Transfer {
  void begin(Downloads::Parts parts, std::uint64_t number) {
    into = std::move(parts);
    size = 0;
    for (const auto& each : into) size += each.size();
    ticket = number;
    received = part = at = 0;
    moved = now();
    is_sent = false;
    for (std::string* field : {&etag, &version, &changed}) field->clear();
  }
  // Takes the next bytes; false, and takes none, if there is no room for them.
  bool take(const char* data, std::size_t bytes) {
    if (bytes > size - received) return false;
    received += bytes;
    while (bytes > 0) {
      const auto room = into[part].subspan(at);
      const std::size_t here = std::min(bytes, room.size());
      racy_write(room.data(), data, here);
      data += here;
      bytes -= here;
      at += here;
      if (here == room.size()) {
        ++part;
        at = 0;
      }
    }
    return true;
  }
  void note_life() {
    moved = now();
    is_sent = true;
  }
  bool is_whole() const { return received == size; }

  void* easy = nullptr;
  int descriptor = -1;  // of its connection
  Downloads::Parts into;
  std::uint64_t size = 0;
  std::uint64_t ticket = 0;
  std::uint64_t received = 0;
  std::size_t part = 0, at = 0;  // the next byte's
  double moved = kNever;         // when something last came; never: it is idle
  bool is_sent = false;          // the request, as far as is known
  std::string etag, version, changed;
};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const auto begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::size_t write(char* data, std::size_t, std::size_t size, void* to) {
  static_cast<Transfer*>(to)->note_life();
  return static_cast<Transfer*>(to)->take(data, size) ? size : 0;  // 0: not the object listed
}

std::size_t note_header(char* data, std::size_t, std::size_t size, void* to) {
  auto& transfer = *static_cast<Transfer*>(to);
  transfer.note_life();
  const std::string_view line(data, size);
  const auto note = [&](std::string_view name, std::string& field) {
    if (line.size() < name.size() || !field.empty()) return;
    if (::strncasecmp(line.data(), name.data(), name.size()) != 0) return;
    field = trimmed(line.substr(name.size()));
  };
  note("etag:", transfer.etag);
  note("x-amz-version-id:", transfer.version);
  note("last-modified:", transfer.changed);
  return size;
}

// What is waited for of a descriptor. A connection without a request stays as it was, for the next
// one follows.
struct Watched {
  std::uint32_t reported = 0;  // events
  std::uint32_t wanted = 0;
  bool is_connection = false;
  bool is_partial = false;  // some of an answer has come
};

// Linux delays acknowledgements by up to 40 ms, and a server may wait for one to send the rest. To
// be called each time, for it falls back to that by itself.
void acknowledge(int descriptor) {
  constexpr int kOn = 1;
  ::setsockopt(descriptor, IPPROTO_TCP, TCP_QUICKACK, &kOn, sizeof kOn);
}

constexpr long kBufferBytes = 512 << 10;  // that libcurl reads at once: its most
constexpr int kEvents = 64;

}  // namespace

struct Downloads::Impl {
  Impl(const std::string& library, const Options& given);
  ~Impl();
  Transfer& made();
  void begin(Option method, const std::string& address, Parts into, std::uint64_t ticket);
  bool advance(double seconds);
  void collect(std::vector<Done>& done);
  void give_up_stalled(std::vector<Done>& done);

  Watched& watched(int descriptor);
  void report(int descriptor, std::uint32_t events);
  void acknowledge_begun();
  static int watch(void* easy, int descriptor, int what, void* self, void*);
  static int connection(void* self, int, const Address* address);
  static int close_connection(void* self, int descriptor);
  static int set_timer(void*, long milliseconds, void* self);

  const Curl curl;
  const Options options;
  void* headers = nullptr;
  void* multi = nullptr;
  int epoll = -1;
  int waker = -1;
  double due = kNever;  // when libcurl wants to be called in any case
  double look_at = 0;   // when to look for what has stalled
  std::vector<std::unique_ptr<Transfer>> transfers;
  int running = 0;  // transfers, as libcurl says
  std::vector<Transfer*> idle, begun;
  std::vector<Watched> descriptors;
};

Downloads::Impl::Impl(const std::string& library, const Options& given)
    : curl(found_in(library)), options(given) {
  for (const std::string& header : options.headers) {
    headers = curl.slist_append(headers, header.c_str());
  }
  epoll = ::epoll_create1(EPOLL_CLOEXEC);
  waker = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = waker;
  multi = curl.multi_init();
  if (epoll < 0 || waker < 0 || multi == nullptr ||
      ::epoll_ctl(epoll, EPOLL_CTL_ADD, waker, &event) != 0) {
    throw SegmentError("no descriptors are left for downloads: raise the limit (ulimit -n)");
  }
  curl.multi_setopt(multi, kSocketFunction, &Impl::watch);
  curl.multi_setopt(multi, kSocketData, this);
  curl.multi_setopt(multi, kTimerFunction, &Impl::set_timer);
  curl.multi_setopt(multi, kTimerData, this);
}

Downloads::Impl::~Impl() {
  for (const auto& transfer : transfers) {
    curl.multi_remove_handle(multi, transfer->easy);
    curl.easy_cleanup(transfer->easy);
  }
  if (multi != nullptr) curl.multi_cleanup(multi);
  curl.slist_free_all(headers);
  if (epoll >= 0) ::close(epoll);
  if (waker >= 0) ::close(waker);
}

Watched& Downloads::Impl::watched(int descriptor) {
  const auto number = static_cast<std::size_t>(descriptor);
  if (number >= descriptors.size()) descriptors.resize(number + 1);
  return descriptors[number];
}

// Has the kernel report these events from now on.
void Downloads::Impl::report(int descriptor, std::uint32_t events) {
  std::uint32_t& reported = watched(descriptor).reported;
  epoll_event event{};
  event.data.fd = descriptor;
  event.events = events;
  const int how = events == 0 ? EPOLL_CTL_DEL : reported == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (::epoll_ctl(epoll, how, descriptor, &event) != 0 && errno == ENOENT && events != 0) {
    ::epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event);  // it had been closed unseen
  }
  reported = events;
}

// Waits for what libcurl wants of a descriptor from now on.
int Downloads::Impl::watch(void* easy, int descriptor, int what, void* self, void*) {
  auto& impl = *static_cast<Impl*>(self);
  Transfer* transfer = nullptr;
  impl.curl.easy_getinfo(easy, kInfoPrivate, &transfer);
  if (what != kPollRemove && transfer != nullptr) transfer->descriptor = descriptor;
  Watched& watched = impl.watched(descriptor);
  watched.wanted = 0;
  if (what != kPollRemove && (what & kPollIn) != 0) watched.wanted |= EPOLLIN;
  if (what != kPollRemove && (what & kPollOut) != 0) watched.wanted |= EPOLLOUT;
  const bool stays = watched.wanted == 0 || watched.wanted == watched.reported;
  if (!watched.is_connection || !stays) impl.report(descriptor, watched.wanted);
  return 0;
}

int Downloads::Impl::connection(void* self, int, const Address* address) {
  const int made = ::socket(address->family, address->type | SOCK_CLOEXEC, address->protocol);
  if (made >= 0) static_cast<Impl*>(self)->watched(made) = {0, 0, true, false};
  return made;
}

// The kernel reports nothing of it any more, then.
int Downloads::Impl::close_connection(void* self, int descriptor) {
  static_cast<Impl*>(self)->watched(descriptor) = {};
  return ::close(descriptor);
}

int Downloads::Impl::set_timer(void*, long milliseconds, void* self) {
  const double at = milliseconds < 0 ? kNever : now() + static_cast<double>(milliseconds) / 1e3;
  static_cast<Impl*>(self)->due = at;
  return 0;
}

Transfer& Downloads::Impl::made() {
  void* const easy = curl.easy_init();
  if (easy == nullptr) throw std::bad_alloc();
  transfers.push_back(std::make_unique<Transfer>());
  Transfer& transfer = *transfers.back();
  transfer.easy = easy;
  curl.easy_setopt(easy, kPrivate, &transfer);
  curl.easy_setopt(easy, kWriteFunction, &write);
  curl.easy_setopt(easy, kWriteData, &transfer);
  curl.easy_setopt(easy, kHeaderFunction, &note_header);
  curl.easy_setopt(easy, kHeaderData, &transfer);
  curl.easy_setopt(easy, kOpenSocketFunction, &Impl::connection);
  curl.easy_setopt(easy, kOpenSocketData, this);
  curl.easy_setopt(easy, kCloseSocketFunction, &Impl::close_connection);
  curl.easy_setopt(easy, kCloseSocketData, this);
  curl.easy_setopt(easy, kBufferSize, kBufferBytes);
  curl.easy_setopt(easy, kNoSignal, 1L);
  curl.easy_setopt(easy, kProtocols, kHttpAndHttps);
  curl.easy_setopt(easy, kHttpVersion, kHttp11);
  curl.easy_setopt(easy, kHttpHeader, headers);
  curl.easy_setopt(easy, kConnectTimeoutMs, options.connect_ms);
  curl.easy_setopt(easy, kTimeoutMs, options.total_ms);
  if (!options.authorities.empty()) {
    curl.easy_setopt(easy, kCaInfo, options.authorities.c_str());
  }
  return transfer;
}

void Downloads::Impl::begin(Option method, const std::string& address, Parts into,
                            std::uint64_t ticket) {
  if (idle.empty()) idle.push_back(&made());
  Transfer& transfer = *idle.back();
  idle.pop_back();
  transfer.begin(std::move(into), ticket);
  begun.push_back(&transfer);
  curl.easy_setopt(transfer.easy, method, 1L);
  curl.easy_setopt(transfer.easy, kUrl, address.c_str());
  // 0 means no limit: that is for what receives nothing.
  curl.easy_setopt(transfer.easy, kMaxFileSizeLarge, static_cast<std::int64_t>(transfer.size));
  curl.multi_add_handle(multi, transfer.easy);
}

// Lets libcurl read and write what it can; waits for so long until there is something. False after
// wake() and signals.
bool Downloads::Impl::advance(double seconds) {
  const double left = std::clamp(std::min(seconds, due - now()), 0.0, 3600.0);
  epoll_event events[kEvents];
  const int milliseconds = static_cast<int>(std::ceil(left * 1e3));
  const int count = ::epoll_wait(epoll, events, kEvents, milliseconds);
  bool goes_on = count >= 0;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[i];
    if (event.data.fd == waker) {
      eventfd_t value;
      ::eventfd_read(waker, &value);
      goes_on = false;
      continue;
    }
    if (watched(event.data.fd).wanted == 0) {
      report(event.data.fd, 0);  // the server has closed it: libcurl sees that when it needs it
      continue;
    }
    const int ready = ((event.events & (EPOLLIN | EPOLLHUP)) != 0 ? kSelectIn : 0) |
                      ((event.events & EPOLLOUT) != 0 ? kSelectOut : 0) |
                      ((event.events & EPOLLERR) != 0 ? kSelectError : 0);
    const bool had_come = watched(event.data.fd).is_partial;
    if (had_come) acknowledge(event.data.fd);
    const int before = running;
    curl.multi_socket_action(multi, event.data.fd, ready, &running);
    const bool is_partial = running >= before;
    watched(event.data.fd).is_partial = is_partial;
    if (is_partial && !had_come) acknowledge(event.data.fd);
  }
  if (now() >= due) {
    due = kNever;
    curl.multi_socket_action(multi, kTimedOut, 0, &running);
    acknowledge_begun();
  }
  return goes_on;
}

// Who asks may find the beginning of the answer there already, which no event tells then.
void Downloads::Impl::acknowledge_begun() {
  for (const Transfer* const each : begun) {
    if (each->descriptor < 0 || !each->is_sent || each->is_whole()) continue;
    acknowledge(each->descriptor);
    watched(each->descriptor).is_partial = true;
  }
  begun.clear();
}

void Downloads::Impl::collect(std::vector<Done>& done) {
  int left = 0;
  while (const Message* const message = curl.multi_info_read(multi, &left)) {
    void* const easy = message->easy;
    const int result = message->data.result;  // the message is gone once the handle is removed
    Transfer* transfer = nullptr;
    long status = 0;
    std::int64_t length = -1;
    curl.easy_getinfo(easy, kInfoPrivate, &transfer);
    curl.easy_getinfo(easy, kInfoResponseCode, &status);
    curl.easy_getinfo(easy, kInfoContentLength, &length);
    curl.multi_remove_handle(multi, easy);
    const bool whole = result == 0 && status == kOk && transfer->is_whole();
    const std::string& stated = transfer->etag.empty() ? transfer->version : transfer->etag;
    const bool is_date = stated.empty();
    done.push_back({transfer->ticket, whole, transfer->received, length,
                    is_date ? transfer->changed : stated, is_date});
    transfer->into = {};
    transfer->moved = kNever;
    idle.push_back(transfer);
  }
}

// Where other objects arrive, libcurl does not always check its own limit.
void Downloads::Impl::give_up_stalled(std::vector<Done>& done) {
  const double at = now();
  if (at < look_at) return;
  look_at = at + kLook;
  for (const auto& transfer : transfers) {
    if (!transfer->is_sent && transfer->moved != kNever) {  // libcurl limits the time until then
      long bytes = 0;
      curl.easy_getinfo(transfer->easy, kInfoRequestSize, &bytes);
      transfer->is_sent = bytes > 0;
      transfer->moved = at;
    }
    if (at - transfer->moved < static_cast<double>(options.stalled_ms) / 1e3) continue;
    curl.multi_remove_handle(multi, transfer->easy);  // with its connection
    done.push_back({transfer->ticket, false, transfer->received, -1, {}, true});
    transfer->into = {};
    transfer->moved = kNever;
    idle.push_back(transfer.get());
  }
}

Downloads::Downloads(const std::string& library, const Options& options)
    : impl_(std::make_unique<Impl>(library, options)) {}

Downloads::~Downloads() = default;

void Downloads::start(const std::string& address, Parts into, std::uint64_t ticket) {
  impl_->begin(kHttpGet, address, std::move(into), ticket);
}

void Downloads::look(const std::string& address, std::uint64_t ticket) {
  impl_->begin(kNoBody, address, {}, ticket);
}

std::vector<Downloads::Done> Downloads::wait(double seconds) {
  std::vector<Done> done;
  const double deadline = now() + seconds;
  bool goes_on = true;
  for (double left = seconds; goes_on && done.empty() && left >= 0; left = deadline - now()) {
    goes_on = impl_->advance(std::min(left, kLook));
    impl_->collect(done);
    impl_->give_up_stalled(done);
  }
  return done;
}

void Downloads::wake() { ::eventfd_write(impl_->waker, 1); }

}  // namespace stoker
