// SPDX-License-Identifier: Apache-2.0
// Codes times scales of a whole parameter, on the host, a piece at a time: what is read of one that has no main
// weights.
#pragma once

#include "device/device.h"
#include "memory/model_spec.h"

namespace fsdp::engine {

// codes and scales: the ROW planes, in memory of the host; scales of that dtype. to: memory of the caller's.
struct StoredRows {
  const std::byte *codes, *scales;
  fsdp_dtype scale_dtype;
};
// One multiplication in fp32, and a rounding to the dtype.
void dequantize(device::Device &device, const memory::ParamSpec &param, const StoredRows &rows, std::byte *to,
                fsdp_dtype dtype);

}  // namespace fsdp::engine
