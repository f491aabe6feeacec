// SPDX-License-Identifier: Apache-2.0
// State that one rank's NCCL team, its communicators and its arenas share. The last of them to end frees the state.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/nccl/guard.h"
#include "transport/nccl/launches.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

// The features of NCCL that are used; the same on all ranks of a team.
struct Features {
  bool windows = false;         // memory is registered as windows, not as buffers
  bool copy_engines = false;    // gathers use copy engines
  bool order_implicit = false;  // NCCL keeps the order of launches
  bool splits = true;           // the calling thread makes launches, over communicators that block
  BlockLimits blocks;
};

class Communicators {
 public:
  Communicators(std::shared_ptr<Team> host, device::Device &device, std::shared_ptr<const Library> library,
                Features features, const Waiter &waiter, Failure &failure);

  Team &host() const noexcept { return *host_; }
  device::Device &device() const noexcept { return device_; }
  const Features &features() const noexcept { return features_; }
  const Library &library() const noexcept { return *library_; }
  uint32_t rank() const noexcept { return host_->rank(); }
  uint32_t size() const noexcept { return host_->size(); }

  // Collective. Opens a communicator of NCCL, with all memory registered that is known so far.
  std::shared_ptr<Launches> open(const std::string &name, bool gathers);
  // Not collective: waits a short time for work under way, and then aborts the communicator. The time is bounded: an
  // abort that does not return is abandoned.
  void close(const std::shared_ptr<Launches> &launches) noexcept;
  // Collective.
  void add_memory(std::byte *data, uint64_t bytes);
  void drop_memory(std::byte *data) noexcept;
  // Collective. Checks whether all ranks have enqueued the same work on every communicator. If they have not, but all
  // have abandoned this round of `ended`, all communicators are made again. Otherwise throws MISMATCH, which fails the
  // context.
  void end_round(Launches &ended);
  // Implements Team::ends_alike().
  bool ends_alike();
  void cut() noexcept;
  void renew();
  std::vector<Note> take_news() noexcept { return std::exchange(news_, {}); }

 private:
  struct KnownMemory {
    std::byte *data;
    uint64_t bytes;
  };

  // The work that a rank has enqueued, by communicator.
  struct EnqueuedRound {
    static constexpr size_t most = 8;
    uint64_t count = 0, abandoned = 0;
    uint64_t captured = 0;  // one bit per communicator: graphs of this rank may refer to it
    History histories[most];
  };
  using Rounds = std::vector<EnqueuedRound>;

  UniqueId share_id(const std::string &what);
  ConnectionPlan plan(const std::string &name, bool copy_engines) const;
  void join(Connection &connection, const UniqueId &id);
  void reopen(Launches &launches);
  // Aborts the communicator. Returns false if the abort has not returned in time.
  bool end(Launches &launches) noexcept;
  void await_end(const Launches &launches, Clock::time_point start) const;
  // The rank with graphs that may keep the communicator from ending, if there is one.
  std::optional<uint32_t> find_holder(const Launches &launches) const;
  // Collective. Waits for communicators that are being aborted on all ranks. Throws an error that says why one does not
  // end.
  void await_ends(std::span<const std::shared_ptr<Launches>> all);
  void register_all(Launches &launches);
  bool register_memory(Connection &connection, const KnownMemory &memory);
  Registration register_everywhere(Connection &connection, const KnownMemory &memory, std::string &why);
  bool can_register(bool windows) const noexcept;
  bool take_buffers(const std::string &why);
  void start_over(Launches &launches);
  void forget(Connection &connection, void *data) noexcept;
  Rounds exchange_rounds(bool abandoned);
  // doubt() is called before ranks compare their work, and trust() when this rank knows what all of them do. Between
  // the two calls, peers that know sooner may abort.
  void doubt() noexcept;
  void trust() noexcept;
  static bool same(const EnqueuedRound &a, const EnqueuedRound &b) noexcept;
  template <class... Args>
  void tell(fsdp_log_level level, fmt::format_string<Args...> format, Args &&...args) noexcept {
    try {
      news_.push_back({level, format_text(format, std::forward<Args>(args)...)});
    } catch (const std::exception &) {  // no memory for a line of the log
    }
  }
  [[noreturn]] void fail_history(size_t index, uint32_t peer, const History &mine, const History &theirs);

  std::shared_ptr<Team> host_;
  device::Device &device_;
  std::shared_ptr<const Library> library_;
  Features features_;
  const Waiter &waiter_;
  Failure &failure_;
  std::shared_ptr<LaunchOrder> order_;
  uint64_t launched_ = 0;  // number of compared collectives on all communicators, since these were last made
  std::vector<std::shared_ptr<Launches>> open_;  // in the order of their creation, which is the same on every rank
  std::vector<uint64_t> captured_;               // EnqueuedRound::captured of each rank when a round was last compared
  std::vector<KnownMemory> memory_;
  bool registers_ = true, warned_ = false;  // memory is registered with NCCL; the user was warned
  bool windows_;                            // memory is registered as windows, not as buffers
  std::vector<Note> news_;
  Guard guard_;
};

}  // namespace fsdp::transport::nccl
