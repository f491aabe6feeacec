// SPDX-License-Identifier: Apache-2.0
// A model through the public C ABI on every rank of the bench.
#pragma once

#include <string>
#include <vector>

#include "handles.h"
#include "perf/bench.h"

namespace perf {

struct GroupShape {
  uint64_t param_count;
  uint64_t elements;  // of each parameter
};

struct AbiModel {
  // Collective. `size` 1: every rank has a world of its own. Weights are published (all zeros).
  AbiModel(Bench &bench, uint32_t size, const fsdp_model_options &options, const std::vector<GroupShape> &groups);
  ~AbiModel();
  AbiModel(const AbiModel &) = delete;
  AbiModel &operator=(const AbiModel &) = delete;

  // Collective: weight i of every parameter of group g becomes g + i % 1024, and is published.
  void load_pattern();
  // How many weights of a group differ from that in an unshard.
  uint64_t count_wrong(size_t group);
  void check(fsdp_status status) const { tools::check(status, context.get()); }

  tools::Context context;
  tools::Model model;
  std::vector<fsdp_group *> groups;
  std::vector<GroupShape> shapes;

 private:
  void join(Bench &bench, uint32_t size);
  void add_group(const GroupShape &shape);
};

}  // namespace perf
