// SPDX-License-Identifier: Apache-2.0
// How the ranks of one host, as threads of one process or as processes, pass descriptors to each other and notice each
// other's end; and what the kernel must allow for that.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "membership/job.h"
#include "membership/liveness/links.h"

namespace fsdp::membership {

// Ranks as threads of one process: LocalJob is what they share, LocalLinks are one rank's links. No rank needs to wait
// until another is constructed.
class LocalJob {
 public:
  explicit LocalJob(uint32_t size);

  uint32_t size() const noexcept { return size_; }
  const Fd &control() const noexcept { return control_; }
  // Each rank is claimed once.
  void claim(uint32_t rank);

  void send(uint32_t to_rank, Parcel parcel, Fd file);
  std::optional<Fd> take(uint32_t rank, Parcel parcel);
  void sleep(uint32_t ms);
  Fd meet(Parcel parcel, size_t rank_count, const std::function<Fd()> &create);

 private:
  struct Handover {
    Parcel parcel;
    Fd file;
    size_t taken = 0;
  };
  const uint32_t size_;
  Fd control_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<bool> claimed_;
  std::vector<std::vector<std::pair<Parcel, Fd>>> mailboxes_;
  std::vector<Handover> meetings_;
};

class LocalLinks final : public Links {
 public:
  LocalLinks(std::shared_ptr<LocalJob> job, uint32_t rank) : job_(std::move(job)), rank_(rank) {}

  bool send(uint32_t to_rank, Parcel parcel, const Fd &file) override;
  std::optional<Fd> take(Parcel parcel) override { return job_->take(rank_, parcel); }
  void sleep(uint32_t ms) override { job_->sleep(ms); }
  // Finds nothing: a thread does not die alone. A rank that ends its context without closing it says so in the control
  // memory.
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) override {
    return job_->meet(parcel, ranks.size(), create);
  }

 private:
  std::shared_ptr<LocalJob> job_;
  uint32_t rank_;
};

// Ranks as processes: each reads its own mailbox, a socket that every peer can write to, and has a pidfd of every peer.

// What a rank brings to the rendezvous: a socket pair, and the pidfd of its process.
struct RankDescriptors {
  Fd inbox;    // kept by this rank
  Fd outbox;   // passed to every peer
  Fd process;  // a pidfd, passed to every peer
};
RankDescriptors make_descriptors();

// What a rank holds of a peer.
struct PeerDescriptors {
  uint32_t rank = 0;
  Fd process;
  Fd outbox;
};

class ProcessLinks final : public Links {
 public:
  // peers: the other ranks of this host, in order of ranks.
  ProcessLinks(uint32_t rank, Fd inbox, std::vector<PeerDescriptors> peers);

  bool send(uint32_t to_rank, Parcel parcel, const Fd &file) override;
  std::optional<Fd> take(Parcel parcel) override;
  void sleep(uint32_t ms) override;
  void find_dead(const std::function<void(uint32_t)> &found) override;
  std::optional<std::vector<uint32_t>> neighbours() const override { return poll_ranks_; }
  bool dumps_core(uint32_t rank) const noexcept override;
  std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) override;

 private:
  void read_inbox();
  const PeerDescriptors *find(uint32_t rank) const noexcept;  // NULL: it is not on this host

  uint32_t rank_;
  Fd inbox_;
  std::vector<PeerDescriptors> peers_;
  std::vector<std::pair<Parcel, Fd>> arrived_;  // not taken yet: for other teams, or early
  std::mutex mutex_;                            // guards polls_
  std::vector<pollfd> polls_;                   // the pidfds of peers_
  std::vector<uint32_t> poll_ranks_;
};

// What the kernel must allow to every process of a job. A seccomp profile or an older kernel may deny it to a single
// rank, and the others would wait for that rank until their timeout.

// Throws if the kernel denies memfd_create, pidfd_open, madvise or getrandom to this process, and says which.
void check_kernel();
// The same, for a rank that has not met the others yet: before it throws, it goes to the rendezvous and tells them why
// it gives up.
void check_kernel(const WorldOptions &options, const Waiter &waiter);

}  // namespace fsdp::membership
