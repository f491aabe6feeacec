// SPDX-License-Identifier: Apache-2.0
// How the ranks of one host, as threads of one process or as processes, pass descriptors to each other and notice each
// other's end. Also checks what the kernel must allow for that.
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

// Ranks as threads of one process: they share a LocalJob, and each has LocalLinks of its own. No rank needs to wait for
// the construction of another.
class LocalJob {
 public:
  explicit LocalJob(uint32_t size);

  uint32_t size() const noexcept { return size_; }
  const Fd &control() const noexcept { return control_; }
  // Each rank must be claimed only once.
  void claim(uint32_t rank);

  void send(uint32_t to_rank, Parcel parcel, Fd file);
  std::optional<Fd> take(uint32_t rank, Parcel parcel);
  void sleep(uint32_t ms);
  Fd meet(Parcel parcel, size_t rank_count, const std::function<Fd()> &create);

 private:
  // A file that some of the ranks have not taken yet.
  struct OfferedFile {
    Parcel parcel;
    Fd file;
    size_t taken = 0;  // by so many ranks
  };
  const uint32_t size_;
  Fd control_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<bool> claimed_;
  std::vector<std::vector<std::pair<Parcel, Fd>>> mailboxes_;
  std::vector<OfferedFile> offered_files_;
};

class LocalLinks final : public Links {
 public:
  LocalLinks(std::shared_ptr<LocalJob> job, uint32_t rank) : job_(std::move(job)), rank_(rank) {}

  bool send(uint32_t to_rank, Parcel parcel, const Fd &file) override;
  std::optional<Fd> take(Parcel parcel) override { return job_->take(rank_, parcel); }
  void sleep(uint32_t ms) override { job_->sleep(ms); }
  // Finds nothing, because a thread does not die alone. A rank that ends its context without closing it notes that in
  // the control memory.
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) override {
    return job_->meet(parcel, ranks.size(), create);
  }

 private:
  std::shared_ptr<LocalJob> job_;
  uint32_t rank_;
};

// Ranks as processes: each reads its own mailbox, a socket that every peer can write to, and has a pidfd of every peer.

// The descriptors with which a rank comes to the rendezvous: a socket pair, and the pidfd of its process.
struct RankDescriptors {
  Fd inbox;    // kept by this rank
  Fd outbox;   // passed to every peer
  Fd process;  // a pidfd, passed to every peer
};
RankDescriptors make_descriptors();

// The descriptors that a rank has of a peer.
struct PeerDescriptors {
  uint32_t rank = 0;
  Fd process;
  Fd outbox;
};

class ProcessLinks final : public Links {
 public:
  // `peers`: the other ranks of this host, in the order of ranks.
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
  const PeerDescriptors *find(uint32_t rank) const noexcept;  // NULL: the rank is not on this host

  uint32_t rank_;
  Fd inbox_;
  std::vector<PeerDescriptors> peers_;
  std::vector<std::pair<Parcel, Fd>> arrived_;  // arrived for another team or early; not taken yet
  std::mutex mutex_;                            // guards polls_
  std::vector<pollfd> polls_;                   // the pidfds of peers_
  std::vector<uint32_t> poll_ranks_;
};

// Calls of the kernel that every process of a job needs. A seccomp profile or an older kernel may deny them to a single
// rank, and the others would wait for that rank until their timeout.

// Throws if the kernel denies memfd_create, pidfd_open, madvise or getrandom to this process; the error names the call.
void check_kernel();
// Does the same for a rank that has not met the others yet: before it throws, it goes to the rendezvous and tells the
// others why it gives up.
void check_kernel(const WorldOptions &options, const Waiter &waiter);

}  // namespace fsdp::membership
