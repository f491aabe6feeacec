// SPDX-License-Identifier: Apache-2.0
// The rendezvous through a directory that all hosts share: rank 0's address in a file. Nothing in it is trusted; who
// listens at the address must prove the job secret.
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "membership/launch/meeting_point.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {
namespace {

constexpr std::string_view first_words = "fsdp-rendezvous 1 ";
constexpr size_t longest_notice = 128;

// Where a packet to the world would leave from; none is sent.
Endpoint by_route(const char *far) {
  std::string problem;
  const auto to = Endpoint::numeric(far, 9, problem);
  if (to.empty()) return {};
  const Fd socket(::socket(to[0].family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), to[0].get(), to[0].length()) != 0) return {};
  return Endpoint::local(socket);
}

Endpoint by_interface() {
  ifaddrs *list = nullptr;
  if (::getifaddrs(&list) != 0) return {};
  Endpoint found;
  for (const ifaddrs *entry = list; entry && !found.family(); entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || !(entry->ifa_flags & IFF_UP)) continue;
    const Endpoint at(*reinterpret_cast<const sockaddr_in *>(entry->ifa_addr));
    if (!at.loopback()) found = at;
  }
  ::freeifaddrs(list);
  return found;
}

std::string read_short_file(const std::string &path, std::string &problem) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  char text[longest_notice];
  const ssize_t got = file ? ::read(file.get(), text, sizeof text) : -1;
  if (got < 0) {
    problem = format_text("{}: {}", path, std::strerror(errno));
    return {};
  }
  return {text, static_cast<size_t>(got)};
}

void write_file(const std::string &path, const std::string &text) {
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) fail_errno(errno, format_text("the rendezvous file {}", path));
  if (::write(file.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) || ::fsync(file.get()) != 0) {
    const int code = errno;
    ::unlink(path.c_str());
    fail_errno(code, format_text("writing the rendezvous file {}", path));
  }
}

}  // namespace

Endpoint own_address() {
  Endpoint at = by_route("192.0.2.1");  // an address for documentation: only the default route leads there
  if (!at.family()) at = by_interface();
  std::string problem;
  if (!at.family()) at = Endpoint::numeric("127.0.0.1", 0, problem).at(0);
  at.set_port(0);
  return at;
}

std::string notice_path(const MeetingPoint &point, const WorldOptions &options) {
  return format_text("{}/{}", point.directory, socket_name("file:" + options.job, options.secret, 0));
}

Notice::Notice(std::string path, const Endpoint &at)
    : path_(std::move(path)), text_(format_text("{}{}\n", first_words, at.text())) {
  const std::string fresh = format_text("{}.{}.{}", path_, ::getpid(), at.port());
  ::unlink(fresh.c_str());
  write_file(fresh, text_);
  if (::rename(fresh.c_str(), path_.c_str()) == 0) return;
  const int code = errno;
  ::unlink(fresh.c_str());
  fail_errno(code, format_text("the rendezvous file {}", path_));
}

Notice::~Notice() {
  std::string problem;
  if (read_short_file(path_, problem) == text_) ::unlink(path_.c_str());
}

std::vector<Endpoint> read_notice(const std::string &path, std::string &problem) {
  std::string text = read_short_file(path, problem);
  if (!problem.empty()) return {};
  problem = format_text("{} holds no address of a rank 0", path);
  if (!text.starts_with(first_words) || text.back() != '\n') return {};
  text = text.substr(first_words.size(), text.size() - first_words.size() - 1);
  try {
    const auto [host, port] = parse_host_port(text);
    if (host.find_first_not_of("0123456789abcdefABCDEF.:%") != std::string::npos) return {};  // numeric only
    std::string wrong;
    auto found = Endpoint::numeric(host, port, wrong);
    if (!found.empty()) problem.clear();
    return found;
  } catch (const Error &) {
    return {};
  }
}

}  // namespace fsdp::membership
