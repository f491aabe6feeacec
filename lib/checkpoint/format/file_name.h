// SPDX-License-Identifier: Apache-2.0
// Names that come from files become paths only where they lead nowhere else.
#pragma once

#include <algorithm>
#include <string_view>

namespace fsdp::checkpoint {

// Of an entry of a folder: letters, digits, '.', '_' and '-', the first one no '.'.
inline bool is_plain_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-';
  };
  return !name.empty() && name[0] != '.' && name.size() <= 255 && std::all_of(name.begin(), name.end(), plain);
}

}  // namespace fsdp::checkpoint
