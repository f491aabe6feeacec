// SPDX-License-Identifier: Apache-2.0
// Reads a model from JSON. Every error names the place in the file, as "groups[1].params[0].shape".
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "plan/job_spec.h"
#include "plan/names.h"

namespace plan {
namespace {

using Json = nlohmann::json;
constexpr uint64_t max_groups = 1'000'000;

template <class... Args>
[[noreturn]] void fail(const std::string &where, fmt::format_string<Args...> format, Args &&...args) {
  throw std::invalid_argument(where + ": " + fmt::format(format, std::forward<Args>(args)...));
}

// A JSON object that knows where it stands in its file and reports members that were not asked for.
class Object {
 public:
  Object(const Json &json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) fail(where_, "must be an object, is {}", json.type_name());
  }

  std::string text(const char *key) {
    const auto &value = require(key);
    if (!value.is_string()) fail(at(key), "must be a string, is {}", value.type_name());
    return value.get<std::string>();
  }

  uint64_t number(const char *key, uint64_t otherwise) {
    const auto *value = find(key);
    return value ? as_number(*value, at(key)) : otherwise;
  }

  uint32_t flag(const char *key, uint32_t bit) {
    const auto *value = find(key);
    if (value && !value->is_boolean()) fail(at(key), "must be true or false, is {}", value->type_name());
    return value && value->get<bool>() ? bit : 0;
  }

  int32_t word(const char *key, const Names &names) {
    const auto *value = find(key);
    if (!value) return 0;
    const auto found = value->is_string() ? names.find(value->get<std::string>()) : names.end();
    if (found != names.end()) return found->second;
    std::string choices;
    for (const auto &[name, number] : names) choices += (choices.empty() ? "" : ", ") + name;
    fail(at(key), "must be one of {}, is {}", choices, value->dump());
  }

  const Json &array(const char *key) {
    const auto &value = require(key);
    if (!value.is_array()) fail(at(key), "must be an array, is {}", value.type_name());
    return value;
  }

  // Empty if the member is missing.
  std::vector<uint64_t> numbers(const char *key) {
    std::vector<uint64_t> values;
    if (!find(key)) return values;
    const auto &all = array(key);
    for (size_t i = 0; i < all.size(); ++i) values.push_back(as_number(all[i], fmt::format("{}[{}]", at(key), i)));
    return values;
  }

  static uint64_t as_number(const Json &value, const std::string &where) {
    if (!value.is_number_unsigned()) fail(where, "must be a whole number of 0 or more, is {}", value.dump());
    return value.get<uint64_t>();
  }

  std::string at(const char *key) const { return where_.empty() ? key : where_ + "." + key; }

  void refuse_unknown() const {
    for (const auto &[key, value] : json_.items())
      if (!known_.contains(key)) fail(where_.empty() ? "top level" : where_, "unknown member \"{}\"", key);
  }

  const Json &require(const char *key) {
    if (const auto *value = find(key)) return *value;
    fail(at(key), "is missing");
  }

 private:
  const Json *find(const char *key) {
    known_.insert(key);
    const auto found = json_.find(key);
    return found == json_.end() ? nullptr : &*found;
  }

  const Json &json_;
  std::string where_;
  std::set<std::string> known_;
};

uint32_t small_number(Object &object, const char *key, uint32_t otherwise) {
  const uint64_t value = object.number(key, otherwise);
  if (value > UINT32_MAX) fail(object.at(key), "must be below 2^32, is {}", value);
  return static_cast<uint32_t>(value);
}

ParamSpec read_param(const Json &json, const std::string &where) {
  Object object(json, where);
  ParamSpec param;
  param.name = object.text("name");
  object.require("shape");
  param.shape = object.numbers("shape");
  param.dtype = object.word("dtype", param_dtypes);
  param.flags = object.flag("frozen", FSDP_PARAM_FROZEN) | object.flag("no_decay", FSDP_PARAM_NO_DECAY);
  param.granule = object.word("granule", granules);
  param.granule_rows = object.number("granule_rows", 0);
  param.row_dimensions = small_number(object, "row_dimensions", 0);
  param.quantization = object.word("quantization", quantizations);
  param.piece = small_number(object, "piece", 0);
  param.matrix = object.flag("matrix", FSDP_MATRIX_LAST_TWO);
  param.optimizer = object.word("optimizer", param_optimizers);
  param.matrix_splits = object.numbers("matrix_splits");
  object.refuse_unknown();
  return param;
}

std::string replace_index(std::string name, uint64_t index) {
  if (const auto at = name.find("{}"); at != std::string::npos) name.replace(at, 2, std::to_string(index));
  return name;
}

void read_group(const Json &json, const std::string &where, ModelSpec &model) {
  Object object(json, where);
  GroupSpec group;
  group.name = object.text("name");
  group.flags = object.flag("resident", FSDP_GROUP_RESIDENT);
  group.strategy = object.word("strategy", strategies);
  group.grad_dtype = object.word("grad_dtype", dtypes);
  group.reduce_dtype = object.word("reduce_dtype", dtypes);
  group.main_storage = object.word("main_storage", main_storages);
  group.backward_weights = object.word("backward_weights", backward_weights);
  group.meshes = small_number(object, "meshes", 1);
  group.replicate = small_number(object, "replicate", 0);
  if (group.meshes == 0) fail(object.at("meshes"), "must be 1 or more, is 0");
  const auto &params = object.array("params");
  for (size_t p = 0; p < params.size(); ++p)
    group.params.push_back(read_param(params[p], fmt::format("{}[{}]", object.at("params"), p)));
  const auto repeat = object.number("repeat", 1);
  object.refuse_unknown();
  if (repeat > max_groups) fail(object.at("repeat"), "must be at most {}, is {}", max_groups, repeat);

  for (uint64_t i = 0; i < repeat; ++i) {
    auto copy = group;
    copy.name = replace_index(copy.name, i);
    for (auto &param : copy.params) param.name = replace_index(param.name, i);
    model.groups.push_back(std::move(copy));
  }
}

Json parse_file(const std::string &path) {
  std::ifstream file(path);
  if (!file) throw std::invalid_argument(fmt::format("cannot open '{}'", path));
  try {
    return Json::parse(file);
  } catch (const Json::parse_error &error) {
    throw std::invalid_argument(fmt::format("{} is not JSON: {}", path, error.what()));
  }
}

}  // namespace

ModelSpec read_model_file(const std::string &path) {
  const auto json = parse_file(path);
  try {
    Object object(json, "");
    ModelSpec model;
    model.name = path;
    const auto &groups = object.array("groups");
    for (size_t g = 0; g < groups.size(); ++g) read_group(groups[g], fmt::format("groups[{}]", g), model);
    object.refuse_unknown();
    return model;
  } catch (const std::invalid_argument &error) {
    throw std::invalid_argument(path + ": " + error.what());
  }
}

}  // namespace plan
