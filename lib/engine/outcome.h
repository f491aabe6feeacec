// SPDX-License-Identifier: Apache-2.0
// What fails on one rank of a team must fail on all of them: errors as values, and their exchange.
#pragma once

#include <functional>
#include <optional>

#include "base/error.h"
#include "transport/team.h"

namespace fsdp::engine {

// Runs the body; what it throws, as an Error.
std::optional<Error> catch_error(const std::function<void()> &body);
// Collective: if any rank has an error, every rank throws the lowest one's, with the same text.
void share_outcome(transport::Team &team, const std::optional<Error> &mine);

}  // namespace fsdp::engine
