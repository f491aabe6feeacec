// SPDX-License-Identifier: Apache-2.0
// What every function of NCCL's does first and last, with the lock held.
#pragma once

#include "simulated_nccl/state.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated::nccl {

Result refuse(Result result, const std::string &why);
// Nothing: it has ended, which is a breach.
std::shared_ptr<Comm> find(Comm *comm);
std::shared_ptr<Comm> find_locked(Comm *comm);  // takes the lock
void check_idle(const Comm &comm, const char *call);
// What was called. One that blocks comes back when it is done, or when its family is aborted, which does not end its
// finalizing.
Result begin(std::unique_lock<std::mutex> &lock, Comm &comm);

inline const std::byte *bytes(const void *data) { return static_cast<const std::byte *>(data); }
inline std::byte *bytes(void *data) { return static_cast<std::byte *>(data); }

}  // namespace simulated::nccl
