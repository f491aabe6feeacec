// SPDX-License-Identifier: Apache-2.0
// Parses JSON from untrusted files with JSON for Modern C++, within limits. Each accessor names the type that a value
// must have. If a value has another type, the error says where: "shard-1.safetensors: /a/shape/0 is -1, not a number of
// 0 or more".
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace fsdp::checkpoint {

// Throws INVALID_ARGUMENT with the file's name: the file has the wrong format or is damaged.
template <class... Args>
[[noreturn]] void refuse_file(std::string_view file, fmt::format_string<Args...> format, Args &&...args) {
  fail(FSDP_INVALID_ARGUMENT, "{}: {}", file, format_text(format, std::forward<Args>(args)...));
}

struct JsonLimits {
  size_t depth = 16;
  uint64_t values = 20'000'000;  // limit for values of all kinds, including members of objects
};
// A value, and its place in its file. It holds references, so it must not outlive the document or the string with the
// file's name.
class JsonValue {
 public:
  JsonValue(const nlohmann::json &value, std::string_view file, std::string path = {})
      : value_(value), file_(file), path_(std::move(path)) {}

  uint64_t unsigned_number() const;
  const std::string &text() const;
  bool boolean() const;
  std::vector<uint64_t> unsigned_numbers(size_t most) const;
  // Visits the elements in order; the value must be an array.
  template <class Visit>
  void for_each_element(Visit visit) const {
    require(value_.is_array(), "an array");
    for (size_t i = 0; i < value_.size(); ++i) visit(JsonValue(value_[i], file_, path_ + "/" + std::to_string(i)));
  }
  template <class Visit>  // (name, value)
  void for_each_member(Visit visit) const {
    require(value_.is_object(), "an object");
    for (const auto &[name, value] : value_.items()) visit(name, JsonValue(value, file_, path_ + "/" + name));
  }
  bool is_null() const { return value_.is_null(); }
  size_t size() const { return value_.size(); }
  bool has(const std::string &name) const { return value_.is_object() && value_.contains(name); }
  JsonValue operator[](const std::string &name) const;
  // An element of an array. The caller must have checked that the value is an array.
  JsonValue element(size_t index) const { return {value_[index], file_, path_ + "/" + std::to_string(index)}; }
  // If `is` is false, throws an error, which says that the value must be `what`.
  void require(bool is, std::string_view what) const;

 private:
  const nlohmann::json &value_;
  std::string_view file_;
  std::string path_;
};

// Throws if the text is not JSON in UTF-8, if a name comes twice in one object, or if the limits are exceeded.
nlohmann::json parse_json(std::string_view text, std::string_view file, const JsonLimits &limits = {});

}  // namespace fsdp::checkpoint
