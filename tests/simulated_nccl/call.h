// SPDX-License-Identifier: Apache-2.0
// Every function of NCCL begins and ends with these steps, with the lock held.
#pragma once

#include "simulated_nccl/state.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated::nccl {

Result refuse(Result result, const std::string &why);
// Returns nothing if the communicator has ended; using it then is a breach.
std::shared_ptr<Comm> find(Comm *comm);
std::shared_ptr<Comm> find_locked(Comm *comm);  // takes the lock
void check_idle(const Comm &comm, const char *call);
// Starts the operation. A blocking communicator returns when it is done, or when a communicator of its family is
// aborted. Such an abort does not end the finalizing.
Result begin(std::unique_lock<std::mutex> &lock, Comm &comm);

inline const std::byte *bytes(const void *data) { return static_cast<const std::byte *>(data); }
inline std::byte *bytes(void *data) { return static_cast<std::byte *>(data); }

}  // namespace simulated::nccl
