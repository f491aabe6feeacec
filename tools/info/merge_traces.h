// SPDX-License-Identifier: Apache-2.0
// One trace from those of several ranks.
#pragma once

#include <string>
#include <vector>

namespace tools {

// Reads files that fsdp_write_trace wrote. Throws before anything is written if a file is wrong. The events of each
// rank are those of a separate process, and ranks of one machine share a clock, so the events need only be joined.
void merge_traces(const std::string &out, const std::vector<std::string> &files);

}  // namespace tools
