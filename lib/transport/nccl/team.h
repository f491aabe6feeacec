// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their GPUs. NCCL carries the bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/device_team.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

inline constexpr CollectiveTraits nccl_traits = [] {
  CollectiveTraits traits = device_traits;
  traits.receives_slices = true;
  return traits;
}();

// Collective. If NCCL cannot serve the ranks, the reason is written to `obstacle` and NULL is returned, on all ranks
// alike. If `obstacle` is NULL, the reason is thrown as UNSUPPORTED.
std::shared_ptr<Team> create_team(std::shared_ptr<Team> host, device::Device &device, const Waiter &waiter,
                                  Failure &failure, std::string *obstacle);
// "opened at run time (2.19.0 or later)" or "no".
const char *description() noexcept;

}  // namespace fsdp::transport::nccl
