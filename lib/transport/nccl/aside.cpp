// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/aside.h"

#include <pthread.h>

#include "base/library_thread.h"
#include "transport/nccl/cuda.h"

namespace fsdp::transport::nccl {

std::shared_ptr<Aside> Aside::start(std::shared_ptr<Handle> handle, int32_t gpu, Body body) {
  std::shared_ptr<Aside> call(new Aside(std::move(handle), gpu, std::move(body)));
  auto argument = std::make_unique<std::shared_ptr<Aside>>(call);
  // NCCL's code runs on it: the system's stack.
  pthread_detach(LibraryThread{"fsdp-nccl-call", "a call of NCCL's", 0}.start(work, argument.get()));
  (void)argument.release();
  return call;
}

void *Aside::work(void *argument) {
  const std::unique_ptr<std::shared_ptr<Aside>> owner(static_cast<std::shared_ptr<Aside> *>(argument));
  const std::shared_ptr<Aside> call = *owner;
  allow_calls_during_captures();
  call->run();
  call->done_.store(true, std::memory_order_release);
  return nullptr;
}

void Aside::run() {
  make_current(gpu_);
  const auto lock = handle_->enter();
  Comm *comm = handle_->comm();
  if (!comm) return;
  called_ = true;
  result_ = body_(*handle_, comm);
}

}  // namespace fsdp::transport::nccl
