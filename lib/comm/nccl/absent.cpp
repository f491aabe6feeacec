// SPDX-License-Identifier: Apache-2.0
// What a build without NCCL has instead of it.
#include "comm/nccl/team.h"

namespace fsdp::comm::nccl {

std::shared_ptr<Team> create_team(std::shared_ptr<Team>, device::Device &, const Waiter &, Failure &,
                                  std::string *obstacle) {
  constexpr auto text = "this library was built without NCCL (-Dnccl=enabled)";
  if (!obstacle) fail(FSDP_UNSUPPORTED, "{}", text);
  *obstacle = text;
  return nullptr;
}
const char *description() noexcept { return "no"; }

}  // namespace fsdp::comm::nccl
