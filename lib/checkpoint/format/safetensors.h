// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file. The file has eight bytes of length (little-endian), JSON of that length, and then
// the tensors' data without holes. Headers of any program are read, within limits. Headers are written such that the
// data is aligned for direct I/O.
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

// Is it a plain name of an entry: letters, digits, '.', '_' and '-', not beginning with a '.'? Names from files become
// paths only if they do not lead out of the folder.
inline bool is_plain_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-';
  };
  return !name.empty() && name[0] != '.' && name.size() <= 255 && std::all_of(name.begin(), name.end(), plain);
}

// Is it the path of a file inside a folder? It may have any characters that names can have. Each part must be the name
// of an entry, and no part may lead back.
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
  uint64_t begin = 0, end = 0;    // byte range, counted from the file's first data byte
  std::string unknown_type = {};  // the type's name in the file if the type is not known

  bool operator==(const StoredTensor &) const = default;
};

struct SafetensorsHeader {
  std::vector<StoredTensor> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // offset of the first data byte in the file
  uint64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
  const StoredTensor *find(std::string_view name) const;  // NULL: no tensor has the name
};
// The length of the JSON. Throws if the JSON does not fit into the file.
uint64_t read_header_length(std::span<const std::byte, length_bytes> first, uint64_t file_bytes, std::string_view file);
// Parses the JSON. Refuses what safetensors refuses: data with holes, overlaps or a rest, sizes that overflow or do not
// match, names that come twice, and more than 16 dimensions. A tensor of an unknown type has only its byte range; a
// later use of the tensor is refused.
SafetensorsHeader parse_header(std::string_view json, uint64_t file_bytes, std::string_view file);
// Sets the tensors' begin and end, one after the other in their order.
void place_tensors(SafetensorsHeader &header);
// Returns length and JSON, padded with spaces such that the data starts at a multiple of `alignment`. The text has
// data_offset bytes.
std::string write_header(SafetensorsHeader &header, uint64_t alignment);

// model.safetensors.index.json, which Hugging Face writes beside several files of weights: it tells which file has a
// tensor.

inline constexpr const char *weight_index_name = "model.safetensors.index.json";

// Returns {tensor: file}. Throws if the text is damaged, or if a path leads out of the index's folder. `file` is for
// messages.
std::map<std::string, std::string> parse_weight_index(std::string_view text, std::string_view file);

}  // namespace fsdp::checkpoint
