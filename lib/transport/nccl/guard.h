// SPDX-License-Identifier: Apache-2.0
// One thread per team that watches NCCL and the job's other ranks while no thread of this rank waits for them. It fails
// the context when NCCL reports an error, when a collective does not end, or when a peer is lost. When the context has
// failed for any reason, the guard has all communicators aborted immediately, so that no stream of the GPU waits
// forever. The guard itself never waits for CUDA or NCCL, nor for a caller that is inside one of them.
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
  // Returns an error if something has gone wrong.
  virtual std::optional<Error> look() noexcept = 0;
  // The work for which this rank has waited on the GPU for a while; empty: there is none.
  virtual std::string awaited() const = 0;
  // The communicator to abort.
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
