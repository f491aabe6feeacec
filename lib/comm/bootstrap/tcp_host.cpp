// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/tcp_host.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/slice.h"
#include "comm/bootstrap/version.h"

namespace fsdp::comm {
namespace {

constexpr uint32_t most_notes = 32;

using namespace std::chrono_literals;

// Who has not joined costs no more than this; the rest waits in the kernel's queue. Where all places are taken, who has
// proven nothing for a while makes room, so that silent strangers do not keep the ranks out.
constexpr size_t most_tcp_guests = 256;
constexpr auto tcp_guest_time = 10s;
constexpr auto least_time = 500ms;
constexpr auto tcp_descriptor_time = 12s;  // without one for anybody: longer than any stranger keeps his

}  // namespace

TcpHost::TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                 const MakeCard &make_card)
    : options_(options),
      point_(point),
      waiter_(waiter),
      make_card_(make_card),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      label_(rendezvous_label(options)) {}

Assembly TcpHost::run() {
  door_ = std::make_unique<TcpDoor>(options_, point_, waiter_, deadline_, names_);
  vigil_ = std::make_unique<HostVigil>(options_.size, deadline_, waiter_);
  try {
    gather();
    Assembly assembly{make_roster(), make_nonce(), {}};
    door_.reset();
    guests_.clear();
    send_roster(assembly);
    assembly.vigil = std::move(vigil_);
    return assembly;
  } catch (const Error &error) {
    const Error end = vigil_->settle(error);
    say_farewell(end);
    throw end;
  }
}

void TcpHost::gather() {
  Party &self = vigil_->parties()[0];
  self.taken = true;
  self.host_id = options_.host_id.empty() ? host_identity() : options_.host_id;
  self.host = host_name();
  self.card = card_of(make_card_, door_->address());
  while (!complete()) {
    look_around();
    check_limits();
    waiter_.poll();
  }
}

bool TcpHost::complete() const {
  const auto &parties = vigil_->parties();
  return std::all_of(parties.begin(), parties.end(), [](const Party &party) { return party.card.has_value(); });
}

bool TcpHost::has_room() { return guests_.size() < most_tcp_guests || drop_stranger(); }

bool TcpHost::drop_stranger() {
  const auto oldest = std::find_if(guests_.begin(), guests_.end(), [](const Guest &guest) { return !guest.proven(); });
  if (oldest == guests_.end() || Clock::now() - oldest->since < least_time) return false;
  guests_.erase(oldest);
  return true;
}

// Sleeps until something happens, then hears everybody.
void TcpHost::look_around() {
  std::vector<pollfd> polls;
  if (has_room()) door_->add_polls(polls);
  for (const Guest &guest : guests_) polls.push_back({guest.stream.socket().get(), POLLIN, 0});
  for (const Party &party : vigil_->parties())
    if (party.stream && party.watched && !end_) polls.push_back({party.stream.socket().get(), POLLIN, 0});
  ::poll(polls.data(), polls.size(), slice_ms);
  const auto now = Clock::now();
  std::erase_if(guests_, [&](Guest &guest) { return !hear(guest) || now - guest.since >= tcp_guest_time; });
  accept_guests();
}

void TcpHost::accept_guests() {
  while (has_room()) {
    Fd socket = door_->accept();
    if (!socket) {
      if (!door_->pause().over()) drop_stranger();
      return;
    }
    guests_.push_back({FrameStream(std::move(socket), message::longest), Handshake(Role::host, options_.secret, label_),
                       Clock::now()});
    if (!hear(guests_.back())) guests_.pop_back();  // sends the challenge
  }
}

// What is not expected ends the connection; a rank that was right tries again.
bool TcpHost::hear(Guest &guest) {
  if (!guest.proven() && guest.proof.advance(guest.stream.socket()) != Handshake::State::proven) {
    if (guest.proof.state() == Handshake::State::waiting) return true;
    if (guest.proof.state() == Handshake::State::failed)
      note("somebody who came to the rendezvous", guest.proof.problem(), false);
    if (guest.proof.of_another_version()) stranger_remark_ = "; of somebody who came: " + guest.proof.problem();
    return false;
  }
  if (!guest.welcomed) {
    guest.welcomed = true;
    guest.stream.guard(guest.proof.keys());
    guest.since = Clock::now();  // a slow handshake must not cost the time to join
  }
  while (auto frame = guest.stream.receive()) {
    auto parsed = message::parse(frame->kind, frame->body);
    const auto *hello = std::get_if<message::Hello>(&parsed.message);
    if (hello && greet(guest, *hello)) continue;
    auto *words = std::get_if<message::Join>(&parsed.message);
    if (words && guest.introduced) join(guest, *words);
    return false;
  }
  if (guest.stream.code() == EBADMSG)
    turn_away(
        guest, FSDP_PEER_FAILED,
        changed_contact(format_text("rank 0 (host {})", host_name()), "who connects", guest.stream.problem()).message);
  return guest.stream.open();
}

// What follows may be of another form if the libraries are not the same.
bool TcpHost::greet(Guest &guest, const message::Hello &hello) {
  const std::string difference = compare_versions(hello.rank, hello.wire_version, hello.library, 0);
  guest.introduced = difference.empty();
  if (!guest.introduced) turn_away(guest, FSDP_MISMATCH, difference);
  return guest.introduced;
}

// Who knocks without end fills no log, and leaves room for those that belong here.
void TcpHost::note(const std::string &who, const std::string &why, bool proven) {
  uint32_t &notes = proven ? notes_ : stranger_notes_;
  if (options_.log && notes++ < most_notes) options_.log(FSDP_LOG_WARNING, format_text("refused {}: {}", who, why));
}

void TcpHost::turn_away(Guest &guest, fsdp_status status, const std::string &text) {
  note("a process that knows the secret", text, true);
  refuse(guest, status, text);
}

void TcpHost::refuse(Guest &guest, fsdp_status status, const std::string &text, int32_t rank) {
  guest.stream.queue(message::share(message::Refusal{status, rank, text}));
  guest.stream.flush();  // so few bytes fit into any socket's buffer
}

void TcpHost::join(Guest &guest, message::Join &join) {
  const auto wrong = [&](fsdp_status status, const std::string &text) { turn_away(guest, status, text); };
  if (join.attempt < options_.attempt)
    return wrong(FSDP_PEER_FAILED, format_text("rank 0 has begun attempt {} of this job, rank {} is of attempt {}",
                                               options_.attempt, join.rank, join.attempt));
  if (join.attempt > options_.attempt) {
    wrong(FSDP_OK, "rank 0 is still of an earlier attempt");
    outdated_ = true;
    if (end_) return;
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(join.rank),
              "rank {} has begun attempt {} of this job, rank 0 is of attempt {}", join.rank, join.attempt,
              options_.attempt);
  }
  if (join.world_size != options_.size)
    return wrong(FSDP_MISMATCH, format_text("rank {} says that the world has {} ranks, rank 0 says {}", join.rank,
                                            join.world_size, options_.size));
  if (join.rank >= options_.size)
    return wrong(FSDP_INVALID_ARGUMENT, format_text("rank {} is outside [0, {})", join.rank, options_.size));
  Party &party = vigil_->parties()[join.rank];
  if (party.taken)
    return wrong(FSDP_INVALID_ARGUMENT,
                 format_text("another process is rank {} already, on {}", join.rank, party.host));
  if (end_) {
    told_count_ += told_.contains(join.rank) ? 0 : 1;
    told_.add(join.rank);
    const auto word = report_of(*end_, 0);
    return refuse(guest, word.status, word.text, word.rank);
  }
  notice_silence(guest.stream.socket(), options_.heartbeat_timeout_ms);
  party = {std::move(guest.stream), std::move(join.host_id), std::move(join.host), {}, true, true};
}

std::vector<uint32_t> TcpHost::missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < options_.size; ++r)
    if (!vigil_->parties()[r].card) ranks.push_back(r);
  return ranks;
}

void TcpHost::check_limits() {
  const std::vector<uint32_t> ranks = missing();
  const std::string problem = door_->pause().problem();
  if (ranks.empty()) return;
  if (door_->pause().lasts(tcp_descriptor_time))
    fail(FSDP_SYSTEM, "rank 0 cannot take the connections of {}: {}", rank_list(ranks), problem);
  if (Clock::now() < deadline_) return;
  fail_rank(FSDP_TIMEOUT, static_cast<int32_t>(ranks.front()),
            "{} {} not come to the rendezvous '{}', where rank 0 listened at {}, within {} ms{}{}{}", rank_list(ranks),
            ranks.size() == 1 ? "has" : "have", options_.rendezvous, door_->text(), options_.timeout_ms,
            stranger_remark_, problem.empty() ? "" : "; rank 0 could not take more connections: ", problem);
}

// To ranks that come now. An interrupted hook ends it.
void TcpHost::say_farewell(const Error &error) noexcept {
  if (!door_) return;
  try {
    end_ = error;
    const auto end = Clock::now() + std::chrono::milliseconds(options_.farewell_ms);
    const size_t count = missing().size();
    while (Clock::now() < end && told_count_ < count) look_around();
    dismiss_guests();
  } catch (...) {  // no memory: they will not find rank 0
  }
}

// Who has proven the secret and is about to join would take the end of its connection for the death of rank 0.
void TcpHost::dismiss_guests() {
  const auto word = report_of(*end_, 0);
  for (Guest &guest : guests_) {
    if (!guest.proven()) continue;
    if (outdated_)
      refuse(guest, FSDP_OK, "rank 0 was of an earlier attempt");
    else
      refuse(guest, word.status, word.text, word.rank);
  }
}

Roster TcpHost::make_roster() {
  auto &parties = vigil_->parties();
  std::vector<std::string> ids;
  for (const Party &party : parties) ids.push_back(party.host_id);
  const auto nodes = number_nodes(ids);
  Roster roster;
  std::vector<uint32_t> counts(options_.size);
  for (uint32_t r = 0; r < options_.size; ++r) {
    if (++counts[nodes[r]] > most_ranks_of_a_host)
      fail(FSDP_UNSUPPORTED, "more than {} ranks on {}; this release has no more on one host", most_ranks_of_a_host,
           parties[r].host);
    roster.members.push_back({nodes[r], parties[r].host, std::move(*parties[r].card)});
  }
  return roster;
}

// Who does not take it because it died is found by the vigil.
void TcpHost::send_roster(const Assembly &assembly) {
  std::vector<message::Entry> entries;
  for (uint32_t r = 0; r < options_.size; ++r) {
    const Member &member = assembly.roster.members[r];
    entries.push_back({r, member.node, member.host, member.card});
  }
  auto frames = message::share_entries(std::move(entries));
  frames.push_back(message::share(message::Start{options_.size, assembly.session}));
  for (Party &party : vigil_->parties())
    if (party.stream)
      for (const SharedFrame &frame : frames) party.stream.queue(frame);
  for (;;) {
    std::vector<pollfd> polls;
    for (Party &party : vigil_->parties())
      if (party.stream && !party.stream.flush() && party.stream.open())
        polls.push_back({party.stream.socket().get(), POLLOUT, 0});
    if (polls.empty()) return;
    if (Clock::now() >= deadline_) fail(FSDP_TIMEOUT, "{} ranks do not read what rank 0 sends", polls.size());
    waiter_.poll();
    ::poll(polls.data(), polls.size(), slice_ms);
  }
}

}  // namespace fsdp::comm
