// SPDX-License-Identifier: Apache-2.0
// Decides whether NCCL can serve the ranks of a team, and which of its features are used.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/nccl/communicators.h"
#include "transport/team.h"

namespace fsdp::transport::nccl {

// The choice is the same on all ranks, except for the library.
struct Choice {
  std::string obstacle;  // why NCCL cannot serve them; empty: it can
  std::shared_ptr<const Library> library;
  Features features;
  std::vector<Note> notes;
};

// Collective. An error of the NCCL library is not thrown, but becomes the obstacle. Throws if the user asked for
// something that is not available.
Choice choose(Team &host, const device::Device &device);

}  // namespace fsdp::transport::nccl
