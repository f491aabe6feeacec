// SPDX-License-Identifier: Apache-2.0
// Renames as people write them down: a JSON array of {"theirs", "ours", "from_row", "to_row", "row_count",
// "transposed"}, of which the first two must be there. They mean what fsdp_rename means.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/plan/rename.h"

namespace fsdp::checkpoint {

// `file` is for messages. INVALID_ARGUMENT names what is unknown, and what is known.
std::vector<Rename> parse_renames(std::string_view text, std::string_view file);
std::vector<Rename> read_renames(const std::string &path);

}  // namespace fsdp::checkpoint
