// SPDX-License-Identifier: Apache-2.0
// Whether NCCL can serve the ranks of a team, and what of it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/nccl/communicators.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

// The same on all ranks, but for the library.
struct Choice {
  std::string obstacle;  // why NCCL cannot serve them; empty: it can
  std::shared_ptr<const Library> library;
  Features features;
  std::vector<Note> notes;
};

// Collective. No error of the library is thrown: it is the obstacle. But what a user has asked for in vain is thrown.
Choice choose(Team &host, const device::Device &device);

}  // namespace fsdp::transport::nccl
