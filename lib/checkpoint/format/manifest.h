// SPDX-License-Identifier: Apache-2.0
// checkpoint.json: what a checkpoint holds, in which files, and how each of them must look. Ranks cut tensors alike, so
// the rows of one part are told as runs of files that have equally many: the text grows with tensors plus ranks, not
// with their product.
//
//   tensor -> parts (one, or those of tensor parallelism) -> cuts: the next rows, in the next files
//
// A row is all dimensions but the first; a scalar is one row. Where in a file a row lies is in the file's own header.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/box.h"
#include "checkpoint/format/element_type.h"

namespace fsdp::checkpoint {

inline constexpr uint64_t manifest_version = 1;
inline constexpr const char *manifest_name = "checkpoint.json";

// `rows` rows in each of `files` files, numbered from `first_file` on; in the order of rows.
struct RowCut {
  uint32_t first_file = 0, files = 1;
  uint64_t rows = 0;

  bool operator==(const RowCut &) const = default;
};

struct ManifestPart {
  Box box;  // in the tensor
  std::vector<RowCut> cuts;

  // Appends rows behind those there are: a run grows where it can.
  void add_rows(uint32_t file, uint64_t rows);
  uint64_t rows() const { return box.shape.empty() ? 1 : box.shape[0]; }
  bool operator==(const ManifestPart &) const = default;
};

struct ManifestTensor {
  std::string name;  // as in its files
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<ManifestPart> parts;  // not all of it where only some of the ranks that have it have saved
  uint32_t model = 0;               // the model that it belongs to

  bool filled() const;  // by its parts, which do not overlap
  bool operator==(const ManifestTensor &) const = default;
};

struct ManifestFile {
  std::string name;  // in the checkpoint's folder: at most one folder deep
  uint64_t bytes = 0;
  std::string header_sum;  // long_sum_of the first data_offset bytes; of a file that is no safetensors: of all of it

  bool operator==(const ManifestFile &) const = default;
};

struct ManifestModel {
  std::string name;
  std::string description;  // its mesh and strategies, for people
  uint64_t layout_hash = 0;

  bool operator==(const ManifestModel &) const = default;
};

struct Manifest {
  uint64_t sequence = 0;  // rises with every checkpoint of a folder
  uint64_t step = 0;      // the version of the weights
  uint32_t ranks = 0;
  std::vector<ManifestModel> models;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
  std::vector<ManifestTensor> bytes;        // the caller's own, one dimension of U8
  std::map<std::string, std::string> keys;  // the caller's

  bool operator==(const Manifest &) const = default;
};

std::string write_manifest(const Manifest &manifest);
// Refuses what is damaged: names that lead out of the folder, parts that overlap or lie outside of their tensor, rows
// that are missing or too many, files that are not there. Parts that are missing are refused too, but for those of
// tensors which were written without them. `file` is for messages.
Manifest parse_manifest(std::string_view text, std::string_view file);
// What a text that parse_manifest refuses says its sequence is, which may be as damaged as the rest; nothing: it cannot
// be seen.
std::optional<uint64_t> find_sequence(std::string_view text);
// Does the text end as each manifest does? Else it was not written to its end.
bool ends_as_manifest(std::string_view text);

}  // namespace fsdp::checkpoint
