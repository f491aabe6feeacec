// SPDX-License-Identifier: Apache-2.0
// One thread a team: what NCCL and the job's other ranks do while no thread of this rank waits for it. It fails the
// context when NCCL reports an error, when a collective does not end, or when a peer is lost. When the context has
// failed, whatever the reason, it has all communicators aborted at once, so that no stream of the GPU waits for ever.
// It never waits itself, neither for CUDA nor for NCCL, nor for the caller while that is in one of them.
#pragma once

#include <pthread.h>

#include <memory>
#include <optional>
#include <string>

#include "transport/nccl/handle.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

class Guarded {
 public:
  virtual ~Guarded() = default;
  // What has gone wrong, if something has.
  virtual std::optional<Error> look() noexcept = 0;
  // What this rank has waited for on the GPU for a while; empty: nothing.
  virtual std::string awaited() const = 0;
  // What to abort.
  virtual std::shared_ptr<Handle> handle() const = 0;
};

class Guard {
 public:
  Guard(std::shared_ptr<Team> host, Failure &failure, const std::string &name);
  ~Guard();
  Guard(const Guard &) = delete;
  Guard &operator=(const Guard &) = delete;

  void add(std::shared_ptr<Guarded> guarded);
  void remove(const std::shared_ptr<Guarded> &guarded) noexcept;

 private:
  struct State;
  static void *work(void *state);

  std::shared_ptr<State> state_;
  pthread_t thread_{};
};

}  // namespace fsdp::transport::nccl
