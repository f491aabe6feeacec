// SPDX-License-Identifier: Apache-2.0
// Looks up declared objects by number and by name.
#include "memory.h"

namespace fuzz {
namespace {

// A call that returns an existing handle.
template <class Call>
fsdp_status find(Rank &rank, Call &&find_it) {
  auto *out = reinterpret_cast<fsdp_group *>(uintptr_t{0xA5A5A5A5});
  const bool null = rank.wild();
  const fsdp_status status = find_it(null ? nullptr : &out);
  require(!null || status != FSDP_OK, "no error without a place for the handle");
  if (null) return status;
  require((status == FSDP_OK) == (out != nullptr), "a handle, though the call failed, or none, though it did not");
  require(status != FSDP_OK || !rank.alone || rank.groups.contains(out), "a group that nobody has made");
  return status;
}

fsdp_status get_group_count(Rank &rank) {
  Output<uint64_t> count(rank);
  return count(fsdp_get_group_count(rank.model(), count.pointer()));
}

fsdp_status get_group(Rank &rank) {
  const fsdp_model *const model = rank.model();
  const uint64_t index = rank.number(rank.random.below(3));
  return find(rank, [&](fsdp_group **out) { return fsdp_get_group(model, index, out); });
}

// Looks up the group that is aimed at, which may belong to another model.
fsdp_status find_group(Rank &rank) {
  const auto known = rank.groups.find(rank.aim.group);
  const fsdp_model *const model = known == rank.groups.end() || rank.wild() ? rank.model() : known->second.model;
  const char *const name = known == rank.groups.end() || rank.wild() ? rank.name() : known->second.name.c_str();
  return find(rank, [&](fsdp_group **out) { return fsdp_find_group(model, name, out); });
}

fsdp_status find_param(Rank &rank) {
  Output<uint64_t> index(rank);
  const auto known = rank.groups.find(rank.aim.group);
  const fsdp_model *const model = known == rank.groups.end() || rank.wild() ? rank.model() : known->second.model;
  const std::string kept = rank.param().name;
  const char *const name = rank.wild() ? rank.name() : kept.c_str();
  return index(find(rank, [&](fsdp_group **out) { return fsdp_find_param(model, name, out, index.pointer()); }));
}

fsdp_status get_group_info(Rank &rank) {
  Output<fsdp_group_info> info(rank);
  const fsdp_status status = info(fsdp_get_group_info(rank.group(), info.pointer()));
  if (status == FSDP_OK && rank.alone && info.whole()) read_all(info.value().name, std::strlen(info.value().name) + 1);
  return status;
}

fsdp_status get_param_info(Rank &rank) {
  Output<fsdp_param> param(rank);
  fsdp_group *const group = rank.group();
  const fsdp_status status = param(fsdp_get_param_info(group, rank.number(rank.aim.param), param.pointer()));
  if (status == FSDP_OK && rank.alone && param.whole()) {
    read_all(param.value().name, std::strlen(param.value().name) + 1);
    read_all(param.value().shape, param.value().dimension_count * sizeof(uint64_t));
  }
  return status;
}

}  // namespace

const std::vector<Case> &lookup_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_get_group_count", get_group_count}, {"fsdp_get_group", get_group},
      {"fsdp_find_group", find_group},           {"fsdp_get_group_info", get_group_info},
      {"fsdp_find_param", find_param},           {"fsdp_get_param_info", get_param_info},
  };
  return cases;
}

}  // namespace fuzz
