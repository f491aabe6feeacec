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

  void check(fsdp_status status) const { tools::check(status, context.get()); }

  tools::Context context;
  tools::Model model;
  std::vector<fsdp_group *> groups;

 private:
  void join(Bench &bench, uint32_t size);
  void add_group(const GroupShape &shape);
};

}  // namespace perf
