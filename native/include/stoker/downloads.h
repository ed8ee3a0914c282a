// Whole objects over HTTP into the caller's memory, many at once in one thread.
//
// What speaks HTTP is the libcurl that a library of this process has loaded; its functions are
// looked up there, so that nothing is linked with it. Its binary interface is the stable one that
// it has kept since 2006.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace stoker {

class Downloads {
 public:
  using Parts = std::vector<std::span<unsigned char>>;
  struct Options {
    std::vector<std::string> headers;  // "name: value"
    std::string authorities;           // file of certificates to trust; empty: libcurl's own
    long connect_ms = 0;
    long total_ms = 0;
    long stalled_ms = 1000;  // in which nothing comes
  };
  struct Done {
    std::uint64_t ticket;
    bool whole;              // status 200, and exactly as many bytes as there was memory for
    std::uint64_t received;  // bytes
    std::int64_t length;     // bytes of the object, as the answer states it; -1: not at all
    std::string version;     // as the answer states it, see is_date; empty: not at all
    bool is_date;            // the version is the value of Last-Modified
  };
  // Raises ConfigError where `library`, the path of one that is loaded, has no libcurl with it.
  Downloads(const std::string& library, const Options& options);
  ~Downloads();
  Downloads(const Downloads&) = delete;
  Downloads& operator=(const Downloads&) = delete;

  // Begins to get an object, into the parts one after the other; they are written to until the
  // ticket comes back.
  void start(const std::string& address, Parts into, std::uint64_t ticket);
  // Begins to ask what there is, of which nothing is received.
  void look(const std::string& address, std::uint64_t ticket);
  // What has arrived or failed; waits for so long unless there is something. Also nothing after
  // wake() and signals.
  std::vector<Done> wait(double seconds);
  // Ends a wait that is under way, or the next; any thread.
  void wake();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace stoker
