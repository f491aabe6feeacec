// SPDX-License-Identifier: Apache-2.0
#include "device/device.h"
#include "device/host/simd_targets.h"

#include <hwy/targets.h>

namespace fsdp::device {

// The best of the targets that this processor supports: the lowest bit, as Highway orders them.
const char *host_instruction_set() {
  const int64_t targets = hwy::SupportedTargets();
  return hwy::TargetName(targets & -targets);
}

}  // namespace fsdp::device
