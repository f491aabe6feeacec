// SPDX-License-Identifier: Apache-2.0
// What a staged collective says of itself.
#pragma once

#include "comm/shm/fingerprint.h"

namespace fsdp::comm::staging {

inline Fingerprint describe(Operation operation, const Tag &tag) {
  Fingerprint call{};
  call.start(operation, tag);
  return call;
}

}  // namespace fsdp::comm::staging
