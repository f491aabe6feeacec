// SPDX-License-Identifier: Apache-2.0
// A trace as a viewer reads it: parsed JSON, events by process and lane.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace harness {

struct Slice {
  std::string name, category, group;
  uint64_t begin_ns, end_ns, bytes, version;
  std::string planes;
};

class TraceFile {
 public:
  // Throws what is wrong: not JSON, a key missing, slices of a lane that overlap without one being in the other.
  explicit TraceFile(const std::string &path);

  // By begin; what contains others comes before them. Instants are slices without length.
  const std::vector<Slice> &lane(uint32_t rank, const std::string &name) const;
  std::vector<Slice> of_category(uint32_t rank, const std::string &lane, const std::string &category) const;
  static std::vector<std::string> names(const std::vector<Slice> &slices);

  std::map<std::pair<uint32_t, std::string>, std::vector<Slice>> lanes;
  std::map<uint32_t, nlohmann::json> timelines;  // what each rank says of its own
  std::map<uint32_t, std::string> labels;

 private:
  void add(const nlohmann::json &event);
  void add_metadata(const nlohmann::json &event);
  std::map<std::pair<uint32_t, uint32_t>, std::string> threads_;
};

}  // namespace harness
