// SPDX-License-Identifier: Apache-2.0
// Steps of a common creation that all ranks survive or none.
#pragma once

#include <functional>
#include <string>

#include "comm/communicator.h"

namespace fsdp::comm {

// Every rank of the team takes the step; if it fails on one, that rank's error is thrown on all.
void attempt_together(Team &team, const std::string &what, const std::function<void()> &step);

}  // namespace fsdp::comm
