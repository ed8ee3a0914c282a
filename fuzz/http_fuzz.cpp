// The head of an answer over HTTP, as a server sends it.
//
// What is read of it must be what a plain reading of its lines says, and nothing that is chunked.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "stoker/plain_http.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string head(reinterpret_cast<const char*>(data), size);
  head.resize(std::min(head.size(), head.find("\r\n\r\n")));  // as far as it is looked at
  head += "\r\n\r\n";
  const auto answer = stoker::answer_of(head);
  if (!answer) return 0;
  std::string lower(head);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const bool is_plain = lower.starts_with("http/1.1 ") &&
                        lower.find("\r\ncontent-length:") != std::string::npos &&
                        lower.find("\r\ntransfer-encoding:") == std::string::npos &&
                        lower.find(std::to_string(answer->length)) != std::string::npos;
  if (!is_plain || answer->status < 200 || answer->status > 999) std::abort();
  return 0;
}
