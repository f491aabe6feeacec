// SPDX-License-Identifier: Apache-2.0
#include "comm/bootstrap/process_world.h"

#include "comm/bootstrap/guest.h"
#include "comm/bootstrap/host.h"
#include "comm/shm/control.h"

namespace fsdp::comm {

Meeting meet_processes(const WorldOptions &options, const Waiter &waiter) {
  Meeting meeting = options.rank == 0 ? Host(options, waiter).run() : Visit(options, waiter).run();
  check_memory_file(meeting.control, Control::size_bytes(options.size), "the job's control memory");
  meeting.description = format_text(
      "{} ranks as processes of one host, met at rendezvous '{}' ({})", options.size, options.rendezvous,
      options.secret.empty() ? "no job secret: any process of this user could have joined" : "with a job secret");
  return meeting;
}

}  // namespace fsdp::comm
