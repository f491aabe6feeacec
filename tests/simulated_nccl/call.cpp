// SPDX-License-Identifier: Apache-2.0
#include "simulated_nccl/call.h"

#include <chrono>

namespace simulated::nccl {

using Lock = std::unique_lock<std::mutex>;

Result refuse(Result result, const std::string &why) {
  state().last_error = why;
  return result;
}

std::shared_ptr<Comm> find(Comm *comm) {
  const auto found = state().comms.find(comm);
  if (found == state().comms.end()) {
    state().breach(nullptr, "a call with a communicator that has ended");
    return nullptr;
  }
  if (found->second->ending) state().breach(comm, "a call with a communicator that is being aborted");
  return found->second;
}

std::shared_ptr<Comm> find_locked(Comm *comm) {
  const Lock lock(state().mutex);
  return find(comm);
}

void check_idle(const Comm &comm, const char *call) {
  if (comm.polls > 0 || comm.joining || !comm.pending.empty() || comm.waits_for_windows || comm.launch_hangs ||
      comm.launching || comm.splitting || comm.inside)
    state().breach(&comm, std::string(call) + " while another call is in progress");
}

Result begin(Lock &lock, Comm &comm) {
  comm.polls = static_cast<int>(state().knob(Knob::in_progress_polls));
  if (comm.config.blocking != 1) return settled(comm) ? comm.error : in_progress;
  ++comm.inside;
  bool done = settled(comm);
  for (; !done && !(*comm.aborted && !comm.finalized); done = settled(comm))
    state().changed.wait_for(lock, std::chrono::milliseconds(1));
  --comm.inside;
  if (done) return comm.error;
  comm.pending.clear();
  give_up_split(comm);
  return refuse(internal_error, "aborted (simulated)");
}

}  // namespace simulated::nccl
