// SPDX-License-Identifier: Apache-2.0

#include "abi/options.h"

#include "base/error.h"

namespace fsdp::abi {

std::string Field::text() const {
  if (!array_) return name_;
  std::string text = format_text("{}[{}]", array_, index_);
  if (element_) text += format_text(" ('{}')", *element_);
  if (name_) text += format_text(".{}", name_);
  return text;
}

}  // namespace fsdp::abi
