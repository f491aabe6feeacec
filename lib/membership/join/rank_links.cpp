// SPDX-License-Identifier: Apache-2.0

#include "membership/join/rank_links.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/error.h"
#include "base/fd.h"
#include "membership/join/rendezvous.h"
#include "membership/liveness/control.h"
#include "membership/liveness/failure_detector.h"
#include "membership/wire/packet.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {

namespace {

Fd duplicate(const Fd &file) {
  Fd copy = file.duplicate();
  if (!copy) fail_errno(errno, "passing shared memory to another rank");
  return copy;
}

std::optional<Fd> take_from(std::vector<std::pair<Parcel, Fd>> &mailbox, const Parcel &parcel) {
  const auto found = std::ranges::find(mailbox, parcel, &std::pair<Parcel, Fd>::first);
  if (found == mailbox.end()) return {};
  Fd file = std::move(found->second);
  mailbox.erase(found);
  return file;
}

}  // namespace

LocalJob::LocalJob(uint32_t size)
    : size_(size), control_(Control::create(size, {size, true})), claimed_(size), mailboxes_(size) {}

void LocalJob::claim(uint32_t rank) {
  if (rank >= size_) fail(FSDP_INVALID_ARGUMENT, "rank {} is outside [0, {})", rank, size_);
  std::lock_guard lock(mutex_);
  if (claimed_[rank])
    fail(FSDP_INVALID_ARGUMENT,
         "rank {} of this local job has had a context before; create only one context for each rank of a local job",
         rank);
  claimed_[rank] = true;
}

void LocalJob::send(uint32_t to_rank, Parcel parcel, Fd file) {
  std::lock_guard lock(mutex_);
  mailboxes_[to_rank].emplace_back(parcel, std::move(file));
  arrived_.notify_all();
}

std::optional<Fd> LocalJob::take(uint32_t rank, Parcel parcel) {
  std::lock_guard lock(mutex_);
  return take_from(mailboxes_[rank], parcel);
}

// A parcel may have arrived between the caller's last look and this wait, so the wait has a short limit.
void LocalJob::sleep(uint32_t ms) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, std::chrono::milliseconds(std::min(ms, 2U)));
}

// The first rank to arrive creates the file. Each rank gets a copy of its descriptor; the last one gets the original.
Fd LocalJob::meet(Parcel parcel, size_t rank_count, const std::function<Fd()> &create) {
  std::lock_guard lock(mutex_);
  auto found = std::find_if(offered_files_.begin(), offered_files_.end(),
                            [&](const OfferedFile &offered) { return offered.parcel == parcel; });
  if (found == offered_files_.end()) {
    offered_files_.push_back({parcel, create(), 0});
    found = offered_files_.end() - 1;
  }
  if (found->taken + 1 < rank_count) {
    Fd file = duplicate(found->file);
    ++found->taken;
    return file;
  }
  Fd file = std::move(found->file);
  offered_files_.erase(found);
  return file;
}

bool LocalLinks::send(uint32_t to_rank, Parcel parcel, const Fd &file) {
  job_->send(to_rank, parcel, duplicate(file));
  return true;
}

RankDescriptors make_descriptors() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) fail_errno(errno, "the mailbox of this rank");
  RankDescriptors descriptors{Fd(pair[0]), Fd(pair[1]), Fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)))};
  if (!descriptors.process) fail_errno(errno, "pidfd_open of this process");  // a pidfd is close-on-exec anyway
  return descriptors;
}

ProcessLinks::ProcessLinks(uint32_t rank, Fd inbox, std::vector<PeerDescriptors> peers)
    : rank_(rank), inbox_(std::move(inbox)), peers_(std::move(peers)) {
  for (const PeerDescriptors &peer : peers_) {
    polls_.push_back({peer.process.get(), POLLIN, 0});
    poll_ranks_.push_back(peer.rank);
  }
}

const PeerDescriptors *ProcessLinks::find(uint32_t rank) const noexcept {
  const auto peer = std::ranges::lower_bound(peers_, rank, {}, &PeerDescriptors::rank);
  return peer != peers_.end() && peer->rank == rank ? &*peer : nullptr;
}

bool ProcessLinks::send(uint32_t to_rank, Parcel parcel, const Fd &file) {
  const PeerDescriptors *peer = find(to_rank);
  if (!peer || !peer->outbox) fail(FSDP_INTERNAL, "a descriptor for rank {}, which is not on this host", to_rank);
  const int files[] = {file.get()};
  // A broken mailbox means a dead peer, which the wait for that peer finds.
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
  return take_from(arrived_, parcel);
}

void ProcessLinks::sleep(uint32_t ms) { await_readable(inbox_, static_cast<int>(ms)); }

void ProcessLinks::find_dead(const std::function<void(uint32_t)> &found) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || ::poll(polls_.data(), polls_.size(), 0) <= 0) return;
  for (size_t i = 0; i < polls_.size(); ++i)
    if (polls_[i].revents) found(poll_ranks_[i]);
}

bool ProcessLinks::dumps_core(uint32_t rank) const noexcept {
  const PeerDescriptors *peer = find(rank);
  return peer && is_dumping_core(peer->process);
}

std::optional<Fd> ProcessLinks::meet(Parcel parcel, std::span<const uint32_t> ranks,
                                     const std::function<Fd()> &create) {
  if (ranks[0] != rank_) return take(parcel);
  Fd file = create();
  for (const uint32_t to : ranks.subspan(1)) {
    // A mailbox has room for hundreds of packets, and a rank is at most one packet ahead, so a full mailbox is
    // exceptional.
    for (int tries = 0; !send(to, parcel, file); ++tries) {
      if (tries == 1000) fail(FSDP_SYSTEM, "the mailbox of rank {} is full", to);
      ::usleep(1000);
    }
  }
  return file;
}

namespace {

constexpr uint32_t telling_ms = 3000;  // time to find the others; ranks that arrive later wait until their timeout

[[noreturn]] void fail_denied(const char *call) {
  fail_errno(errno,
             format_text("this process may not call {}: libfsdp needs Linux 5.3 or later, and a seccomp profile "
                         "that allows memfd_create, pidfd_open, madvise and getrandom (docs/guides/launchers.md)",
                         call));
}

void check_memory_files() {
  const Fd file(::memfd_create("fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail_denied("memfd_create");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) fail_denied("fcntl(F_ADD_SEALS)");
}

void check_advice() {
  const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void *page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail_denied("mmap");
  const bool allowed = ::madvise(page, bytes, MADV_WIPEONFORK) == 0 && ::madvise(page, bytes, MADV_DONTFORK) == 0;
  const int code = errno;
  ::munmap(page, bytes);
  errno = code;
  if (!allowed) fail_denied("madvise");
}

}  // namespace

void check_kernel() {
  check_memory_files();
  if (!Fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)))) fail_denied("pidfd_open");
  check_advice();
  uint8_t byte;
  if (::getrandom(&byte, 1, 0) < 0 && errno != EINTR) fail_denied("getrandom");
}

void check_kernel(const WorldOptions &options, const Waiter &waiter) {
  try {
    check_kernel();
  } catch (const Error &lack) {
    WorldOptions brief = options;
    const WipedText wiped(brief.secret);
    brief.timeout_ms = std::min(brief.timeout_ms, telling_ms);
    try {
      (void)meet_processes(brief, waiter, [&](const std::string &) -> std::vector<std::byte> { throw lack; });
    } catch (const Error &) {  // the kernel's refusal is the error to throw, not the answer of the others
    }
    throw;
  }
}

}  // namespace fsdp::membership
