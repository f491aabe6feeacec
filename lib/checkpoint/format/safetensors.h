// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: eight bytes of length (little-endian), that much JSON, then the tensors' data
// without holes. Read from any program's file within limits, and written such that data starts where direct I/O wants
// it.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/element_type.h"

namespace fsdp::checkpoint {

// Names that come from files become paths only where they lead nowhere else.

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

inline constexpr size_t length_bytes = 8;
inline constexpr uint64_t longest_header = 100'000'000;  // bytes of JSON, as in safetensors itself

struct StoredTensor {
  std::string name;
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  uint64_t begin = 0, end = 0;    // bytes, from the file's first data byte on
  std::string unknown_type = {};  // the file's name of a type that is not known

  bool operator==(const StoredTensor &) const = default;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // as their data follows
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // in the file, of the first data byte

  uint64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
  const StoredTensor *find(std::string_view name) const;  // NULL: there is none
};

// The JSON's bytes, which must fit into the file.
uint64_t read_header_length(std::span<const std::byte, length_bytes> first, uint64_t file_bytes, std::string_view file);
// Of the JSON alone. Refused is what safetensors refuses: data with holes, overlaps or a rest, sizes that overflow or
// do not match, names that come twice, more than 16 dimensions. A tensor of a type that is not known has its bytes;
// only its use is refused.
SafetensorsHeader parse_header(std::string_view json, uint64_t file_bytes, std::string_view file);

// The tensors' begin and end, one behind the other in their order.
void place_tensors(SafetensorsHeader &header);
// Length and JSON, with spaces behind it until the data starts at a multiple of `alignment`: data_offset bytes.
std::string write_header(SafetensorsHeader &header, uint64_t alignment);

// model.safetensors.index.json, as Hugging Face writes it beside several files of weights: which file has which tensor.

inline constexpr const char *weight_index_name = "model.safetensors.index.json";

// {tensor: file}. Refuses what is damaged, and paths that lead out of the index's own folder. `file` is for messages.
std::map<std::string, std::string> parse_weight_index(std::string_view text, std::string_view file);

}  // namespace fsdp::checkpoint
