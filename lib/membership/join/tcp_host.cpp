// SPDX-License-Identifier: Apache-2.0
#include "membership/join/tcp_host.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "base/failure.h"

namespace fsdp::membership {
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
  admission_ = std::make_unique<Admission>(options_, door_->listeners(), label_);
  vigil_ = std::make_unique<HostVigil>(options_.size, deadline_, waiter_,
                                       [this](Branch &branch, message::Join &join) { admit(branch, join); });
  try {
    gather();
    Assembly assembly{make_roster(), make_nonce(), {}};
    admission_.reset();
    door_.reset();
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
  vigil_->take(0, host_id_of(options_), host_name());
  const std::vector<std::byte> card = card_of(make_card_, door_->address());
  vigil_->set_card(0, card);
  for (const uint32_t rank : options_.stand_ins) {
    vigil_->take(rank, host_id_of(options_), host_name());
    vigil_->set_card(rank, card);
  }
  while (!vigil_->complete()) {
    look_around();
    check_limits();
    waiter_.poll();
  }
}

// Sleeps until something happens, then hears ranks that want to join; the vigil hears those that have.
void TcpHost::look_around() {
  std::vector<pollfd> polls;
  admission_->add_polls(polls);
  if (!end_) vigil_->branches().add_polls(polls);
  ::poll(polls.data(), polls.size(), slice_ms);
  admission_->look([this](FrameStream &stream, message::Join &join) { admit(stream, join); });
  vigil_->branches().flush();
}

std::optional<message::Refusal> TcpHost::check(const message::Join &join) {
  if (join.attempt < options_.attempt)
    return message::Refusal{FSDP_PEER_FAILED, -1,
                            format_text("rank 0 has begun attempt {} of this job, rank {} is of attempt {}",
                                        options_.attempt, join.rank, join.attempt)};
  if (join.attempt > options_.attempt) {
    outdated_ = true;
    return message::Refusal{FSDP_OK, -1, "rank 0 is still of an earlier attempt"};
  }
  if (join.world_size != options_.size)
    return message::Refusal{FSDP_MISMATCH, -1,
                            format_text("rank {} says that the world has {} ranks, rank 0 says {}", join.rank,
                                        join.world_size, options_.size)};
  if (join.rank >= options_.size)
    return message::Refusal{FSDP_INVALID_ARGUMENT, -1,
                            format_text("rank {} is outside [0, {})", join.rank, options_.size)};
  const Party &party = vigil_->parties()[join.rank];
  if (party.taken)
    return message::Refusal{FSDP_INVALID_ARGUMENT, -1,
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
    auto word = report_of(*end_, 0);
    word.party = -1;
    return refuse(stream, word);
  }
  if (const auto elsewhere = vigil_->branches().redirect(Endpoint::peer(stream.socket()).loopback())) {
    stream.queue(message::share(*elsewhere));
    stream.flush();
    return;
  }
  notice_silence(stream.socket(), options_.heartbeat_timeout_ms);
  Branch &branch = vigil_->branches().add(std::move(stream), join, true);
  vigil_->take(join.rank, std::move(join.host_id), std::move(join.host));
  branch.stream.queue(message::share(message::Admitted{0, vigil_->parties()[0].host}));
}

// Let in by another rank, who passes on what it is told.
void TcpHost::admit(Branch &branch, message::Join &join) {
  if (auto wrong = check(join)) {
    admission_->note_refusal(format_text("rank {} on {}", join.rank, join.host), wrong->text);
    wrong->party = static_cast<int32_t>(join.rank);
    return branch.stream.queue(message::share(*wrong));
  }
  branch.ranks.push_back(join.rank);
  vigil_->take(join.rank, std::move(join.host_id), std::move(join.host));
}

std::vector<uint32_t> TcpHost::missing() const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < options_.size; ++r)
    if (!vigil_->parties()[r].card) ranks.push_back(r);
  return ranks;
}

void TcpHost::check_limits() {
  const bool over = Clock::now() >= deadline_, deaf = admission_->pause().lasts(Acceptor::shortage_time);
  if (vigil_->complete() || (!over && !deaf)) return;
  const std::vector<uint32_t> ranks = missing();
  const std::string problem = admission_->pause().problem();
  if (deaf) fail(FSDP_SYSTEM, "rank 0 cannot take the connections of {}: {}", rank_list(ranks), problem);
  fail_rank(FSDP_TIMEOUT, static_cast<int32_t>(ranks.front()),
            "{} {} not come to the rendezvous '{}', where rank 0 listened at {}, within {} ms{}{}{}", rank_list(ranks),
            ranks.size() == 1 ? "has" : "have", options_.rendezvous, door_->text(), options_.timeout_ms,
            admission_->remark(), problem.empty() ? "" : "; rank 0 could not take more connections: ", problem);
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

void TcpHost::dismiss_guests() {
  auto word = report_of(*end_, 0);
  word.party = -1;
  admission_->dismiss(outdated_ ? message::Refusal{FSDP_OK, -1, "rank 0 was of an earlier attempt"} : word);
}

Roster TcpHost::make_roster() {
  auto &parties = vigil_->parties();
  std::vector<std::string> ids;
  ids.reserve(options_.size);
  for (const Party &party : parties) ids.push_back(party.host_id);
  if (const std::string split = describe_split_host(ids); !split.empty() && options_.log)
    options_.log(FSDP_LOG_WARNING, split);
  const auto nodes = number_nodes(ids);
  Roster roster;
  std::vector<uint32_t> counts(options_.size);
  for (uint32_t r = 0; r < options_.size; ++r) {
    if (++counts[nodes[r]] > most_ranks_of_a_host)
      fail(FSDP_UNSUPPORTED, "more than {} ranks on {}; this release has no more on one host", most_ranks_of_a_host,
           parties[r].host);
    roster.add({r, nodes[r], parties[r].host, *parties[r].card});
    parties[r].card->clear();
    parties[r].card->shrink_to_fit();
  }
  return roster;
}

// Who does not take it because it died is found by the vigil.
void TcpHost::send_roster(const Assembly &assembly) {
  Branches &branches = vigil_->branches();
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
