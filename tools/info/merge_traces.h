// SPDX-License-Identifier: Apache-2.0
// One trace from those of several ranks.
#pragma once

#include <string>
#include <vector>

namespace tools {

// Reads files that fsdp_write_trace wrote; throws what is wrong with one, before anything is written. Their events are
// in processes (ranks) of their own and have one clock if the ranks were on one machine, so that all there is to do is
// to join.
void merge_traces(const std::string &out, const std::vector<std::string> &files);

}  // namespace tools
