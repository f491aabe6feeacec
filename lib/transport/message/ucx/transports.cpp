// SPDX-License-Identifier: Apache-2.0
#include "transport/message/ucx/transports.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/error.h"

namespace fsdp::transport::ucx {
namespace {

// Between processes of one host, or to the memory of a device.
bool stays_on_host(std::string_view transport) {
  constexpr std::array<std::string_view, 6> names{"self", "posix", "sysv", "cma", "knem", "xpmem"};
  const std::string_view name = transport.substr(0, transport.find('/'));
  return std::ranges::count(names, name) > 0 || name.ends_with("_copy") || name.ends_with("_ipc");
}

}  // namespace

// A line for each: "#      resource 1  :  md 1  dev 1  flags -- tcp/lo".
std::vector<std::string> transports_of(std::string_view text) {
  std::vector<std::string> found;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const size_t slash = line.rfind('/');
    if (line.find(" resource ") == std::string_view::npos || slash == std::string_view::npos) continue;
    found.emplace_back(line.substr(line.rfind(' ', slash) + 1));
  }
  return found;
}

bool may_use_tcp(const std::vector<std::string> &transports) {
  return transports.empty() ||
         std::ranges::any_of(transports, [](const auto &name) { return name.starts_with("tcp"); });
}

bool leaves_host(const std::vector<std::string> &transports) { return !std::ranges::all_of(transports, stays_on_host); }

bool trusts_tcp() {
  const char *text = std::getenv("FSDP_UCX_TCP");
  const std::string_view word(text ? text : "");
  if (!word.empty() && word != "trusted")
    fail(FSDP_INVALID_ARGUMENT, "FSDP_UCX_TCP='{}': 'trusted' is expected, or no such variable", word);
  return !word.empty();
}

}  // namespace fsdp::transport::ucx
