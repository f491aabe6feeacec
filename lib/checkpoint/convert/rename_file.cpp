// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/rename_file.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "checkpoint/format/json_document.h"

namespace fsdp::checkpoint {
namespace {

Rename parse_rename(const JsonValue &value) {
  Rename rename{value["theirs"].text(), value["ours"].text()};
  value.for_each_member([&](const std::string &name, const JsonValue &member) {
    if (name == "from_row")
      rename.from_row = member.unsigned_number();
    else if (name == "to_row")
      rename.to_row = member.unsigned_number();
    else if (name == "row_count")
      rename.row_count = member.unsigned_number();
    else if (name == "transposed")
      rename.transposed = member.boolean();
    else
      member.require(name == "theirs" || name == "ours",
                     "a member that is known (theirs, ours, from_row, to_row, row_count, transposed)");
  });
  return rename;
}

}  // namespace

std::vector<Rename> parse_renames(std::string_view text, std::string_view file) {
  const nlohmann::json document = parse_json(text, file, {.depth = 4, .values = 4'000'000});
  std::vector<Rename> renames;
  JsonValue(document, file).for_each_element([&](const JsonValue &value) { renames.push_back(parse_rename(value)); });
  check_renames(renames, file);
  return renames;
}

std::vector<Rename> read_renames(const std::string &path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail_errno(errno, path + ": cannot be opened");
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) fail_errno(EIO, path + ": reading it");
  return parse_renames(text.str(), path);
}

}  // namespace fsdp::checkpoint
