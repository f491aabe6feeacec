// SPDX-License-Identifier: Apache-2.0
// Main weights and AdamW's states in fewer bits than fp32, computed without the library. Numbers are computed one at a
// time and by other methods than the library's: a search through the whole map, and products of 64 bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness.h"

namespace harness {

// The storage of a parameter's main weights.
fsdp_main_storage storage_of(const Scenario &setup, const GroupDef &group, const ParamDef &param);
// Are AdamW's states of the parameter kept in 8 bits? The parameter must not be a box.
bool has_codes(const Scenario &setup, const ParamDef &param);

// The compute weight of an fp32 main weight that is kept in two halves.
float upper_half(float value);
// Rounds a number to bf16 with the random bits that an element of the parameter has in a step.
float round_randomly(float value, uint64_t seed, const std::string &name, uint64_t element, uint64_t step);
// Replaces a state by the numbers that its codes stand for after encoding, block by block.
void encode_and_decode(std::vector<float> &state, bool is_signed);

}  // namespace harness
