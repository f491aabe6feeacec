// SPDX-License-Identifier: Apache-2.0
#include "membership/join/process_links.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "membership/liveness/deaths.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

Doors make_doors() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) fail_errno(errno, "the mailbox of this rank");
  Doors doors{Fd(pair[0]), Fd(pair[1]), Fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)))};
  if (!doors.process) fail_errno(errno, "pidfd_open of this process");  // close-on-exec by itself
  return doors;
}

ProcessLinks::ProcessLinks(uint32_t rank, Fd inbox, std::vector<PeerDoors> peers)
    : rank_(rank), inbox_(std::move(inbox)), peers_(std::move(peers)) {
  for (const PeerDoors &peer : peers_) {
    polls_.push_back({peer.process.get(), POLLIN, 0});
    poll_ranks_.push_back(peer.rank);
  }
}

const PeerDoors *ProcessLinks::find(uint32_t rank) const noexcept {
  const auto peer = std::ranges::lower_bound(peers_, rank, {}, &PeerDoors::rank);
  return peer != peers_.end() && peer->rank == rank ? &*peer : nullptr;
}

bool ProcessLinks::send(uint32_t to_rank, Parcel parcel, const Fd &file) {
  const PeerDoors *peer = find(to_rank);
  if (!peer || !peer->outbox) fail(FSDP_INTERNAL, "a descriptor for rank {}, which is not on this host", to_rank);
  const int files[] = {file.get()};
  // A broken mailbox is a dead peer: who waits for it finds that out.
  return send_packet(peer->outbox, &parcel, sizeof parcel, files) != Sent::full;
}

void ProcessLinks::read_inbox() {
  while (auto packet = receive_packet(inbox_)) {
    if (packet->bytes == 0 && packet->file_count == 0) return;  // all peers have ended
    Parcel parcel;
    if (packet->bytes != sizeof parcel || packet->file_count != 1) continue;
    std::memcpy(&parcel, packet->data, sizeof parcel);
    arrived_.emplace_back(parcel, std::move(packet->files[0]));
  }
}

std::optional<Fd> ProcessLinks::take(Parcel parcel) {
  read_inbox();
  const auto found =
      std::find_if(arrived_.begin(), arrived_.end(), [&](const auto &entry) { return entry.first == parcel; });
  if (found == arrived_.end()) return {};
  Fd file = std::move(found->second);
  arrived_.erase(found);
  return file;
}

void ProcessLinks::sleep(uint32_t ms) { await_readable(inbox_, static_cast<int>(ms)); }

void ProcessLinks::find_dead(const std::function<void(uint32_t)> &found) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || ::poll(polls_.data(), polls_.size(), 0) <= 0) return;
  for (size_t i = 0; i < polls_.size(); ++i)
    if (polls_[i].revents) found(poll_ranks_[i]);
}

bool ProcessLinks::dumps_core(uint32_t rank) const noexcept {
  const PeerDoors *peer = find(rank);
  return peer && is_dumping_core(peer->process);
}

std::optional<Fd> ProcessLinks::meet(Parcel parcel, std::span<const uint32_t> ranks,
                                     const std::function<Fd()> &create) {
  if (ranks[0] != rank_) return take(parcel);
  Fd file = create();
  for (const uint32_t to : ranks.subspan(1)) {
    // Mailboxes hold hundreds of packets, and a rank is at most one ahead: full ones are out of the ordinary.
    for (int tries = 0; !send(to, parcel, file); ++tries) {
      if (tries == 1000) fail(FSDP_SYSTEM, "the mailbox of rank {} is full", to);
      ::usleep(1000);
    }
  }
  return file;
}

}  // namespace fsdp::membership
