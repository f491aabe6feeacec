// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their GPUs. NCCL transfers the bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/nccl/communicators.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

// Can NCCL serve the ranks of a team, and which of its features are used? The choice is the same on all ranks, except
// for the library.
struct Choice {
  std::string obstacle;  // reason why NCCL cannot serve the ranks; empty: it can
  std::shared_ptr<const Library> library;
  Features features;
  std::vector<Note> notes;
};

// Collective. An error of the NCCL library is not thrown, but becomes the obstacle. Throws if the user asked for
// something that is not available.
Choice choose(Team &host, const device::Device &device);

inline constexpr CollectiveTraits nccl_traits = [] {
  CollectiveTraits traits = device_traits;
  traits.receives_slices = true;
  return traits;
}();

// Collective. If NCCL cannot serve the ranks, writes the reason to `obstacle` and returns NULL, on all ranks. If
// `obstacle` is NULL, throws the reason as UNSUPPORTED.
std::shared_ptr<Team> create_team(std::shared_ptr<Team> host, device::Device &device, const Waiter &waiter,
                                  Failure &failure, std::string *obstacle);
// "opened at run time (2.19.0 or later)" or "no".
const char *description() noexcept;

}  // namespace fsdp::transport::nccl
