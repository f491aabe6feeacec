// SPDX-License-Identifier: Apache-2.0
// Replaces NCCL in a build without NCCL.
#include "transport/nccl/team.h"

namespace fsdp::transport::nccl {

std::shared_ptr<Team> create_team(std::shared_ptr<Team>, device::Device &, const Waiter &, Failure &,
                                  std::string *obstacle) {
  constexpr auto text = "this library was built without NCCL (-Dnccl=enabled)";
  if (!obstacle) fail(FSDP_UNSUPPORTED, "{}", text);
  *obstacle = text;
  return nullptr;
}
const char *description() noexcept { return "no"; }

}  // namespace fsdp::transport::nccl
