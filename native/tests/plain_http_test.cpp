// What is read of the head of an answer, and what is left to libcurl.
#include "stoker/plain_http.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"

namespace {

using stoker::answer_of;
using stoker::Incoming;
using stoker::PlainHttp;

void plain_heads_are_read() {
  const auto answer = answer_of(
      "HTTP/1.1 200 OK\r\ncontent-LENGTH:\t 12 \r\nETag: \"a\"\r\nX-Amz-Version-Id: 7\r\n"
      "Last-Modified: Tue\r\nX: a: b\r\n\r\n");
  CHECK(answer && answer->status == 200 && answer->length == 12 && answer->keeps_alive);
  CHECK(answer->stated.etag == "\"a\"" && answer->stated.version == "7");
  CHECK(answer->stated.changed == "Tue");
  CHECK(answer_of("HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n")->status == 404);
  CHECK(
      !answer_of("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n")->keeps_alive);
  CHECK(answer_of("HTTP/1.1 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\n")
            ->keeps_alive);
}

void what_is_not_to_the_letter_is_not_read() {
  const std::string ok = "HTTP/1.1 200 OK\r\n";
  const std::string length = "Content-Length: 5\r\n";
  for (const std::string& head : {std::string("\r\n\r\n"),
                                  "HTTP/1.1\r\n\r\n" + length,
                                  ok + "\r\n",
                                  "HTTP/1.0 200 OK\r\n" + length + "\r\n",
                                  "HTTP/2 200\r\n" + length + "\r\n",
                                  "HTTP/1.1 2000 OK\r\n" + length + "\r\n",
                                  "HTTP/1.1 20 OK\r\n" + length + "\r\n",
                                  "HTTP/1.1 100 Continue\r\n" + length + "\r\n",
                                  "HTTP/1.1 -20 OK\r\n" + length + "\r\n",
                                  ok + "Content-Length: 5, 5\r\n\r\n",
                                  ok + "Content-Length: -5\r\n\r\n",
                                  ok + "Content-Length: +5\r\n\r\n",
                                  ok + "Content-Length: 0x5\r\n\r\n",
                                  ok + "Content-Length: 99999999999999999999999\r\n\r\n",
                                  ok + "Content-Length:\r\n\r\n",
                                  ok + length + "Content-Length: 6\r\n\r\n",
                                  ok + length + "Transfer-Encoding: chunked\r\n\r\n",
                                  ok + length + "Content-Encoding: gzip\r\n\r\n",
                                  ok + length + " folded\r\n\r\n",
                                  ok + length + "No colon\r\n\r\n",
                                  ok + length + ": no name\r\n\r\n",
                                  ok + "Content-Length : 5\r\n\r\n",
                                  ok + length + "A: b\nC: d\r\n\r\n",
                                  ok + length}) {
    CHECK(!answer_of(head));
  }
  CHECK(answer_of(ok + length + length + "\r\n"));  // the same, twice
}

void only_plain_addresses_are_taken() {
  const PlainHttp::Limits limits{{"X-Token: a"}, PlainHttp::kNever, PlainHttp::kNever};
  const PlainHttp plain(-1, limits);
  CHECK(plain.takes("http://host/a") && plain.takes("http://host:80/a%20b?c=d"));
  for (const char* other : {"https://host/a", "http://user@host/a", "http://host/a#b",
                            "http://host", "http:///a", "http://host?a", "http://host/a b",
                            "http://host/../a", "http://host/a\r\nX: b", "ftp://host/a", ""}) {
    CHECK(!plain.takes(other));
  }
  for (const char* header : {"Host: b", "connection: close", "none", ": none", "A: b\r\nC: d"}) {
    CHECK(!PlainHttp(-1, {{header}, PlainHttp::kNever, PlainHttp::kNever}).takes("http://host/a"));
  }
  ::setenv("http_proxy", "http://proxy", 1);
  CHECK(!PlainHttp(-1, limits).takes("http://host/a"));
  ::unsetenv("http_proxy");
}

void bytes_go_into_the_parts_in_order() {
  std::vector<unsigned char> memory(10, 'x');
  const std::span all(memory);
  Incoming incoming("", {all.first(3), all.subspan(5, 4)}, 1);
  CHECK(incoming.size == 7);
  CHECK(incoming.take("ab", 2) && incoming.take("cde", 3));
  CHECK(!incoming.take("fgh", 3) && !incoming.is_whole());
  CHECK(incoming.take("fg", 2) && incoming.is_whole() && !incoming.take("h", 1));
  CHECK(std::string(memory.begin(), memory.end()) == "abcxxdefgx");
  incoming.begin_again();
  CHECK(incoming.take("ABCDEFG", 7));
  CHECK(std::string(memory.begin(), memory.end()) == "ABCxxDEFGx");
}

}  // namespace

int main() {
  plain_heads_are_read();
  what_is_not_to_the_letter_is_not_read();
  only_plain_addresses_are_taken();
  bytes_go_into_the_parts_in_order();
  return check::failures();
}
