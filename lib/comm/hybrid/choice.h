// SPDX-License-Identifier: Apache-2.0
// Over what the ranks of a job send each other messages: once for all of them, by what each has brought.
#pragma once

#include <span>
#include <string>

#include "comm/hybrid/card.h"

namespace fsdp::comm {

struct NetDecision {
  bool ucx = false;
  std::string reason;  // for a log: what is used and why
};

// hosts: of each rank, for messages. UCX where all ranks ask for it, or where they leave it open and each has hardware
// for it and the same major version. Throws MISMATCH where ranks ask for different ones, or have different versions of
// UCX and ask for it, UNSUPPORTED naming the first that lacks what all ask for.
NetDecision decide_net(std::span<const Card> cards, std::span<const std::string> hosts);

}  // namespace fsdp::comm
