// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "memory/model_spec.h"

namespace fsdp::abi {

// The descriptors of an array of the caller's, checked one by one: an error names the element and the field.
std::vector<memory::ParamSpec> read_params(const fsdp_param *params, uint64_t count, uint64_t stride, const char *call);

}  // namespace fsdp::abi
