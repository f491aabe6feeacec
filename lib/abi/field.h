// SPDX-License-Identifier: Apache-2.0
// What errors call a value that a call was given: "retain_secs", or of an array's element "params[3] ('wq').dtype".
#pragma once

#include <cstdint>
#include <string>

#include <fmt/format.h>

namespace fsdp::abi {

// A text only where an error needs one: ten of each of a model's thousands of parameters would take longer than to read
// them.
class Field {
 public:
  Field(const char *name) : name_(name) {}
  // element: the name that the element has by itself, if it is known; name: nullptr for the whole element.
  Field(const char *array, uint64_t index, const std::string *element, const char *name)
      : name_(name), array_(array), index_(index), element_(element) {}

  std::string text() const;

 private:
  const char *name_, *array_ = nullptr;
  uint64_t index_ = 0;
  const std::string *element_ = nullptr;
};

}  // namespace fsdp::abi

template <>
struct fmt::formatter<fsdp::abi::Field> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const fsdp::abi::Field &field, Context &context) const {
    return fmt::formatter<std::string>::format(field.text(), context);
  }
};
