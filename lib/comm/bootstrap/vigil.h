// SPDX-License-Identifier: Apache-2.0
// From the moment a rank joins until all have met, its connection to rank 0 stays open: rank 0 sees who dies or gives
// up, and tells all others whom; they see whether rank 0 lives. What ranks watch each other with afterwards does not
// exist yet, or not everywhere.
//
// Looked at by the waits of the caller's thread, as its Waiter's duty. If the job does not form, rank 0's word is what
// all ranks report.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "comm/bootstrap/frame_stream.h"
#include "comm/bootstrap/message.h"
#include "comm/verdict.h"

namespace fsdp::comm {

// One that ends without finish tells the others that this rank gives up, if settle has not said why.
class Vigil : public Duty {
 public:
  virtual ~Vigil() = default;
  // All have met, and watch each other.
  virtual void finish() noexcept = 0;
};

// Rank 0's.
class HostVigil final : public Vigil {
 public:
  using Clock = std::chrono::steady_clock;
  // A rank that has joined.
  struct Party {
    FrameStream stream;  // none: rank 0, or not joined yet
    std::string host_id, host;
    std::optional<std::vector<std::byte>> card;
    bool taken = false, watched = true;
  };

  // deadline: of the whole; beyond it, waits that have a limit of their own are over.
  HostVigil(uint32_t size, Clock::time_point deadline, const Waiter &waiter);
  ~HostVigil() override;

  std::vector<Party> &parties() noexcept { return parties_; }
  void look() override;
  Error settle(const Error &error) override;
  void finish() noexcept override;

 private:
  void hear_all();
  void hear(uint32_t rank);
  void check_end(uint32_t rank);
  void tell(const message::Message &word) noexcept;
  Error conclude() const;

  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  std::vector<Party> parties_;
  RankSet dead_, lost_;          // lost: its host does not answer
  std::optional<Error> report_;  // of the first that gave up
  Clock::time_point found_{};    // the first of these
  std::optional<Error> end_;
  bool finished_ = false;
};

// That of every other rank.
class GuestVigil final : public Vigil {
 public:
  using Clock = std::chrono::steady_clock;
  GuestVigil(uint32_t rank, FrameStream stream, std::string zero_host, Clock::time_point deadline,
             const Waiter &waiter);
  ~GuestVigil() override;

  void look() override;
  Error settle(const Error &error) override;
  void finish() noexcept override;

 private:
  void hear();
  void await_word(Clock::duration time);
  void tell(const message::Message &word) noexcept;

  const uint32_t rank_;
  FrameStream stream_;
  const std::string zero_host_;
  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  std::optional<Error> end_;
  bool formed_ = false, finished_ = false;  // rank 0 says so; this rank does
};

// With these codes of a FrameStream its other end's host is silent: nobody's process is to blame.
bool host_is_silent(int code) noexcept;
Error lost_contact(const std::string &one, const std::string &other);
// EBADMSG: so is none whose words somebody changed on their way.
Error changed_contact(const std::string &one, const std::string &other, const std::string &problem);

// What a rank tells the others of an error that ends its forming: one of its own is its failure.
message::Refusal report_of(const Error &error, uint32_t rank);
// What such a word says. A peer wrote it.
Error error_of(const message::Refusal &word, uint32_t world_size);

}  // namespace fsdp::comm
