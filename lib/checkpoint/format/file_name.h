// SPDX-License-Identifier: Apache-2.0
// Names that come from files become paths only where they lead nowhere else.
#pragma once

#include <algorithm>
#include <climits>
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

// Of a file inside a folder, of any characters that a name can have: each part is the name of an entry, and none leads
// back.
inline bool is_inner_path(std::string_view path) {
  if (path.size() > PATH_MAX / 2 || path.find('\0') != path.npos) return false;
  for (size_t begin = 0, end = 0; end != path.npos; begin = end + 1) {
    end = path.find('/', begin);
    const std::string_view part = path.substr(begin, end == path.npos ? end : end - begin);
    if (part.empty() || part == "." || part == ".." || part.size() > NAME_MAX) return false;
  }
  return true;
}

}  // namespace fsdp::checkpoint
