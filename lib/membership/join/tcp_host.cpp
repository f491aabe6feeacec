// SPDX-License-Identifier: Apache-2.0

#include "membership/join/tcp_host.h"

#include <poll.h>
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
constexpr auto tcp_bind_time = 5s;  // time for another job that is forming or ending to free the port

bool is_local_name(const std::string &host) { return host == "localhost" || host.ends_with(".localhost"); }

}  // namespace

RendezvousListener::RendezvousListener(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
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

std::vector<Endpoint> RendezvousListener::find_places(Clock::time_point deadline, NameLookup &names) {
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

// Listens at the first address that belongs to an interface. If there is none, errno is the error of the last address.
bool RendezvousListener::open(const std::vector<Endpoint> &places) {
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

// Needed if the name is a loopback address on this host, because Debian writes a host's own name into /etc/hosts. On
// other hosts the name has another address, at which no rank would listen.
void RendezvousListener::open_outer() {
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

std::string RendezvousListener::text() const {
  std::string text = ends_.front().text() + remark_;
  if (ends_.back().loopback())
    text += format_text(" (only for its host and network namespace, {})", network_namespace());
  return text;
}

TcpHost::TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                 const MakeCard &make_card)
    : options_(options),
      point_(point),
      waiter_(waiter),
      make_card_(make_card),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      label_(rendezvous_label(options)) {}

Assembly TcpHost::run() {
  listener_ = std::make_unique<RendezvousListener>(options_, point_, waiter_, deadline_, names_);
  admission_ = std::make_unique<Admission>(options_, listener_->listeners(), label_, std::move(events_));
  watch_ = std::make_unique<RootFormingWatch>(options_.size, deadline_, waiter_,
                                              [this](Branch &branch, message::Join &join) { admit(branch, join); });
  try {
    gather();
    Assembly assembly{make_roster(), make_nonce(), {}};
    admission_.reset();
    listener_.reset();
    send_roster(assembly);
    assembly.watch = std::move(watch_);
    return assembly;
  } catch (const Error &error) {
    const Error end = watch_->settle(error);
    say_farewell(end);
    throw end;
  }
}

void TcpHost::gather() {
  watch_->take(0, host_id_of(options_), host_name());
  const std::vector<std::byte> card = card_of(make_card_, listener_->address());
  watch_->set_card(0, card);
  for (const uint32_t rank : options_.stand_ins) {
    watch_->take(rank, host_id_of(options_), host_name());
    watch_->set_card(rank, card);
  }
  while (!watch_->complete()) {
    look_around();
    check_limits();
    waiter_.poll();
  }
}

// Sleeps until there is something to read, and then reads from the ranks that want to join. The watch reads from those
// that have joined.
void TcpHost::look_around() {
  std::vector<pollfd> polls;
  admission_->add_polls(polls);
  if (!end_) watch_->branches().add_polls(polls);
  ::poll(polls.data(), polls.size(), slice_ms);
  admission_->look([this](FrameStream &stream, message::Join &join) { admit(stream, join); });
  watch_->branches().flush();
}

std::optional<message::Refused> TcpHost::check(const message::Join &join) {
  if (join.attempt < options_.attempt)
    return message::Refused{FSDP_PEER_FAILED, -1,
                            format_text("rank 0 has begun attempt {} of this job, rank {} is of attempt {}",
                                        options_.attempt, join.rank, join.attempt)};
  if (join.attempt > options_.attempt) {
    outdated_ = true;
    return message::Refused{FSDP_OK, -1, "rank 0 is still of an earlier attempt"};
  }
  if (join.world_size != options_.size)
    return message::Refused{FSDP_MISMATCH, -1,
                            format_text("rank {} says that the world has {} ranks, rank 0 says {}", join.rank,
                                        join.world_size, options_.size)};
  if (join.rank >= options_.size)
    return message::Refused{FSDP_INVALID_ARGUMENT, -1,
                            format_text("rank {} is outside [0, {})", join.rank, options_.size)};
  const Party &party = watch_->parties()[join.rank];
  if (party.taken)
    return message::Refused{FSDP_INVALID_ARGUMENT, -1,
                            format_text("another process is rank {} already, on {}", join.rank, party.host)};
  return {};
}

void TcpHost::admit(FrameStream &stream, message::Join &join) {
  if (const auto wrong = check(join)) {
    admission_->turn_away(stream, *wrong);
    if (!outdated_ || end_) return;
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(join.rank),
              "rank {} has begun attempt {} of this job, rank 0 is of attempt {}", join.rank, join.attempt,
              options_.attempt);
  }
  if (end_) {
    told_count_ += told_.contains(join.rank) ? 0 : 1;
    told_.add(join.rank);
    return say_last(stream, Verdict{accusation_of(*end_, 0)});
  }
  if (const auto elsewhere = watch_->branches().redirect(Endpoint::peer(stream.socket()).loopback())) {
    stream.queue(message::share(*elsewhere));
    stream.flush();
    return;
  }
  notice_silence(stream.socket(), options_.heartbeat_timeout_ms);
  Branch &branch = watch_->branches().add(std::move(stream), join, true);
  watch_->take(join.rank, std::move(join.host_id), std::move(join.host));
  branch.stream.queue(message::share(message::Admitted{0, watch_->parties()[0].host}));
}

// Called for a rank that the rank of this branch has accepted. A refusal goes to the branch, which passes it on.
void TcpHost::admit(Branch &branch, message::Join &join) {
  if (auto wrong = check(join)) {
    admission_->note_refusal(format_text("rank {} on {}", join.rank, join.host), wrong->text);
    wrong->to = static_cast<int32_t>(join.rank);
    return branch.stream.queue(message::share(*wrong));
  }
  branch.ranks.push_back(join.rank);
  watch_->take(join.rank, std::move(join.host_id), std::move(join.host));
}

std::vector<uint32_t> TcpHost::missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < options_.size; ++r)
    if (!watch_->parties()[r].card) ranks.push_back(r);
  return ranks;
}

void TcpHost::check_limits() {
  const bool over = Clock::now() >= deadline_, deaf = admission_->pause().lasts(Acceptor::shortage_time);
  if (watch_->complete() || (!over && !deaf)) return;
  const std::vector<uint32_t> ranks = missing();
  const std::string problem = admission_->pause().problem();
  if (deaf) fail(FSDP_SYSTEM, "rank 0 cannot take the connections of {}: {}", rank_list(ranks), problem);
  fail_rank(FSDP_TIMEOUT, static_cast<int32_t>(ranks.front()),
            "{} {} not come to the rendezvous '{}', where rank 0 listened at {}, within {} ms{}{}{}", rank_list(ranks),
            ranks.size() == 1 ? "has" : "have", options_.rendezvous, listener_->text(), options_.timeout_ms,
            admission_->remark(), problem.empty() ? "" : "; rank 0 could not take more connections: ", problem);
}

// Sends the error to ranks that arrive from now on.
void TcpHost::say_farewell(const Error &error) noexcept {
  if (!listener_) return;
  try {
    end_ = error;
    const auto end = Clock::now() + std::chrono::milliseconds(options_.farewell_ms);
    const size_t count = missing().size();
    while (Clock::now() < end && told_count_ < count) look_around();
    dismiss_guests();
  } catch (...) {  // no memory: late ranks will not find rank 0
  }
}

void TcpHost::dismiss_guests() {
  if (outdated_)
    admission_->dismiss(message::Refused{FSDP_OK, -1, "rank 0 was of an earlier attempt"});
  else
    admission_->dismiss(Verdict{accusation_of(*end_, 0)});
}

Roster TcpHost::make_roster() {
  auto &parties = watch_->parties();
  std::vector<std::string> ids;
  ids.reserve(options_.size);
  for (const Party &party : parties) ids.push_back(party.host_id);
  if (const std::string split = describe_split_host(ids); !split.empty() && options_.log)
    options_.log(FSDP_LOG_WARNING, split);
  const auto nodes = number_nodes(ids);
  Roster roster;
  std::vector<uint32_t> counts(options_.size);
  for (uint32_t r = 0; r < options_.size; ++r) {
    if (++counts[nodes[r]] > max_ranks_of_a_host)
      fail(FSDP_UNSUPPORTED, "more than {} ranks on {}; this release has no more on one host", max_ranks_of_a_host,
           parties[r].host);
    roster.add({r, nodes[r], parties[r].host, *parties[r].card});
    parties[r].card->clear();
    parties[r].card->shrink_to_fit();
  }
  return roster;
}

// If a rank does not read the roster because it has died, the watch finds the death.
void TcpHost::send_roster(const Assembly &assembly) {
  Branches &branches = watch_->branches();
  for (const message::Entries &part : assembly.roster.parts()) branches.queue(message::share(part));
  branches.queue(message::share(message::Start{options_.size, assembly.session}));
  while (!branches.flush()) {
    std::vector<pollfd> polls;
    branches.add_polls(polls);
    if (Clock::now() >= deadline_) fail(FSDP_TIMEOUT, "some ranks do not read what rank 0 sends");
    waiter_.poll();
    ::poll(polls.data(), polls.size(), slice_ms);
  }
}

}  // namespace fsdp::membership
