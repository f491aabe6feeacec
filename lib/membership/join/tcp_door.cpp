// SPDX-License-Identifier: Apache-2.0
#include "membership/join/tcp_door.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/failure.h"
#include "membership/join/roster.h"

namespace fsdp::membership {
namespace {

using namespace std::chrono_literals;
constexpr auto tcp_bind_time = 5s;  // for the listener of a job that is just forming or ending

bool is_local_name(const std::string &host) { return host == "localhost" || host.ends_with(".localhost"); }

}  // namespace

TcpDoor::TcpDoor(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                 Clock::time_point deadline, NameLookup &names)
    : options_(options), point_(point), waiter_(waiter) {
  const auto last_try = std::min(deadline, Clock::now() + tcp_bind_time);
  const auto places = find_places(deadline, names);
  while (!open(places)) {
    const int code = errno;
    if (code == EADDRNOTAVAIL)
      fail(FSDP_INVALID_ARGUMENT,
           "rank 0 cannot listen at the rendezvous '{}': no interface of {} has this address; it must be that of the "
           "host of rank 0",
           options_.rendezvous, host_name());
    if (code != EADDRINUSE) fail_errno(code, format_text("listening at the rendezvous '{}'", options_.rendezvous));
    if (Clock::now() >= last_try)
      throw Error(FSDP_INVALID_ARGUMENT,
                  format_text("rank 0 cannot listen at the rendezvous '{}': another process does; is there a second "
                              "rank 0, or another job of the same rendezvous?",
                              options_.rendezvous),
                  0, FSDP_ORIGIN_OS, code);
    waiter_.poll();
    ::usleep(slice_ms * 1000);
  }
  if (point_.kind == MeetingPoint::Scheme::tcp) open_outer();
  if (point_.kind == MeetingPoint::Scheme::file)
    notice_ = std::make_unique<Notice>(notice_path(point_, options_), ends_.front());
}

std::vector<Endpoint> TcpDoor::find_places(Clock::time_point deadline, NameLookup &names) {
  std::string problem;
  std::vector<Endpoint> places;
  if (point_.kind == MeetingPoint::Scheme::tcp)
    places = find_host(point_, options_, names, {deadline, waiter_}, problem);
  else if (options_.secret.empty())
    places = Endpoint::numeric("127.0.0.1", 0, problem);
  else
    places.push_back(own_address());
  if (places.empty())
    fail(FSDP_INVALID_ARGUMENT, "rendezvous '{}': the host '{}' has no address: {}", options_.rendezvous, point_.host,
         problem);
  return places;
}

// At the first address that has an interface; errno is of the last.
bool TcpDoor::open(const std::vector<Endpoint> &places) {
  for (const Endpoint &place : places) {
    check_guarded(place, options_);
    Fd listener = listen_at(place, SOMAXCONN);
    if (!listener) continue;
    ends_.push_back(Endpoint::local(listener));
    listeners_.push_back(std::move(listener));
    return true;
  }
  return false;
}

// A name that is a loopback address here, as Debian writes a host's own into /etc/hosts: ranks of other hosts know it
// by another address, at which nobody would listen.
void TcpDoor::open_outer() {
  std::string problem;
  const bool numeric = !Endpoint::numeric(point_.host, point_.port, problem).empty();
  if (numeric || is_local_name(point_.host) || !ends_.front().loopback()) return;
  remark_ =
      format_text("; on {} the name '{}' is the loopback address {} (see /etc/hosts), by which no other host comes",
                  host_name(), point_.host, ends_.front().address());
  Endpoint at = own_address();
  if (at.loopback() || options_.secret.empty()) return;
  at.set_port(point_.port);
  Fd listener = listen_at(at, SOMAXCONN);
  if (!listener) {
    remark_ += format_text(", and it could not listen at {}: {}", at.text(), std::strerror(errno));
    return;
  }
  remark_ += format_text(", so it listened at {} too", at.text());
  ends_.push_back(at);
  listeners_.push_back(std::move(listener));
}

std::string TcpDoor::text() const {
  std::string text = ends_.front().text() + remark_;
  if (ends_.back().loopback())
    text += format_text(" (only for its host and network namespace, {})", network_namespace());
  return text;
}

}  // namespace fsdp::membership
