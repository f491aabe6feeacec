// SPDX-License-Identifier: Apache-2.0
// What kernels are given to make the planes of whole blocks: of what is published, and of what is loaded.
#pragma once

#include <variant>

#include "engine/runtime.h"

namespace fsdp::engine {

using BlockWork = std::variant<device::Mxfp8Quantize, device::Fp8BlockQuantize>;

// Rows of the parameter that this rank has, from fp32 numbers that lie behind each other. Where they are in its planes:
// elements, and scales in any form.
struct BlockRows {
  const Bucket &bucket;
  const memory::ParamSpec &param;
  layout::Slice elements, scales;
  const float *from;
};
BlockWork make_block_work(const memory::ModelSpec &spec, const BlockRows &rows);

void quantize(device::Stream &stream, const BlockWork &work);

}  // namespace fsdp::engine
