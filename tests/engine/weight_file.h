// SPDX-License-Identifier: Apache-2.0
// Files of weights as other programs write them, made byte by byte.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace harness {

struct Given {
  std::string name, type;
  std::vector<uint64_t> shape;
  std::string bytes;
};

template <class T>
std::string bytes_of(const std::vector<T> &values) {
  return {reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T)};
}

inline void write_file(const std::string &path, const std::vector<Given> &tensors,
                       const nlohmann::json &metadata = {}) {
  nlohmann::json header = nlohmann::json::object();
  uint64_t at = 0;
  for (const Given &one : tensors) {
    header[one.name] = {{"dtype", one.type}, {"shape", one.shape}, {"data_offsets", {at, at + one.bytes.size()}}};
    at += one.bytes.size();
  }
  if (!metadata.is_null()) header["__metadata__"] = metadata;
  const std::string json = header.dump();
  const uint64_t length = json.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char *>(&length), sizeof length) << json;
  for (const Given &one : tensors) file << one.bytes;
}

}  // namespace harness
