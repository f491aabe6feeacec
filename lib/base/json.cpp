// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include "base/error.h"

namespace fsdp {

std::string quote_json(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20)
      quoted += format_text("\\u{:04x}", static_cast<unsigned>(c));
    else
      quoted.push_back(c);
  }
  return quoted + '"';
}

}  // namespace fsdp
