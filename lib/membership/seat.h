// SPDX-License-Identifier: Apache-2.0
// One rank's share in the job's membership: control memory, links, heartbeats and watch. Its world, teams and arenas
// share the seat, and the last of these to end releases it.
#pragma once

#include <memory>
#include <utility>

#include "membership/liveness/control.h"
#include "membership/liveness/failure_detector.h"
#include "membership/liveness/links.h"
#include "membership/liveness/watch.h"

namespace fsdp::membership {

struct Seat {
  Seat(uint32_t rank, uint32_t world_size, const Fd &control_file, std::unique_ptr<Links> job_links,
       const Waiter &waiter, Failure &failure, uint32_t heartbeat_timeout_ms = Pulse::default_limit_ms)
      : rank(rank),
        control(control_file, world_size),
        links(std::move(job_links)),
        pulse(control, rank, heartbeat_timeout_ms, links->neighbours()),
        watch(control, *links, pulse, rank, waiter, failure) {}

  uint32_t rank;
  Control control;
  std::unique_ptr<Links> links;
  Pulse pulse;  // if ranks are processes, a Monitor beats for it
  Watch watch;
};

}  // namespace fsdp::membership
