// SPDX-License-Identifier: Apache-2.0
// Steps of a common creation that all ranks survive or none.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "comm/communicator.h"
#include "comm/outcome.h"

namespace fsdp::comm {

// Every rank of the team takes the step; if it fails on one, that rank's error is thrown on all.
void attempt_together(Team &team, const std::string &what, const std::function<void()> &step);

// What a rank says of itself, of at most 500 bytes, all ranks of the team must say; else MISMATCH on all of them, which
// names the lowest rank that differs from the first one and quotes both.
void agree_on(Team &team, const std::string &what, const std::string &said);

// Throws the error of the lowest rank that has one, on all of them; outcomes: of every rank, as exchanged.
void check_outcomes(Team &team, std::span<const Outcome> outcomes);

// After an exchange that every rank of the team answers with an error. A rank that goes on with it may leave the job at
// once, and a slower one that still waits in the exchange would be told of that end and not of its reason. So all come
// here first: who came has read. Does not throw; without it the error is only less exact.
void await_readers(Team &team) noexcept;

}  // namespace fsdp::comm
