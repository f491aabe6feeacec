// SPDX-License-Identifier: Apache-2.0
// A table lists every field of every struct that callers fill: its legal values, the refused ones, and that 0 means its
// default. It is compared with bindings/abi/abi.json, so that a field without a line here is an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "fields.h"
#include "misuse.h"

using namespace harness;
using namespace fields;
using misuse::infinity, misuse::not_a_number;

namespace {

struct Field {
  std::string name;
  std::vector<double> legal;    // beside 0
  std::vector<double> refused;  // with the field's name in the message
};

const double unknown_flag = 1, next_flag = 1u << 31;

// Pointers, and fields that count only with another field, have neither kind of value. struct_size is tested by
// options_test and misuse_*_test.
const std::map<std::string, std::vector<Field>> table = {
    {"fsdp_context_options",
     {{"struct_size", {}, {0, 8}},
      {"flags",
       {FSDP_CONTEXT_DEBUG, FSDP_CONTEXT_NO_OVERLAP, FSDP_CONTEXT_TRACE},
       {unknown_flag, next_flag, FSDP_LAST}},
      {"world_size", {}, {}},
      {"rank", {}, {}},
      {"ranks_per_host", {1, 8}, {}},
      {"rendezvous", {}, {}},
      {"device", {FSDP_DEVICE_HOST}, {-1, 3}},
      {"device_index", {5}, {-1}},
      {"device_transport", {1, 2, 77}, {}},
      {"timeout_ms", {1, 1000}, {}},
      {"heartbeat_timeout_ms", {1000, 60000}, {1, 999}},
      {"log_level", {1, 2, 3, 4}, {-1, 5}},
      {"interrupted_flag", {}, {}},
      {"interrupted", {}, {}},
      {"interrupted_data", {}, {}},
      {"log", {}, {}},
      {"log_data", {}, {}},
      {"trace_directory", {}, {}},
      {"trace_events", {16, 65536}, {1e15}},
      {"flight_directory", {}, {}},
      {"flight_events", {2, 1024, 1048576}, {1048577, 4e9}},
      {"debug_delay_us", {1, 50}, {}},
      {"debug_delay_seed", {1, 9e15}, {}},
      {"debug_failed_allocation", {9e15}, {}}}},
    {"fsdp_mesh_options",
     {{"struct_size", {}, {0, 8}},
      {"replicate_size", {1}, {2}},
      {"shard_size", {1}, {2}},
      {"ranks", {}, {}},
      {"rank_count", {}, {1}},
      {"reduction_block_size", {1}, {3}}}},
    {"fsdp_model_options",
     {{"struct_size", {}, {0, 8}},
      {"mesh", {}, {}},
      {"flags",
       {FSDP_MODEL_NO_PREFETCH, FSDP_MODEL_FORCE_COMMUNICATION},
       {unknown_flag, next_flag, FSDP_CONTEXT_DEBUG}},
      {"strategy", {1, 2, 3, 4}, {-1, 5}},
      {"outer_strategy", {1}, {-1, 2, 3}},
      {"unshard_mode", {1, 2}, {-1, 3}},
      {"grad_dtype", {1, 2, 3}, {-1, 4}},
      {"reduce_dtype", {1, 2, 3}, {-1, 4}},
      {"grad_op", {1, 2}, {-1, 4}},
      {"reduce_policy", {1, 2}, {-1, 3}},
      {"grad_factor", {0.5, not_a_number}, {}},
      {"optimizer", {1, 2, 3}, {-1, 4}},
      {"max_pending_groups", {1, 100}, {}},
      {"prefetch_depth", {1, 100}, {}},
      {"view_kind", {1, 2}, {-1, 3}},
      {"prefetch_bytes", {1, 9e15}, {}},
      {"save_staging_bytes", {33554432, 1e10}, {1, 33554431}},
      {"scale_rounding", {1, 2}, {-1, 3}},
      {"quantize_from", {1, 2}, {-1, 3}},
      {"scale_rule", {1, 2}, {-1, 3}},
      {"plane_policy", {1, 2, 3}, {-1, 4}},
      {"max_pending_bytes", {1, 9e15}, {}},
      {"main_storage", {1, 2, 3}, {-1, 4}},
      {"reserved", {}, {1}},
      {"rounding_seed", {1, 9e15}, {}},
      {"matrix_bytes", {1, 9e15}, {}},
      {"state_home", {1, 2}, {-1, 4}},
      {"main_home", {1, 2}, {-1, 4}},
      {"home_directory", {}, {}},
      {"turn_bytes", {65536, 9e15}, {1, 65535}},
      {"turns", {2, 16}, {1, 17}},
      {"grad_home", {1, 2}, {-1, 4}}}},
    {"fsdp_schedule_options",
     {{"struct_size", {}, {0, 8}},
      {"visits", {}, {}},
      {"visit_count", {}, {}},
      {"visit_stride", {}, {}},
      {"held_groups", {1, 4e9}, {}},
      {"reserved", {}, {1}}}},
    {"fsdp_param",
     {{"struct_size", {}, {0, 8}},
      {"name", {}, {}},
      {"shape", {}, {}},
      {"dimension_count", {1}, {17}},
      {"dtype", {1, 2, 3}, {-1, 4}},
      {"flags",
       {FSDP_PARAM_FROZEN, FSDP_PARAM_NO_DECAY, FSDP_PARAM_LR_ZERO},
       {unknown_flag, next_flag, FSDP_GROUP_ROOT}},
      {"granule", {1, 3}, {-1, 4}},
      {"granule_rows", {7}, {}},
      {"lr_scale", {0.25, 3}, {-1, not_a_number, infinity}},
      {"user_data", {}, {}},
      {"global_shape", {}, {}},
      {"global_offset", {}, {}},
      {"quantization", {1, 2, 3}, {-1, 4}},
      {"missing_grad", {1, 2}, {-1, 3}},
      {"row_dimensions", {1}, {17}},
      {"piece", {}, {1}},
      {"optimizer", {1, 2}, {-1, 3}},
      {"matrix", {}, {-1, 2}},
      {"matrix_splits", {}, {}},
      {"matrix_split_count", {}, {1}}}},
    {"fsdp_group_options",
     {{"struct_size", {}, {0, 8}},
      {"flags", {FSDP_GROUP_RESIDENT, FSDP_GROUP_ROOT}, {unknown_flag, next_flag, FSDP_PARAM_FROZEN}},
      {"strategy", {1, 2, 3, 4}, {-1, 5}},
      {"grad_dtype", {1, 2, 3}, {-1, 4}},
      {"reduce_dtype", {1, 2, 3}, {-1, 4}},
      {"main_storage", {1, 2, 3}, {-1, 4}},
      {"backward_weights", {1, 2}, {-1, 3}},
      {"mesh", {}, {}},
      {"grad_op", {FSDP_GRAD_OP_MEAN, FSDP_GRAD_OP_SUM}, {-1, 4}},
      {"outer_strategy", {FSDP_OUTER_NO_SHARD}, {-1, FSDP_OUTER_OPTIM, 3}},
      {"grad_factor", {0.5, not_a_number}, {}}}},
    {"fsdp_adamw_options",
     {{"struct_size", {}, {0, 8}},
      {"beta1", {0.5}, {-0.1, 1, not_a_number}},
      {"beta2", {0.5}, {-0.1, 1, not_a_number}},
      {"epsilon", {1e-3}, {-1, not_a_number, infinity}},
      {"weight_decay", {0.1}, {-1, not_a_number, infinity}},
      {"step", {7}, {}},
      {"flags",
       {FSDP_ADAMW_BETA1_ZERO, FSDP_ADAMW_BETA2_ZERO, FSDP_ADAMW_EPSILON_ZERO},
       {unknown_flag, next_flag, FSDP_PARAM_LR_ZERO}},
      {"reserved", {}, {1}}}},
    {"fsdp_matrix_options",
     {{"struct_size", {}, {0, 8}},
      {"source", {}, {}},
      {"target", {}, {}},
      {"dtype", {1, 2, 3}, {-1, 4}},
      {"reserved", {}, {1}}}},
    {"fsdp_save_options",
     {{"struct_size", {}, {0, 8}},
      {"step", {1, 9007199254740992.0}, {9007199254740994.0}},
      {"keep", {1, 4e9}, {}},
      {"flags",
       {FSDP_SAVE_REPLACE, FSDP_SAVE_COMMIT_MANIFEST},
       {unknown_flag, next_flag, FSDP_LOAD_FALLBACK, FSDP_SAVE_REPLACE | FSDP_SAVE_COMMIT_MANIFEST}}}},
    {"fsdp_load_options",
     {{"struct_size", {}, {0, 8}},
      {"flags",
       {FSDP_LOAD_WEIGHTS_ONLY, FSDP_LOAD_ALLOW_MISSING, FSDP_LOAD_ALLOW_UNEXPECTED, FSDP_LOAD_FALLBACK,
        FSDP_LOAD_IF_ANY, FSDP_LOAD_ONE_REPLICA},
       {unknown_flag, next_flag, FSDP_SAVE_REPLACE}},
      {"reserved", {}, {1}}}},
};
// Elements of arrays, which have no struct_size: their own tests are misuse_model_test, misuse_optimizer_test and
// load_weights_test.
const std::set<std::string> elements = {"fsdp_visit", "fsdp_grad", "fsdp_rename"};

// The call that takes the struct, in a world of one.
class Calls {
 public:
  Calls() {
    FSDP(fsdp_create_local_contexts(1, nullptr, &context_));
    FSDP(fsdp_create_model(context_, nullptr, &model_));
  }
  ~Calls() {
    fsdp_destroy_model(model_);
    fsdp_destroy_context(context_);
  }
  fsdp_status operator()(const fsdp_context_options &options) {
    fsdp_context *context = nullptr;
    const fsdp_status status = fsdp_create_local_contexts(1, &options, &context);
    fsdp_destroy_context(context);
    return status;
  }
  fsdp_status operator()(const fsdp_mesh_options &options) {
    fsdp_mesh *mesh = nullptr;
    const fsdp_status status = fsdp_create_mesh(context_, &options, &mesh);
    fsdp_destroy_mesh(mesh);
    return status;
  }
  fsdp_status operator()(const fsdp_model_options &options) {
    fsdp_model *model = nullptr;
    const fsdp_status status = fsdp_create_model(context_, &options, &model);
    fsdp_destroy_model(model);
    return status;
  }
  fsdp_status operator()(const fsdp_schedule_options &options) {
    return fsdp_set_schedule(model_, FSDP_SCHEDULE_ANY, &options);
  }
  fsdp_status operator()(fsdp_param param) {
    const std::string name = "p" + std::to_string(++count_);
    const uint64_t shape[16] = {4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    param.name = name.c_str();
    param.shape = shape;
    fsdp_group *group = nullptr;
    return fsdp_create_group(model_, name.c_str(), &param, 1, sizeof param, nullptr, &group);
  }
  fsdp_status operator()(const fsdp_group_options &options) {
    const std::string name = "g" + std::to_string(++count_);
    fsdp_group *group = nullptr;
    return fsdp_create_group(model_, name.c_str(), nullptr, 0, sizeof(fsdp_param), &options, &group);
  }

 private:
  fsdp_context *context_ = nullptr;
  fsdp_model *model_ = nullptr;
  int count_ = 0;
};

// message: of the last call.
template <class T, class Call>
void check_fields(const char *name, const T &init, Call &&call,
                  const std::function<std::string()> &message = last_message) {
  for (const Field &field : table.at(name)) {
    for (const double value : field.legal) {
      T options = init;
      poke(options, name, field.name, value);
      EXPECT_EQ(call(options), FSDP_OK) << name << "." << field.name << " = " << value << ": " << last_message();
    }
    for (const double value : field.refused) {
      T options = init;
      poke(options, name, field.name, value);
      EXPECT_EQ(call(options), FSDP_INVALID_ARGUMENT) << name << "." << field.name << " = " << value;
      EXPECT_NE(message().find(field.name), std::string::npos) << name << "." << field.name << ": " << message();
    }
  }
}

TEST(Fields, TheTableNamesThemAll) {
  for (const auto &one : described_abi()["structs"]) {
    const std::string name = one["name"];
    std::string doc = one["doc"];
    std::ranges::replace(doc, '\n', ' ');
    const bool output = doc.find("Output only") != std::string::npos || name == "fsdp_chunk" || name == "fsdp_shard";
    if (output || elements.contains(name)) continue;
    ASSERT_TRUE(table.contains(name)) << name << " has no line in the table";
    std::vector<std::string> declared, listed;
    for (const auto &field : one["fields"]) declared.push_back(field["name"]);
    for (const Field &field : table.at(name)) listed.push_back(field.name);
    EXPECT_EQ(declared, listed) << name;
  }
}

TEST(Fields, TakeWhatIsLegalAndNameWhatIsNot) {
  Calls calls;
  check_fields("fsdp_context_options", fsdp_context_options(FSDP_CONTEXT_OPTIONS_INIT), calls);
  check_fields("fsdp_model_options", fsdp_model_options(FSDP_MODEL_OPTIONS_INIT), calls);
  check_fields("fsdp_schedule_options", fsdp_schedule_options(FSDP_SCHEDULE_OPTIONS_INIT), calls);
  check_fields("fsdp_param", fsdp_param(FSDP_PARAM_INIT), calls);
  check_fields("fsdp_group_options", fsdp_group_options(FSDP_GROUP_OPTIONS_INIT), calls);
  check_fields("fsdp_mesh_options", fsdp_mesh_options(FSDP_MESH_OPTIONS_INIT), calls);
}

// Makes a step with these options, always from the same weights, and returns the new weights.
std::vector<float> step_with(const fsdp_adamw_options &options, fsdp_status *status = nullptr, uint32_t param_flags = 0,
                             double lr_scale = 0, std::string *message = nullptr) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  scenario.groups[0].params[0].flags = param_flags;
  scenario.groups[0].params[0].lr_scale = lr_scale;
  std::vector<float> weights;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    for (int step = 0; step < 2; ++step) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 0.25f + static_cast<float>(step));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      const fsdp_status found = fsdp_step_adamw(rank.model, 0.01, &options, nullptr);
      if (status) *status = found;
      if (message) *message = fsdp_get_last_message();
      if (found) FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    weights = rank.read(0, 0);
  });
  return weights;
}

TEST(Fields, EachOptionOfAdamWIsChecked) {
  std::string message;  // each thread has a message of its own
  const auto step = [&](const fsdp_adamw_options &options) {
    fsdp_status status = FSDP_OK;
    step_with(options, &status, 0, 0, &message);
    return status;
  };
  check_fields("fsdp_adamw_options", fsdp_adamw_options(FSDP_ADAMW_OPTIONS_INIT), step, [&] { return message; });
}

TEST(Fields, EachOptionOfMatricesIsChecked) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  scenario.groups = {{"group", {{"w", {4, 3}}}}};
  scenario.groups[0].params[0].matrix = FSDP_MATRIX_LAST_TWO;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    finish_step(rank, 0);
    const auto collect = [&](const fsdp_matrix_options &options) {
      const fsdp_status status = fsdp_collect_matrices(rank.model, &options, nullptr);
      if (status != FSDP_OK) return status;
      fsdp_matrix matrix = FSDP_MATRIX_INIT;
      FSDP(fsdp_next_matrix(rank.model, nullptr, &matrix));
      REQUIRE(matrix.dtype == (options.dtype ? options.dtype : FSDP_FLOAT32));
      FSDP(fsdp_return_matrices(rank.model, nullptr));
      return status;
    };
    check_fields("fsdp_matrix_options", fsdp_matrix_options(FSDP_MATRIX_OPTIONS_INIT), collect);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
  });
}

// A folder each, since a step is saved once.
TEST(Fields, OfSavesAndLoads) {
  std::string path = "/var/tmp/fields-XXXXXX";
  ASSERT_NE(::mkdtemp(path.data()), nullptr);
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    int folders = 0;
    check_fields("fsdp_save_options", fsdp_save_options(FSDP_SAVE_OPTIONS_INIT), [&](const fsdp_save_options &options) {
      return fsdp_save(rank.model, (path + "/" + std::to_string(++folders)).c_str(), &options);
    });
    FSDP(fsdp_save(rank.model, (path + "/loaded").c_str(), nullptr));
    FSDP(fsdp_begin_update(rank.model, nullptr));
    check_fields("fsdp_load_options", fsdp_load_options(FSDP_LOAD_OPTIONS_INIT), [&](const fsdp_load_options &options) {
      return fsdp_load(rank.model, (path + "/loaded").c_str(), &options, nullptr);
    });
    FSDP(fsdp_publish_weights(rank.model, nullptr));
  });
  std::filesystem::remove_all(path);
}

TEST(Fields, AZeroIsTheDefaultAndAFlagMeansZero) {
  fsdp_adamw_options zero = FSDP_ADAMW_OPTIONS_INIT, given = zero;
  given.beta1 = 0.9;
  given.beta2 = 0.999;
  given.epsilon = 1e-8;
  EXPECT_EQ(step_with(zero), step_with(given));
  EXPECT_EQ(step_with(zero), step_with(zero, nullptr, 0, 1.0));
  const std::pair<uint32_t, double fsdp_adamw_options::*> flags[] = {
      {FSDP_ADAMW_BETA1_ZERO, &fsdp_adamw_options::beta1},
      {FSDP_ADAMW_BETA2_ZERO, &fsdp_adamw_options::beta2},
      {FSDP_ADAMW_EPSILON_ZERO, &fsdp_adamw_options::epsilon}};
  for (const auto &[flag, field] : flags) {
    fsdp_adamw_options meant = zero;
    meant.flags = flag;
    // With gradients of 1 an epsilon of 1e-8 has no visible effect, so smaller gradients measure it.
    if (flag != FSDP_ADAMW_EPSILON_ZERO) {
      EXPECT_NE(step_with(zero), step_with(meant)) << flag;
    }
    meant.*field = 0.5;
    fsdp_status status = FSDP_OK;
    step_with(meant, &status);
    EXPECT_EQ(status, FSDP_INVALID_ARGUMENT) << flag;
  }
  EXPECT_NE(step_with(zero), step_with(zero, nullptr, FSDP_PARAM_LR_ZERO));
}

// Other families may share some bits of FSDP_CONTEXT_*, because only calls that make a context take those flags.
TEST(Flags, HaveBitsThatNothingElseHas) {
  constexpr uint32_t shared = FSDP_CONTEXT_DEBUG | FSDP_CONTEXT_NO_OVERLAP | FSDP_CONTEXT_TRACE;
  uint32_t seen = 0, seen_shared = 0;
  for (const auto &family : described_abi()["constants"]) {
    if (!family["type"].is_null()) {
      for (const auto &[name, value] : family["values"].items()) EXPECT_LT(value.get<int64_t>(), 256) << name;
      continue;
    }
    for (const auto &[name, value] : family["values"].items()) {
      const auto bit = value.get<uint32_t>();
      EXPECT_EQ(bit & (bit - 1), 0u) << name << " is not one bit";
      EXPECT_EQ(bit & 0xFF, 0u) << name << " lies where enums do";
      uint32_t &all = bit & shared && !name.starts_with("FSDP_CONTEXT_") ? seen_shared : seen;
      EXPECT_EQ(all & bit, 0u) << name << " has the bit of another flag";
      all |= bit;
    }
  }
  EXPECT_NE(seen, 0u);
}

// The header names each pair of flags that shares a bit, and no other flag.
TEST(Flags, ShareBitsOnlyWhereTheHeaderSaysSo) {
  std::string rule;
  std::ifstream header(std::filesystem::path(FSDP_TEST_ABI).parent_path() / "../../include/fsdp.h");
  for (std::string line; std::getline(header, line);) {
    if (rule.empty() ? line.find(" *   Flags ") == 0 : line.find(" *              ") == 0)
      rule += line.substr(2) + " ";
    else if (!rule.empty())
      break;
  }
  ASSERT_NE(rule, "");
  std::map<uint32_t, std::vector<std::string>> of_bit;
  for (const auto &family : described_abi()["constants"])
    for (const auto &[name, value] : family["values"].items())
      if (family["type"].is_null()) of_bit[value.get<uint32_t>()].push_back(name);
  for (const auto &[bit, names] : of_bit)
    for (const std::string &name : names)
      EXPECT_EQ(rule.find(name) != std::string::npos, names.size() > 1) << name << " has bit " << bit << ": " << rule;
}

// Tries each flag of each family in each place that takes flags. In saves and loads a FSDP_CONTEXT_* flag that shares
// its bit counts as the flag of saves or loads; all other foreign flags are refused.
TEST(Flags, OfAnotherFamilyAreRefused) {
  Calls calls;
  const auto expect_refused = [&](uint32_t own, const std::string &what,
                                  const std::function<fsdp_status(uint32_t)> &call) {
    for (const auto &family : described_abi()["constants"])
      for (const auto &[name, value] : family["values"].items())
        if (const auto bit = family["type"].is_null() ? value.get<uint32_t>() : 0; bit && !(own & bit)) {
          EXPECT_EQ(call(bit), FSDP_INVALID_ARGUMENT) << what << " takes " << name;
          EXPECT_NE(last_message().find("unknown bits"), std::string::npos) << what << ", " << name << last_message();
        }
  };
  const auto of_options = [&]<class T>(const char *name, T options, auto &&call) {
    uint32_t own = 0;
    for (const Field &field : table.at(name))
      if (field.name == "flags")
        for (const double flag : field.legal) own |= static_cast<uint32_t>(flag);
    expect_refused(own, name, [&](uint32_t flags) {
      options.flags = flags;
      return call(options);
    });
  };
  of_options("fsdp_context_options", fsdp_context_options(FSDP_CONTEXT_OPTIONS_INIT), calls);
  of_options("fsdp_model_options", fsdp_model_options(FSDP_MODEL_OPTIONS_INIT), calls);
  of_options("fsdp_group_options", fsdp_group_options(FSDP_GROUP_OPTIONS_INIT), calls);
  of_options("fsdp_param", fsdp_param(FSDP_PARAM_INIT), calls);
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    fsdp_group *group = rank.groups[0];
    float number = 0;
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    of_options("fsdp_save_options", fsdp_save_options(FSDP_SAVE_OPTIONS_INIT),
               [&](const fsdp_save_options &options) { return fsdp_save(rank.model, "none", &options); });
    of_options("fsdp_load_options", fsdp_load_options(FSDP_LOAD_OPTIONS_INIT),
               [&](const fsdp_load_options &options) { return fsdp_load(rank.model, "none", &options, nullptr); });
    of_options("fsdp_adamw_options", fsdp_adamw_options(FSDP_ADAMW_OPTIONS_INIT),
               [&](const fsdp_adamw_options &options) { return fsdp_step_adamw(rank.model, 0.1, &options, nullptr); });
    expect_refused(FSDP_LAST, "fsdp_reduce_grad",
                   [&](uint32_t flags) { return fsdp_reduce_grad(group, flags, nullptr); });
    expect_refused(FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT, "fsdp_acquire_grad",
                   [&](uint32_t flags) { return fsdp_acquire_grad(group, 0, flags, nullptr, &grad, &accumulate); });
    expect_refused(FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT, "fsdp_acquire_grads", [&](uint32_t flags) {
      return fsdp_acquire_grads(group, flags, nullptr, &grad, 1, sizeof grad, &accumulate);
    });
    expect_refused(FSDP_GRAD_NO_WAIT, "fsdp_put_grad",
                   [&](uint32_t flags) { return fsdp_put_grad(group, 0, nullptr, FSDP_FLOAT32, 0, flags, nullptr); });
    expect_refused(FSDP_LAST, "fsdp_finish_grads",
                   [&](uint32_t flags) { return fsdp_finish_grads(rank.model, 1, flags, nullptr); });
    expect_refused(FSDP_RENAME_TRANSPOSED, "fsdp_rename", [&](uint32_t flags) {
      const fsdp_rename rename = {"theirs", "ours", 0, 0, 0, flags, 0};
      return fsdp_load_weights(rank.model, "none", &rename, 1, sizeof rename, nullptr, nullptr);
    });
    const std::pair<const char *, std::function<fsdp_status(uint32_t)>> without[] = {
        {"fsdp_unshard", [&](uint32_t flags) { return fsdp_unshard(group, FSDP_FORWARD, flags, nullptr); }},
        {"fsdp_reshard", [&](uint32_t flags) { return fsdp_reshard(group, FSDP_FORWARD, flags, nullptr); }},
        {"fsdp_unshard_piece",
         [&](uint32_t flags) { return fsdp_unshard_piece(group, 0, FSDP_FORWARD, flags, nullptr); }},
        {"fsdp_reshard_piece",
         [&](uint32_t flags) { return fsdp_reshard_piece(group, 0, FSDP_FORWARD, flags, nullptr); }},
        {"fsdp_prefetch", [&](uint32_t flags) { return fsdp_prefetch(group, FSDP_FORWARD, flags, nullptr); }},
        {"fsdp_complete_grad", [&](uint32_t flags) { return fsdp_complete_grad(group, 0, flags, nullptr); }},
        {"fsdp_check_replicas", [&](uint32_t flags) { return fsdp_check_replicas(rank.model, flags, nullptr); }},
        {"fsdp_load_param",
         [&](uint32_t flags) { return fsdp_load_param(group, 0, &number, FSDP_FLOAT32, 1, FSDP_EVERY_RANK, flags); }},
        {"fsdp_read_param",
         [&](uint32_t flags) { return fsdp_read_param(group, 0, &number, FSDP_FLOAT32, 1, FSDP_EVERY_RANK, flags); }},
        {"fsdp_load_grad",
         [&](uint32_t flags) { return fsdp_load_grad(group, 0, &number, FSDP_FLOAT32, 1, FSDP_EVERY_RANK, flags); }},
        {"fsdp_read_grad",
         [&](uint32_t flags) { return fsdp_read_grad(group, 0, &number, FSDP_FLOAT32, 1, FSDP_EVERY_RANK, flags); }}};
    for (const auto &[name, call] : without) expect_refused(0, name, call);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Flags, AValueOfAnEnumIsNone) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    fsdp_group *group = rank.groups[0];
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    std::vector<float> data(scenario.groups[0].params[0].count());
    for (const auto &family : described_abi()["constants"]) {
      if (family["type"].is_null()) continue;
      for (const auto &[name, value] : family["values"].items()) {
        const auto number = value.get<uint32_t>();
        if (!number) continue;
        for (const fsdp_status status :
             {fsdp_reduce_grad(group, number, nullptr), fsdp_unshard(group, FSDP_FORWARD, number, nullptr),
              fsdp_reshard(group, FSDP_FORWARD, number, nullptr), fsdp_prefetch(group, FSDP_FORWARD, number, nullptr),
              fsdp_acquire_grad(group, 0, number, nullptr, &grad, &accumulate),
              fsdp_put_grad(group, 0, data.data(), FSDP_FLOAT32, data.size(), number, nullptr),
              fsdp_finish_grads(rank.model, 1.0, number, nullptr),
              fsdp_load_param(group, 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, number),
              fsdp_read_param(group, 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, number),
              fsdp_load_grad(group, 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, number),
              fsdp_read_grad(group, 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, number)})
          require_error(status, FSDP_INVALID_ARGUMENT, {});
        require_error(fsdp_reduce_grad(group, number, nullptr), FSDP_INVALID_ARGUMENT, {"flags has unknown bits"});
      }
    }
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
