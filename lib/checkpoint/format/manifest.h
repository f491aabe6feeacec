// SPDX-License-Identifier: Apache-2.0
// checkpoint.json: the contents of a checkpoint, its files, and their sizes and checksums. Most ranks have equally many
// rows of a tensor, so a part is described by runs of files that have equally many rows. The text grows with tensors
// plus ranks, not with their product.
//
//   tensor -> parts (one, or a box for each tensor-parallel rank) -> cuts, in the order of rows
//
// The rows of a part are along its axis, usually the first dimension; a scalar is one row. If a boundary between ranks
// falls inside a matrix of a stack of matrices, that matrix is a part of its own. Its rows run along the first
// dimension of the matrix: the one after the dimension that counts the matrices. The header of a file tells where each
// row is in the file.
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

// Version 2 added parts whose axis is not the first dimension. Version 3 added runs of files whose numbers
// are not adjacent (RowCut::step). A manifest without these has version 1.
inline constexpr uint64_t manifest_version = 3, first_manifest_version = 1;
inline constexpr const char *manifest_name = "checkpoint.json";

// A run of rows: `rows` rows in each of `files` files, in the order of rows. The first of these files has the number
// `first_file`, and each next number is greater by `step`.
struct RowCut {
  uint32_t first_file = 0, files = 1;
  uint64_t rows = 0;
  uint32_t step = 1;

  uint32_t file(uint64_t index) const { return first_file + static_cast<uint32_t>(index) * step; }
  bool operator==(const RowCut &) const = default;
};

struct ManifestPart {
  Box box;  // box in the tensor
  std::vector<RowCut> cuts;
  uint32_t axis = 0;  // rows follow one another along this axis; the box has size 1 in each dimension before it
  // Appends rows. The last run grows if it can.
  void add_rows(uint32_t file, uint64_t rows);
  // Joins neighbouring cuts of one file each, if there are many and their files are at equal distances. Such files come
  // from ranks of a mesh that has every n-th rank of a model.
  void join_cuts();
  uint64_t rows() const { return box.shape.empty() ? 1 : box.shape[axis]; }
  bool operator==(const ManifestPart &) const = default;
};

struct ManifestTensor {
  std::string name;  // the same as in its files
  const ElementType *type = nullptr;
  std::vector<uint64_t> shape;
  std::vector<ManifestPart> parts;  // incomplete if some ranks with parts of the tensor have not saved
  uint32_t model = 0;               // the number of the tensor's model
  bool filled() const;              // do the parts, which do not overlap, fill the tensor?
  bool operator==(const ManifestTensor &) const = default;
};

struct ManifestFile {
  std::string name;  // path in the checkpoint's folder, at most one folder deep
  uint64_t bytes = 0;
  std::string header_sum;  // long_sum_of the first data_offset bytes; of the whole file if not safetensors

  bool operator==(const ManifestFile &) const = default;
};

struct ManifestModel {
  std::string name;
  std::string description;  // describes the model's mesh and strategies, for users
  uint64_t layout_hash = 0;
  std::optional<uint64_t> rounding_seed = {};  // set if main weights are rounded stochastically

  bool operator==(const ManifestModel &) const = default;
};

struct Manifest {
  uint64_t sequence = 0;  // grows with every checkpoint of a folder
  uint64_t step = 0;      // the version of the weights
  uint32_t ranks = 0;
  std::vector<ManifestModel> models;
  std::vector<ManifestFile> files;
  std::vector<ManifestTensor> tensors;
  std::vector<ManifestTensor> bytes;        // the caller's own bytes, as tensors of one dimension of U8
  std::map<std::string, std::string> keys;  // the caller's keys

  bool operator==(const Manifest &) const = default;
};

std::string write_manifest(const Manifest &manifest);
// Throws if the manifest is damaged: names that lead out of the folder, parts that overlap or are outside of their
// tensor, too few or too many rows, and files that are not listed. Missing parts are errors, too, unless the tensor was
// written without them. `file` is for messages.
Manifest parse_manifest(std::string_view text, std::string_view file);
// Finds the sequence number in a text that parse_manifest refuses. The number may be damaged like the rest. Nothing if
// none is found.
std::optional<uint64_t> find_sequence(std::string_view text);
// Does the text end like a complete manifest? If not, it was not written to its end.
bool ends_as_manifest(std::string_view text);

}  // namespace fsdp::checkpoint
