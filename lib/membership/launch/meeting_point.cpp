// SPDX-License-Identifier: Apache-2.0
#include "membership/launch/meeting_point.h"

#include <charconv>
#include <thread>

namespace fsdp::membership {
namespace {

constexpr std::string_view tcp_scheme = "tcp://", file_scheme = "file://";

[[noreturn]] void refuse_point(const std::string &text, const char *why) {
  fail(FSDP_INVALID_ARGUMENT,
       "rendezvous '{}': {} (known are tcp://HOST:PORT, file:///DIRECTORY and, for ranks of one host, any name)", text,
       why);
}

}  // namespace

std::pair<std::string, uint16_t> parse_host_port(const std::string &text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) fail(FSDP_INVALID_ARGUMENT, "'{}' has no port: HOST:PORT is expected", text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  else if (host.empty() || host.find(':') != std::string::npos)
    fail(FSDP_INVALID_ARGUMENT, "'{}' is not HOST:PORT (an IPv6 address stands in brackets)", text);
  uint16_t port = 0;
  const char *first = text.data() + colon + 1, *end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(first, end, port);
  if (code != std::errc() || stop != end || port == 0)
    fail(FSDP_INVALID_ARGUMENT, "'{}': the port is not a number from 1 to 65535", text);
  return {host, port};
}

MeetingPoint parse_meeting_point(const std::string &rendezvous) {
  MeetingPoint point;
  point.text = rendezvous;
  if (rendezvous.starts_with(tcp_scheme)) {
    point.kind = MeetingPoint::Kind::tcp;
    std::tie(point.host, point.port) = parse_host_port(rendezvous.substr(tcp_scheme.size()));
  } else if (rendezvous.starts_with(file_scheme)) {
    point.kind = MeetingPoint::Kind::file;
    point.directory = rendezvous.substr(file_scheme.size());
    if (!point.directory.starts_with('/')) refuse_point(rendezvous, "the directory is not absolute");
  } else if (rendezvous.find("://") != std::string::npos) {
    refuse_point(rendezvous, "this scheme is not known");
  }
  return point;
}

std::vector<Endpoint> find_host(const MeetingPoint &point, const WorldOptions &options, NameLookup &names,
                                const Limit &limit, std::string &problem) {
  std::chrono::steady_clock::time_point end;
  for (bool noted = false;; noted = true) {
    std::string answer;
    auto found = names.find(point.host, point.port, limit, answer);
    if (!found.empty()) return found;
    if (!noted) {  // later ones may only say that time is over
      problem = answer;
      end = std::chrono::steady_clock::now() + NameLookup::patience;
    }
    if (limit.over()) return {};
    const std::string text =
        format_text("rendezvous '{}': the host '{}' has no address: {}", options.rendezvous, point.host, problem);
    if (names.is_unknown() || std::chrono::steady_clock::now() >= end) fail(FSDP_INVALID_ARGUMENT, "{}", text);
    if (!noted && options.log) options.log(FSDP_LOG_WARNING, text + "; it is asked again");
    limit.waiter.poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

void check_guarded(const Endpoint &at, const WorldOptions &options) {
  if (!options.secret.empty() || at.loopback()) return;
  fail(FSDP_INVALID_ARGUMENT,
       "rendezvous '{}' is at {}, which other hosts reach, and there is no job secret: without one only loopback "
       "addresses are served. Give all ranks the same secret: FSDP_JOB_SECRET_FILE=FILE (that only its user can read) "
       "or FSDP_JOB_SECRET",
       options.rendezvous, at.text());
}

}  // namespace fsdp::membership
