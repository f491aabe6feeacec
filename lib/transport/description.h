// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fsdp::transport {

// What this build has of NCCL, for people: "no", or from which version it is opened.
const char *nccl_description() noexcept;

}  // namespace fsdp::transport
