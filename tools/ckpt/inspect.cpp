// SPDX-License-Identifier: Apache-2.0
// fsdp-ckpt ls and verify.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/convert/inspect.h"
#include "ckpt/commands.h"
#include "ckpt/progress.h"

namespace ckpt {
namespace {

using fsdp::checkpoint::ListedCheckpoint;
using Json = nlohmann::ordered_json;

// Names of files need not be UTF-8.
std::string dump(const Json &json) { return json.dump(2, ' ', false, Json::error_handler_t::replace); }

// The number of tensors of each dtype, so that codes and scales of planes show.
Json count_types(const fsdp::checkpoint::Manifest &manifest) {
  std::map<std::string_view, uint64_t> types;
  for (const auto &tensor : manifest.tensors) ++types[tensor.type->name];
  return types;
}

Json describe(const ListedCheckpoint &one) {
  Json json = {{"name", one.name}, {"whole", one.problem.empty()}};
  if (!one.problem.empty()) json["problem"] = one.problem;
  if (!one.manifest) return json;
  Json models = Json::array();
  for (const auto &model : one.manifest->models)
    models.push_back({{"name", model.name}, {"description", model.description}});
  json["step"] = one.manifest->step;
  json["sequence"] = one.manifest->sequence;
  json["ranks"] = one.manifest->ranks;
  json["models"] = models;
  json["tensors"] = one.manifest->tensors.size();
  json["types"] = count_types(*one.manifest);
  json["files"] = one.manifest->files.size();
  json["bytes"] = one.bytes;
  json["keys"] = one.manifest->keys;
  return json;
}

using Row = std::array<std::string, 9>;

Row row_of(const ListedCheckpoint &one) {
  const std::string state = one.problem.empty() ? "whole" : one.problem;
  if (!one.manifest) return {one.name, "-", "-", "-", "-", "-", "-", "-", state};
  const auto &manifest = *one.manifest;
  return {one.name,
          std::to_string(manifest.step),
          std::to_string(manifest.sequence),
          std::to_string(manifest.ranks),
          std::to_string(manifest.models.size()),
          std::to_string(manifest.tensors.size()),
          std::to_string(manifest.files.size()),
          format_bytes(one.bytes),
          state};
}

// Names on the left, numbers on the right; the last column is as long as it is.
void print_table(const std::vector<Row> &rows) {
  std::array<size_t, 8> widths{};
  for (const Row &row : rows)
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const Row &row : rows) {
    fmt::print("{:<{}}", row[0], widths[0]);
    for (size_t i = 1; i < widths.size(); ++i) fmt::print("  {:>{}}", row[i], widths[i]);
    fmt::print("  {}\n", row.back());
  }
}

}  // namespace

int list(const Request &request) {
  const std::vector<ListedCheckpoint> all = fsdp::checkpoint::inspect_checkpoints(request.source);
  const bool damaged =
      std::ranges::any_of(all, [](const ListedCheckpoint &one) { return !one.problem.empty() && !one.unfinished; });
  if (request.json) {
    Json json = Json::array();
    for (const ListedCheckpoint &one : all) json.push_back(describe(one));
    fmt::print("{}\n", dump(json));
    return damaged ? 1 : 0;
  }
  if (all.empty()) {
    fmt::print("no checkpoints in {}\n", request.source);
    return 0;
  }
  std::vector<Row> rows{{"name", "step", "sequence", "ranks", "models", "tensors", "files", "bytes", "state"}};
  for (const ListedCheckpoint &one : all) rows.push_back(row_of(one));
  print_table(rows);
  return damaged ? 1 : 0;
}

int verify(const Request &request) {
  const auto result = [&] {
    ProgressLine line("verified");
    return fsdp::checkpoint::verify_checkpoints(request.source, line.callback());
  }();
  const bool none = result.checkpoints == 0;
  if (request.json) {
    Json damages = Json::array();
    for (const auto &damage : result.damages) damages.push_back({{"file", damage.file}, {"problem", damage.what}});
    fmt::print("{}\n", dump({{"checkpoints", result.checkpoints},
                             {"files", result.files},
                             {"bytes", result.bytes},
                             {"damages", damages}}));
  } else {
    for (const auto &damage : result.damages) fmt::print("{}\n", damage.what);
    fmt::print("{} checkpoint{}, {} file{}, {}: {}\n", result.checkpoints, result.checkpoints == 1 ? "" : "s",
               result.files, result.files == 1 ? "" : "s", format_bytes(result.bytes),
               none                     ? "there is nothing to verify"
               : result.damages.empty() ? "all as it was written"
                                        : fmt::format("{} damaged", result.damages.size()));
  }
  return none || !result.damages.empty() ? 1 : 0;
}

}  // namespace ckpt
