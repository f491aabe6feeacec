// SPDX-License-Identifier: Apache-2.0
// Where a leader waits for the leaders of other nodes. Every rank opens one before the ranks meet, since nobody knows
// yet who will lead; those who do not close it.
#pragma once

#include <string>

#include "base/fd.h"

namespace fsdp::membership {

struct LeaderListener {
  Fd stream;            // TCP, listening
  Fd datagrams;         // UDP at the same port: heartbeats
  std::string address;  // for the other leaders
};

// On the interface of this numeric address alone.
LeaderListener open_leader_listener(const std::string &interface_address);

}  // namespace fsdp::membership
