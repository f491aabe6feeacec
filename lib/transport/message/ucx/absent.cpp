// SPDX-License-Identifier: Apache-2.0
// Replaces UCX in a build without UCX.
#include "base/error.h"
#include "transport/net.h"

namespace fsdp::transport {

std::unique_ptr<Net> create_ucx_net(uint32_t, bool) {
  fail(FSDP_UNSUPPORTED, "FSDP_NET=ucx: this library was built without it (-Ducx=enabled)");
}
const char *net_description() noexcept { return "no"; }

}  // namespace fsdp::transport
