// SPDX-License-Identifier: Apache-2.0
// What one rank has of the job, shared by its world, teams and arenas: whichever ends last gives it back.
#pragma once

#include <memory>
#include <utility>

#include "comm/shm/control.h"
#include "comm/shm/links.h"
#include "comm/shm/pulse.h"
#include "comm/shm/watch.h"
#include "device/device.h"

namespace fsdp::comm {

struct Seat {
  Seat(uint32_t rank, uint32_t world_size, const Fd &control_file, std::unique_ptr<Links> job_links,
       const Waiter &waiter, Failure &failure, device::Device &device,
       uint32_t heartbeat_timeout_ms = Pulse::default_limit_ms)
      : rank(rank),
        control(control_file, world_size),
        links(std::move(job_links)),
        pulse(control, rank, heartbeat_timeout_ms, links->neighbours()),
        watch(control, *links, pulse, rank, waiter, failure),
        device(device) {}

  uint32_t rank;
  Control control;
  std::unique_ptr<Links> links;
  Pulse pulse;  // beaten by a Monitor, where ranks are processes
  Watch watch;
  device::Device &device;
};

}  // namespace fsdp::comm
