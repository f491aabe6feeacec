// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/weight_index.h"

#include "checkpoint/format/file_name.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {

std::map<std::string, std::string> parse_weight_index(std::string_view text, std::string_view file) {
  const nlohmann::json document = parse_json(text, file, {.depth = 8, .values = 4'000'000});
  std::map<std::string, std::string> files;
  JsonValue(document, file)["weight_map"].for_each_member([&](const std::string &name, const JsonValue &value) {
    value.require(is_inner_path(value.text()), "the path of a file inside this folder");
    files[name] = value.text();
  });
  return files;
}

}  // namespace fsdp::checkpoint
