// SPDX-License-Identifier: Apache-2.0
// Text as a JSON string. UTF-8 passes as it is.
#pragma once

#include <string>
#include <string_view>

namespace fsdp {

std::string quote_json(std::string_view text);

}  // namespace fsdp
