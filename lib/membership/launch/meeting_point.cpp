// SPDX-License-Identifier: Apache-2.0

#include "membership/launch/meeting_point.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/library_thread.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

namespace {

constexpr auto slice = std::chrono::milliseconds(20);

// Keeps this library loaded, because an abandoned thread still runs its code. Does nothing if the library is linked
// into the program.
void keep_library_loaded() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void *>(&keep_library_loaded), &found) != 0 && found.dli_fname)
    (void)::dlopen(found.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

struct NameLookup::Question {
  std::string host;
  uint16_t port = 0;
  std::mutex mutex;
  std::condition_variable answered;
  bool done = false, temporary = false;  // once `done`, the answer is in found, problem and temporary
  std::vector<Endpoint> found;
  std::string problem;
};

NameLookup::~NameLookup() {
  if (!question_) return;
  const std::lock_guard lock(question_->mutex);
  if (!question_->done) keep_library_loaded();
}

void NameLookup::ask(const std::string &host, uint16_t port) {
  auto question = std::make_shared<Question>();
  question->host = host;
  question->port = port;
  try {
    const BlockedSignals blocked;
    std::thread([question, resolver = resolver_] {
      ::pthread_setname_np(::pthread_self(), "fsdp-lookup");
      std::string problem;
      bool temporary = false;
      auto found = resolver(question->host, question->port, problem, &temporary);
      const std::lock_guard lock(question->mutex);
      question->found = std::move(found);
      question->problem = std::move(problem);
      question->temporary = temporary;
      question->done = true;
      question->answered.notify_all();
    }).detach();
  } catch (const std::system_error &error) {
    fail_errno(error.code().value(), "start a thread that asks for the address of a host");
  }
  question_ = std::move(question);
}

std::vector<Endpoint> NameLookup::find(const std::string &host, uint16_t port, const Limit &limit,
                                       std::string &problem) {
  unknown_ = false;
  if (auto found = Endpoint::numeric(host, port, problem); !found.empty()) return found;
  if (!question_ || question_->host != host || question_->port != port) ask(host, port);
  std::unique_lock lock(question_->mutex);
  while (!question_->done) {
    if (limit.over()) {
      problem = format_text("the name service has not answered what the address of '{}' is", host);
      return {};
    }
    question_->answered.wait_for(lock, slice);
    lock.unlock();
    limit.waiter.poll();
    lock.lock();
  }
  auto found = std::move(question_->found);
  if (found.empty()) problem = question_->problem;
  known_ = known_ || !found.empty();
  unknown_ = found.empty() && !question_->temporary && !known_;
  lock.unlock();
  question_.reset();  // the next call asks again
  return found;
}

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
    point.kind = MeetingPoint::Scheme::tcp;
    std::tie(point.host, point.port) = parse_host_port(rendezvous.substr(tcp_scheme.size()));
  } else if (rendezvous.starts_with(file_scheme)) {
    point.kind = MeetingPoint::Scheme::file;
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
    if (!noted) {  // later answers may say only that the time is over
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

// The rendezvous in a directory that all hosts share: a file in it has rank 0's address. The file is not trusted; the
// process that listens at the address must prove the job secret.

namespace {

constexpr std::string_view first_words = "fsdp-rendezvous 1 ";
constexpr size_t longest_notice = 128;

// The local address from which a packet to `far` would leave. No packet is sent.
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
  Endpoint at = by_route("192.0.2.1");  // an address reserved for documentation, so the default route is used
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
