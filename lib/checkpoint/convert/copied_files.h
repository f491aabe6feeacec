// SPDX-License-Identifier: Apache-2.0
// What lies beside weights in a Hugging Face folder: configuration, tokenizer, words about the model.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/files/folder.h"

namespace fsdp::checkpoint {

// Those files of a folder; of weights neither files nor indices, and nothing whose name begins with a '.'. Links are
// followed. Returns their names.
std::vector<std::string> copy_plain_files(const std::string &from, const NewCheckpoint &to);

}  // namespace fsdp::checkpoint
