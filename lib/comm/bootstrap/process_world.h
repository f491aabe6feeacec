// SPDX-License-Identifier: Apache-2.0
// Ranks as processes of one host meet through an abstract unix socket: rank 0 listens, the others connect, and all get
// the job's control memory, a pidfd of every rank and a way into every rank's mailbox. Nothing of it is in the file
// system.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/fd.h"
#include "comm/shm/links.h"

namespace fsdp::comm {

struct Meeting {
  Fd control;
  std::unique_ptr<Links> links;
  std::string description;
};

// Blocks until all ranks have come. World sizes from 2.
Meeting meet_processes(const WorldOptions &options, const Waiter &waiter);

}  // namespace fsdp::comm
