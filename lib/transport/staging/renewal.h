// SPDX-License-Identifier: Apache-2.0
// A round of the host's communicators has a number for each of a billion collectives. A call of a device is made of
// many, and rounds end only with steps that failed: a training run of weeks would come to the last number. Long before
// that all ranks, at the same call, wait for each other and begin the next round.
#pragma once

#include "transport/team.h"

namespace fsdp::transport::staging {

// next_round is called between two meetings, when the streams of all ranks have done `last`.
template <class NextRound>
void begin_new_round(Team &team, device::Device &device, const device::Event &last, NextRound &&next_round) {
  const auto meet = [&] { team.barrier("a new round of collectives"); };
  device.synchronize(last);
  meet();
  next_round();
  meet();
}

}  // namespace fsdp::transport::staging
