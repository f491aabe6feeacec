// SPDX-License-Identifier: Apache-2.0

#include "membership/join/guest.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/failure.h"
#include "membership/job.h"
#include "membership/join/forming_watch.h"
#include "membership/join/rank_links.h"
#include "membership/join/roster.h"

namespace fsdp::membership {

namespace {

using namespace std::chrono_literals;
constexpr auto patience = 1s;  // time after the timeout in which the leader names the missing ranks

}  // namespace

Visit::Visit(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter)
    : options_(options),
      rank_count_(ranks.size()),
      leader_(static_cast<int32_t>(ranks[0])),
      waiter_(waiter),
      deadline_(Clock::now() + std::chrono::milliseconds(options.timeout_ms)),
      last_problem_(
          format_text("no process listens there; is rank {} running, with the same rendezvous and job secret, and "
                      "in this rank's network namespace ({})?",
                      ranks[0], network_namespace())) {}

Rendezvous Visit::run() {
  while (!connect() || !authenticate()) pause();
  open_descriptors();
  join();
  return await_start();
}

void Visit::pause() {
  if (Clock::now() >= deadline_)
    fail_rank(FSDP_TIMEOUT, leader_, "rank {} has not come to the rendezvous '{}' within {} ms: {}", leader_,
              options_.rendezvous, options_.timeout_ms, last_problem_);
  waiter_.poll();
  ::usleep(10'000);
}

bool Visit::connect() {
  socket_ = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) fail_errno(errno, "the socket of the rendezvous");
  const Address address(options_);
  if (::connect(socket_.get(), address.get(), address.length()) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return false;
    fail_errno(errno, format_text("connecting to the rendezvous '{}'", options_.rendezvous));
  }
  const uint32_t user = peer_user(socket_);
  if (user == ::geteuid()) return true;
  last_problem_ = format_text("a process of user {} listens there", user);
  return false;
}

Packet Visit::hear(Clock::time_point deadline, const char *waiting_for) {
  for (;;) {
    if (auto packet = receive_packet(socket_)) return std::move(*packet);
    if (Clock::now() >= deadline)
      fail_rank(FSDP_TIMEOUT, leader_, "rendezvous '{}': rank {} has not sent {} within {} ms", options_.rendezvous,
                leader_, waiting_for, options_.timeout_ms);
    waiter_.poll();
    await_readable(socket_, slice_ms);
  }
}

bool Visit::authenticate() {
  const Packet first = hear(deadline_, "its challenge");
  wire::PacketHead head{};
  if (first.bytes >= sizeof head) std::memcpy(&head, first.data, sizeof head);
  if (!std::memcmp(head.magic, wire::magic, sizeof wire::magic) && head.version != wire::version)
    fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(options_.rank),
              "rank {} speaks version {} of the bootstrap, the library of rank {} speaks version {}", leader_,
              head.version, options_.rank, wire::version);
  const auto challenge = first.as<wire::Challenge>();
  if (!challenge) return false;
  auto answer = wire::make<wire::Answer>();
  answer.nonce = make_nonce();
  answer.digest = wire::guest_digest(options_.secret, challenge->nonce, answer.nonce);
  if (send_packet(socket_, &answer, sizeof answer) != Sent::yes) return false;
  const auto proof = hear(deadline_, "its proof").as<wire::Proof>();
  if (proof && equal(proof->digest, wire::host_digest(options_.secret, challenge->nonce, answer.nonce))) return true;
  last_problem_ = "the process that listens there has another job secret";
  return false;
}

// On failure this rank tells the leader the reason. Otherwise the leader, and all other ranks, would wait for this rank
// until the timeout.
void Visit::open_descriptors() {
  try {
    check_kernel();
    descriptors_ = make_descriptors();
  } catch (const Error &error) {
    auto packet = wire::make<wire::ReportPacket>();
    packet.report = {accusation_of(error, options_.rank), static_cast<int32_t>(options_.rank)};
    send_packet(socket_, &packet, sizeof packet);
    throw;
  }
}

void Visit::join() {
  auto join = wire::make<wire::JoinPacket>();
  join.rank = options_.rank;
  join.world_size = options_.size;
  join.wire_version = wire_version;
  join.library.set(library_version);
  const int files[] = {descriptors_.process.get(), descriptors_.outbox.get()};
  send_packet(socket_, &join, sizeof join, files);  // if sending fails, hear() finds the end of the connection
}

void Visit::throw_ending(const Packet &packet) const {
  if (const auto told = packet.as<wire::VerdictPacket>();
      told && is_believable(told->verdict.accusation, options_.size))
    throw error_of(told->verdict.accusation, options_.rank);
  const auto refused = packet.as<wire::RefusedPacket>();
  if (!refused) return;
  throw Error(refused->status == FSDP_OK ? FSDP_INTERNAL : refused->status, refused->text.copy(), refused->rank);
}

Rendezvous Visit::await_start() {
  std::vector<PeerDescriptors> peers;
  for (;;) {
    Packet packet = hear(deadline_ + patience, "the start of the job");
    if (packet.bytes == 0)
      fail_rank(FSDP_PEER_FAILED, leader_, "rendezvous '{}': rank {} ended before the job had formed",
                options_.rendezvous, leader_);
    throw_ending(packet);
    const auto peer = packet.as<wire::PeerPacket>();
    const bool next = peer && (peers.empty() || peer->rank > peers.back().rank);  // they arrive in the order of ranks
    if (next && peer->rank < options_.size && peer->rank != options_.rank && packet.file_count == 2) {
      peers.push_back({peer->rank, std::move(packet.files[0]), std::move(packet.files[1])});
      continue;
    }
    if (!packet.as<wire::StartPacket>() || packet.file_count != 1 || peers.size() != rank_count_ - 1)
      fail_rank(FSDP_SYSTEM, leader_, "rendezvous '{}': a message of rank {} came incomplete (see ulimit -n)",
                options_.rendezvous, leader_);
    return {std::move(packet.files[0]),
            std::make_unique<ProcessLinks>(options_.rank, std::move(descriptors_.inbox), std::move(peers)),
            {},
            {},
            {}};
  }
}

}  // namespace fsdp::membership
