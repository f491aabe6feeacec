// SPDX-License-Identifier: Apache-2.0
// model.safetensors.index.json, as Hugging Face writes it beside several files of weights: which file has which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace fsdp::checkpoint {

inline constexpr const char *weight_index_name = "model.safetensors.index.json";

// {tensor: file}. Refuses what is damaged, and paths that lead out of the index's own folder. `file` is for messages.
std::map<std::string, std::string> parse_weight_index(std::string_view text, std::string_view file);

}  // namespace fsdp::checkpoint
