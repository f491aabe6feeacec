// SPDX-License-Identifier: Apache-2.0

#include "membership/join/tcp_visit.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "membership/job.h"
#include "membership/join/roster.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

namespace {

Fd make_unix_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail_errno(errno, "a socket for the ranks of this host");
  return socket;
}

Address address_of(const WorldOptions &options, const std::string &host_id) {
  WorldOptions place;
  const WipedText wiped(place.secret);
  place.rendezvous =
      format_text("host {} before rendezvous '{}' (attempt {})", host_id, options.rendezvous, options.attempt);
  place.secret = options.secret;
  return Address(place);
}

}  // namespace

HostMeeting::HostMeeting(const WorldOptions &options, const std::string &host_id)
    : address_(address_of(options, host_id)) {}

// Only binds the socket, which accepts no connections before open().
bool HostMeeting::take() {
  if (socket_) return true;
  Fd socket = make_unix_socket();
  if (::bind(socket.get(), address_.get(), address_.length()) == 0) socket_ = std::move(socket);
  return taken();
}

Fd HostMeeting::visit(std::string &problem) const {
  Fd socket = make_unix_socket();
  if (::connect(socket.get(), address_.get(), address_.length()) != 0) {
    problem = format_text("the rank of this host that has come first: {}",
                          errno == ECONNREFUSED ? "it has not found rank 0 yet" : std::strerror(errno));
    return {};
  }
  const uint32_t user = peer_user(socket);
  if (user == ::geteuid()) return socket;
  other_user_ = user;
  problem = format_text("a process of user {} listens where the ranks of this host meet", user);
  return {};
}

std::string HostMeeting::listen_for_hosts(Endpoint at) {
  at.set_port(0);
  hosts_ = listen_at(at, SOMAXCONN);
  return hosts_ ? Endpoint::local(hosts_).text() : std::string();
}

std::span<const Fd> HostMeeting::open() {
  if (socket_ && ::listen(socket_.get(), SOMAXCONN) == 0) listeners_.push_back(std::move(socket_));
  if (hosts_) listeners_.push_back(std::move(hosts_));
  return listeners_;
}

void HostMeeting::close() noexcept {
  socket_.reset();
  hosts_.reset();
  listeners_.clear();
}

namespace {

using namespace std::chrono_literals;
constexpr auto connect_time = 3s;    // limit for one try
constexpr auto proof_time = 15s;     // limit for one try: the acceptor may first have to drop strangers to make room
constexpr auto least_try = 1s;       // a shorter try would tell nothing about rank 0
constexpr auto host_patience = 60s;  // time that this rank waits for the first rank of its host
constexpr auto tcp_patience = 1s;    // time after the timeout in which rank 0 names the missing ranks
constexpr useconds_t zero_pause_us = 50'000, host_pause_us = 10'000;

}  // namespace

TcpVisit::TcpVisit(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                   const MakeCard &make_card)
    : options_(options),
      point_(point),
      waiter_(waiter),
      make_card_(make_card),
      since_(Clock::now()),
      deadline_(since_ + std::chrono::milliseconds(options.timeout_ms)),
      label_(rendezvous_label(options)),
      host_id_(host_id_of(options)),
      last_problem_("no process listens there"),
      host_meeting_(options, host_id_) {}

Assembly TcpVisit::run() {
  for (;;) {
    alone_ = alone_ || host_is_late();
    const bool goes = alone_ || host_meeting_.take();
    if (auto assembly = goes ? visit_zero() : visit_host()) return std::move(*assembly);
    if (Clock::now() >= deadline_) give_up();
    waiter_.poll();
    ::usleep(goes ? zero_pause_us : host_pause_us);
  }
}

// The process that has bound the host's name may be stopped, may hang, or may be a stranger. After a while this rank
// goes to rank 0 on its own.
bool TcpVisit::host_is_late() const {
  return Clock::now() - since_ >=
         std::min<Clock::duration>(std::chrono::milliseconds(options_.timeout_ms) / 3, host_patience);
}

void TcpVisit::give_up() const {
  fail_rank(FSDP_TIMEOUT, 0, "rank {} has not found rank 0 at the rendezvous '{}' within {} ms: {}", options_.rank,
            options_.rendezvous, options_.timeout_ms, last_problem_);
}

// Keeps the problem of an earlier try if the deadline ended this try soon after its beginning, because the earlier
// problem tells more about rank 0.
void TcpVisit::note_problem(std::string problem) {
  const bool cut_short = Clock::now() >= deadline_ && deadline_ - tried_ < least_try;
  if (found_problem_ && cut_short) return;
  found_problem_ = true;
  last_problem_ = std::move(problem);
}

// -- ways up --

// A stranger that has bound the host's name cannot keep this rank from reaching rank 0, because this rank then goes
// there alone.
std::optional<Assembly> TcpVisit::visit_host() {
  std::string problem;
  Fd socket = host_meeting_.visit(problem);
  alone_ = alone_ || host_meeting_.other_user().has_value();
  if (!socket) {
    last_problem_ = problem;
    return {};
  }
  return visit(std::move(socket), "the rank of this host that has come first", {});
}

std::optional<Assembly> TcpVisit::visit_zero() {
  tried_ = Clock::now();
  for (const Endpoint &place : places()) {
    if (auto assembly = visit_place(place, {})) return assembly;
    while (const auto elsewhere = std::exchange(redirect_, {})) {
      const Endpoint next = parse_address(elsewhere->address);
      check_guarded(next, options_);
      if (auto assembly = visit_place(next, {elsewhere->rank, elsewhere->host})) return assembly;
      if (!redirect_)
        last_problem_ =
            format_text("rank 0 has sent it to rank {} on {}, and {}", elsewhere->rank, elsewhere->host, last_problem_);
    }
  }
  return {};
}

// The places are looked up again at each try, because a name may get another address, and the file may be replaced.
std::vector<Endpoint> TcpVisit::places() {
  std::string problem;
  auto found = point_.kind == MeetingPoint::Scheme::tcp
                   ? find_host(point_, options_, names_, {deadline_, waiter_}, problem)
                   : read_notice(notice_path(point_, options_), problem);
  if (found.empty()) note_problem(problem);
  for (const Endpoint &place : found) check_guarded(place, options_);  // another user may have written the file
  return found;
}

Fd TcpVisit::connect(const Endpoint &place) {
  std::string problem;
  Fd socket = connect_to(place, limit(connect_time), problem);
  if (!socket && place.loopback())
    problem += format_text(
        " (a loopback address leads to rank 0 only within its host and network namespace; this rank's is {})",
        network_namespace());
  if (!socket) note_problem(problem);
  if (socket) notice_silence(socket, options_.heartbeat_timeout_ms);
  return socket;
}

std::optional<Assembly> TcpVisit::visit_place(const Endpoint &place, Above above) {
  Fd socket = connect(place);
  if (!socket) return {};
  return visit(std::move(socket), place.text(), above);
}

std::optional<FrameStream> TcpVisit::prove_on(Fd socket, const std::string &place) {
  StreamKeys keys;
  const std::string problem = prove(socket, Role::guest, options_.secret, label_, limit(proof_time), &keys);
  if (problem.empty()) return FrameStream(std::move(socket), message::longest, keys);
  note_problem(format_text("{}: {}", place, problem));
  return {};
}

std::optional<Assembly> TcpVisit::visit(Fd socket, const std::string &place, const Above &above) {
  const Endpoint here = Endpoint::local(socket);
  auto stream = prove_on(std::move(socket), place);
  if (!stream) return {};
  auto uplink = std::make_unique<Uplink>(options_, std::move(*stream), above,
                                         here.family() == AF_UNIX ? std::string() : here.address(), deadline_, waiter_);
  try {
    say_hello(*uplink, here);
    if (!await_start(*uplink)) return {};
  } catch (const Error &error) {
    throw uplink->settle(error);
  }
  Assembly assembly{uplink->take_roster(), uplink->session(), {}};
  assembly.watch = std::move(uplink);
  return assembly;
}

// -- joining --

// Sends this rank's number before it makes its card, which takes time. If the rank dies before it has sent the card,
// rank 0 knows which rank died.
void TcpVisit::say_hello(Uplink &uplink, const Endpoint &here) {
  const bool crowded = options_.size > join_degree && host_meeting_.taken();
  uplink.say(message::Hello{wire_version, options_.rank, library_version});
  uplink.say(message::Join{options_.rank, options_.size, options_.attempt, host_id_, host_name(),
                           crowded ? host_meeting_.listen_for_hosts(here) : std::string()});
  uplink.serve();
}

void TcpVisit::say_card(Uplink &uplink) {
  if (!card_) card_ = message::Card{options_.rank, card_of(make_card_, uplink.address())};
  uplink.say(*card_);
  for (const uint32_t rank : options_.stand_ins) {
    uplink.say(message::Join{rank, options_.size, options_.attempt, host_id_, host_name()});
    uplink.say(message::Card{rank, card_->bytes});
  }
}

// Returns false if this rank must try again, perhaps at another rank: it was told to, or the first rank of its host is
// late.
bool TcpVisit::await_start(Uplink &uplink) {
  bool said = false, open = false;
  while (!uplink.started() || !uplink.passed_on()) {
    if (!uplink.address().empty() && !std::exchange(said, true)) say_card(uplink);
    uplink.serve();
    waiter_.poll();
    if (uplink.again() || uplink.redirect() || (uplink.by_host() && !uplink.admitted() && host_is_late())) {
      last_problem_ = uplink.again().value_or("");
      redirect_ = uplink.redirect();
      uplink.leave();
      return false;
    }
    if (uplink.admitted() && !std::exchange(open, true)) uplink.open(host_meeting_.open(), label_);
    if (Clock::now() >= deadline_ + tcp_patience)
      fail(FSDP_TIMEOUT, "rendezvous '{}': rank 0 has not sent the start of the job to rank {} within {} ms",
           options_.rendezvous, options_.rank, options_.timeout_ms);
  }
  host_meeting_.close();
  return true;
}

}  // namespace fsdp::membership
