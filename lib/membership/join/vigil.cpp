// SPDX-License-Identifier: Apache-2.0
#include "membership/join/vigil.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "membership/join/roster.h"

namespace fsdp::membership {
namespace vigil {

using Clock = std::chrono::steady_clock;

bool blames_others(const Error &error, uint32_t rank) {
  return error.status == FSDP_PEER_FAILED && error.rank != static_cast<int32_t>(rank);
}

bool is_own(const Error &error, uint32_t rank) {
  if (error.rank >= 0) return error.rank == static_cast<int32_t>(rank);
  return error.status != FSDP_PEER_FAILED && error.status != FSDP_TIMEOUT;
}

Error late(Clock::time_point deadline) {
  const auto over = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - deadline).count();
  return Error(
      FSDP_TIMEOUT,
      format_text("all ranks came to the rendezvous, but not all have met since: {} ms beyond the timeout", over));
}

void flush_soon(FrameStream &stream, Clock::time_point end) noexcept {
  try {
    while (!stream.flush() && stream.speaks() && Clock::now() < end) std::this_thread::sleep_for(1ms);
  } catch (...) {  // no memory for a text about it
  }
}

void give_up(Vigil &vigil) noexcept {
  try {
    (void)vigil.settle(Error(FSDP_INTERNAL, "it has ended"));
  } catch (...) {  // no memory: the end of the connections says that something is wrong
  }
}

}  // namespace vigil

bool host_is_silent(int code) noexcept { return code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH; }

Error lost_contact(const std::string &one, const std::string &other) {
  return Error(FSDP_PEER_FAILED,
               format_text("no contact between {} and {} before the job had formed: the network between "
                           "them is cut, or a host is down",
                           one, other));
}

Error changed_contact(const std::string &one, const std::string &other, const std::string &problem) {
  return Error(FSDP_PEER_FAILED, format_text("{} cannot hear {} before the job has formed: {}", one, other, problem));
}

message::Refusal report_of(const Error &error, uint32_t rank) {
  if (!vigil::is_own(error, rank)) return {error.status, error.rank, error.message, static_cast<int32_t>(rank)};
  return {FSDP_PEER_FAILED, static_cast<int32_t>(rank),
          format_text("rank {} on {} gave up before the job had formed: {}", rank, host_name(), error.message),
          static_cast<int32_t>(rank)};
}

Error error_of(const message::Refusal &word, uint32_t world_size) {
  const bool known = word.status > FSDP_OK && word.status <= FSDP_INTERNAL;
  const bool in_world = word.rank >= 0 && word.rank < static_cast<int32_t>(world_size);
  return Error(known ? word.status : FSDP_PEER_FAILED, word.text, in_world ? word.rank : -1);
}

}  // namespace fsdp::membership
