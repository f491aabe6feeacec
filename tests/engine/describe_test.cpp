// SPDX-License-Identifier: Apache-2.0
// What fsdp_describe_model says of the layout is compared with what other calls show: chunks, addresses of views and
// gradients, counts and bytes. observe_test.cpp checks that the text is the same on every rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "element.h"
#include "harness.h"

using namespace harness;

namespace {

using Json = nlohmann::json;

constexpr uint32_t ranks = 3;

Scenario described_scenario() {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_COPIED);
  setup.model.reduce_dtype = FSDP_BFLOAT16;
  setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
  setup.groups[1].options.grad_dtype = FSDP_FLOAT32;
  setup.groups[2].params[0].flags = FSDP_PARAM_FROZEN;
  setup.groups[3].options.reduce_dtype = FSDP_FLOAT16;
  setup.groups[1].params[2].global_shape = {60, 30};
  setup.groups[1].params[2].global_offset = {9, 6};
  return setup;
}

Json description_of(const Rank &rank) {
  uint64_t size = 0;
  FSDP(fsdp_describe_model(rank.model, nullptr, &size));
  std::string text(size, '\0');
  FSDP(fsdp_describe_model(rank.model, text.data(), &size));
  text.pop_back();
  return Json::parse(text);
}

const char *name_of(fsdp_dtype dtype) {
  return dtype == FSDP_FLOAT32 ? "float32" : dtype == FSDP_BFLOAT16 ? "bfloat16" : "float16";
}

fsdp_dtype first_of(fsdp_dtype a, fsdp_dtype b, fsdp_dtype c) { return a ? a : b ? b : c; }

// The bucket of a parameter, and its place in that bucket.
struct Place {
  Json bucket, param;
};

Place place_of(const Json &group, const std::string &name) {
  std::vector<Place> found;
  for (const Json &bucket : group["buckets"])
    for (const Json &param : bucket["parameters"])
      if (param["name"] == name) found.push_back({bucket, param});
  REQUIRE(found.size() == 1);
  return found[0];
}

// The part of the parameter that a rank has according to the description: its elements in that rank's part of the
// sub-bucket.
std::pair<uint64_t, uint64_t> described_chunk(const Place &place, uint64_t count, uint32_t rank) {
  const uint64_t begin = place.param["full_offset"], end = begin + count;
  uint64_t first = 0, length = 0;
  for (const Json &sub : place.bucket["sub_buckets"])
    if (sub["full_offset"] <= begin) first = sub["full_offset"], length = sub["shard_count"];
  const uint64_t from = std::max(begin, first + rank * length), to = std::min(end, first + (rank + 1) * length);
  return from < to ? std::pair(from - begin, to - from) : std::pair(uint64_t{0}, uint64_t{0});
}

TEST(Describe, ParametersLieWhereChunksSay) {
  const Scenario setup = described_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    const Rank rank(context, setup);
    const Json text = description_of(rank);
    REQUIRE(text["groups"].size() == setup.groups.size());
    for (size_t g = 0; g < setup.groups.size(); ++g) {
      const GroupDef &def = setup.groups[g];
      const Json &group = text["groups"][g];
      REQUIRE(group["name"] == def.name && group["strategy"] == FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
      size_t described = 0;
      for (const Json &bucket : group["buckets"]) described += bucket["parameters"].size();
      REQUIRE(described == def.params.size());
      for (size_t p = 0; p < def.params.size(); ++p) {
        const ParamDef &param = def.params[p];
        const Place place = place_of(group, param.name);
        const fsdp_dtype grad = first_of(def.options.grad_dtype, setup.model.grad_dtype, param.dtype);
        REQUIRE(place.param["shape"] == param.shape);
        REQUIRE(place.param.contains("global_shape") == !param.global_shape.empty());
        if (!param.global_shape.empty())
          REQUIRE(place.param["global_shape"] == param.global_shape &&
                  place.param["global_offset"] == param.global_offset);
        REQUIRE(place.bucket["dtype"] == name_of(param.dtype) && place.bucket["grad_dtype"] == name_of(grad));
        REQUIRE(place.bucket["reduce_dtype"] ==
                name_of(first_of(def.options.reduce_dtype, setup.model.reduce_dtype, grad)));
        REQUIRE(place.bucket["frozen"] == !!(param.flags & FSDP_PARAM_FROZEN));
        for (uint32_t r = 0; r < ranks; ++r) {
          fsdp_chunk chunk = FSDP_CHUNK_INIT;
          FSDP(fsdp_get_chunk(rank.groups[g], p, r, &chunk));
          const auto [offset, count] = described_chunk(place, param.count(), r);
          REQUIRE(chunk.element_count == count && (count == 0 || chunk.element_offset == offset));
          // Boundaries do not cut a granule.
          REQUIRE(count == 0 || chunk.element_offset % place.param["granule"].get<uint64_t>() == 0);
        }
      }
    }
    FSDP(fsdp_close_context(context));
  });
}

// Buckets of a group follow each other in its buffers; groups with one slot have one address.
TEST(Describe, ViewsAndGradientsLieWhereItSays) {
  const Scenario setup = described_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Json text = description_of(rank);
    std::map<uint64_t, uint64_t> gathered, lent;  // slot to address
    for (size_t g = 0; g < rank.groups.size(); ++g) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
      for (const Json &bucket : text["groups"][g]["buckets"]) {
        std::vector<uint64_t> bases, grad_bases;
        for (const Json &param : bucket["parameters"]) {
          fsdp_group *owner = nullptr;
          uint64_t p = 0, address = 0;
          FSDP(fsdp_find_param(rank.model, param["name"].get<std::string>().c_str(), &owner, &p));
          const auto values = rank.view(g, p, FSDP_EVAL, &address);
          REQUIRE(owner == rank.groups[g]);
          REQUIRE(values[0] == round_to(initial_weight(setup.ordinal(g, p), 0), setup.groups[g].params[p].dtype));
          const uint64_t offset = param["full_offset"];
          bases.push_back(address - offset * fsdp_get_dtype_size(setup.groups[g].params[p].dtype));
          if (bucket["frozen"]) continue;
          fsdp_tensor grad = FSDP_TENSOR_INIT;
          int32_t accumulate = 0;
          FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, nullptr, &grad, &accumulate));
          REQUIRE(name_of(grad.dtype) == bucket["grad_dtype"].get<std::string>());
          grad_bases.push_back(reinterpret_cast<uint64_t>(grad.data) - offset * grad.element_size);
        }
        for (const uint64_t base : bases) REQUIRE(base == bases[0]);
        for (const uint64_t base : grad_bases) REQUIRE(base == grad_bases[0]);
        if (bucket != text["groups"][g]["buckets"][0]) continue;
        gathered.emplace(text["gather_pool"]["slots"][g], bases[0]);
        REQUIRE(gathered[text["gather_pool"]["slots"][g]] == bases[0]);
        if (grad_bases.empty()) continue;
        lent.emplace(text["grad_pool"]["slots"][g], grad_bases[0]);
        REQUIRE(lent[text["grad_pool"]["slots"][g]] == grad_bases[0]);
      }
      FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    REQUIRE(gathered.size() == 2 && gathered[0] != gathered[1]);
    REQUIRE(lent.size() == 2 && lent[0] != lent[1]);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Describe, NumbersEqualThoseOfTheModelInfo) {
  const Scenario setup = described_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    const Rank rank(context, setup);
    const Json text = description_of(rank);
    const Memory memory = memory_of(rank.model, rank.rank);
    uint64_t elements = 0;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) elements += param.count();
    REQUIRE(text["elements"] == elements && memory.element_count == elements);
    REQUIRE(std::stoull(text["layout_hash"].get<std::string>(), nullptr, 16) == memory.layout_hash);
    REQUIRE(text["replicate_size"] == 1 && text["shard_size"] == ranks && text["padding"] == memory.padding_count);
    REQUIRE(text["gather_pool"]["bytes"] == memory.gather_pool_bytes);
    REQUIRE(text["gather_pool"]["lower_bound_bytes"] == memory.gather_lower_bound_bytes);
    REQUIRE(text["grad_pool"]["bytes"] == memory.reduce_pool_bytes);
    REQUIRE(text["grad_pool"]["lower_bound_bytes"] == memory.reduce_lower_bound_bytes);
    uint64_t padding = 0;
    for (size_t g = 0; g < setup.groups.size(); ++g) {
      uint64_t gathered = 0;
      for (const Json &bucket : text["groups"][g]["buckets"]) {
        uint64_t used = 0, shard = 0;
        for (const Json &param : bucket["parameters"]) {
          uint64_t count = 1;
          for (const Json &size : param["shape"]) count *= size.get<uint64_t>();
          used += count;
        }
        uint64_t full = 0;
        for (const Json &sub : bucket["sub_buckets"]) {
          const uint64_t slice = sub["shard_count"].get<uint64_t>();
          full = (full + 127) / 128 * 128;  // each begins aligned
          REQUIRE(sub["full_offset"] == full);
          full += ranks * slice, shard += slice;
        }
        REQUIRE(bucket["shard_count"] == shard && bucket["full_count"] == full);
        REQUIRE(bucket["padding_count"] == full - used);
        padding += full - used;
        gathered += full * (bucket["dtype"] == "float32" ? 4 : 2);
      }
      // Buckets begin at aligned places.
      REQUIRE(text["groups"][g]["gathered_bytes"] >= gathered && text["groups"][g]["gathered_bytes"] < gathered + 4096);
    }
    REQUIRE(padding == memory.padding_count);
    FSDP(fsdp_close_context(context));
  });
}

// Each parameter is in one part, in the declared order, and no two parts of a group share bytes.
TEST(Describe, PartsHoldTheParametersOfTheirGroup) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.groups = {{"group", {}}};
  for (const char *name : {"a", "b", "c", "d", "e"}) setup.groups[0].params.push_back({name, {64, 32}});
  setup.groups[0].params[1].flags = FSDP_PARAM_FROZEN;
  setup.model.max_pending_bytes = uint64_t{2} * 64 * 32 * sizeof(float);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    const Rank rank(context, setup);
    const Json group = description_of(rank)["groups"][0];
    std::vector<std::string> names;
    std::set<uint64_t> offsets;
    for (const Json &part : group["full_grad_parts"]) {
      REQUIRE(part["bytes"] == part["parameters"].size() * 64 * 32 * sizeof(float));
      offsets.insert(part["offset"].get<uint64_t>());
      for (const Json &name : part["parameters"]) names.push_back(name);
    }
    REQUIRE(group["full_grad_parts"].size() > 1 && offsets.size() > 1);
    REQUIRE(names == (std::vector<std::string>{"a", "c", "d", "e"}));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
