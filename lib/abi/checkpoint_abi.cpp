// SPDX-License-Identifier: Apache-2.0
// Checkpoints: a model to a folder, and back.
#include <climits>
#include <cstring>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/text.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

constexpr size_t most_name = 1024;  // of a tensor of somebody else's

std::string read_folder(const char *folder, const char *call) {
  return read_name(folder, PATH_MAX - 256, call, "folder");
}

fsdp_save_options read_save_options(const fsdp_save_options *given, const char *call) {
  const auto options = read_options(given, call, "fsdp_save_options");
  check_flags(options.flags, FSDP_SAVE_REPLACE, call, "fsdp_save_options.flags");
  if (options.step > most_steps)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_save_options.step is {}, the highest is {}", call, options.step, most_steps);
  return options;
}

constexpr uint32_t load_flags = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED |
                                FSDP_LOAD_FALLBACK | FSDP_LOAD_IF_ANY;
constexpr uint32_t load_weights_flags = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED;

checkpoint::LoadOptions read_load_options(const fsdp_load_options *given, uint32_t flags, const char *call) {
  const auto options = read_options(given, call, "fsdp_load_options");
  check_flags(options.flags, flags, call, "fsdp_load_options.flags");
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_load_options.reserved is {}, it must be 0", call, options.reserved);
  const auto has = [&](uint32_t flag) { return (options.flags & flag) != 0; };
  return {!has(FSDP_LOAD_WEIGHTS_ONLY), has(FSDP_LOAD_ALLOW_MISSING), has(FSDP_LOAD_ALLOW_UNEXPECTED),
          has(FSDP_LOAD_FALLBACK), has(FSDP_LOAD_IF_ANY)};
}

checkpoint::Rename read_rename(const fsdp_rename &given, uint64_t index, const char *call) {
  const auto field = [&](const char *name) { return format_text("renames[{}].{}", index, name); };
  check_flags(given.flags, FSDP_RENAME_TRANSPOSED, call, field("flags").c_str());
  if (given.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0", call, field("reserved"), given.reserved);
  return {read_name(given.theirs, most_name, call, field("theirs").c_str()),
          read_name(given.ours, most_name, call, field("ours").c_str()),
          given.from_row,
          given.to_row,
          given.row_count,
          (given.flags & FSDP_RENAME_TRANSPOSED) != 0};
}

std::vector<checkpoint::Rename> read_renames(const fsdp_rename *renames, uint64_t count, uint64_t stride,
                                             const char *call) {
  const auto array = read_array(renames, count, stride, call, "rename", "fsdp_rename");
  std::vector<checkpoint::Rename> read;
  for (uint64_t i = 0; i < count; ++i) {
    check_known(array, i, call, "rename");
    read.push_back(read_rename(array[i], i, call));
  }
  checkpoint::check_renames(read, call);
  return read;
}

fsdp_loaded loaded_of(const checkpoint::LoadResult &result) {
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  loaded.step = result.manifest.step;
  loaded.sequence = result.manifest.sequence;
  loaded.wanted_bytes = result.wanted_bytes;
  loaded.read_bytes = result.read_bytes;
  loaded.ranks = result.manifest.ranks;
  loaded.passed_over = static_cast<uint32_t>(result.passed_over.size());
  const size_t length = cut_length(result.name, sizeof loaded.name - 1);
  std::memcpy(loaded.name, result.name.data(), length);
  return loaded;
}

}  // namespace

extern "C" {

fsdp_status fsdp_save(fsdp_model *model, const char *folder, const fsdp_save_options *options) {
  constexpr auto call = "fsdp_save";
  return in_model(model, call, [&](engine::Model &impl) {
    const std::string path = read_folder(folder, call);
    const fsdp_save_options given = read_save_options(options, call);
    const std::optional<uint64_t> step = given.step ? std::optional(given.step) : std::nullopt;
    impl.checkpoints(call).save(path, step, {.replace = (given.flags & FSDP_SAVE_REPLACE) != 0, .keep = given.keep});
  });
}

fsdp_status fsdp_load(fsdp_model *model, const char *folder, const fsdp_load_options *options, fsdp_loaded *loaded) {
  constexpr auto call = "fsdp_load";
  return in_model(model, call, [&](engine::Model &impl) {
    const std::string path = read_folder(folder, call);
    const checkpoint::LoadOptions given = read_load_options(options, load_flags, call);
    if (loaded) check_output(loaded, call, "fsdp_loaded");
    const checkpoint::LoadResult result = impl.checkpoints(call).load(path, given);
    if (loaded) write_output(loaded, loaded_of(result));
  });
}

fsdp_status fsdp_load_weights(fsdp_model *model, const char *path, const fsdp_rename *renames, uint64_t rename_count,
                              uint64_t rename_stride, const fsdp_load_options *options, fsdp_loaded *loaded) {
  constexpr auto call = "fsdp_load_weights";
  return in_model(model, call, [&](engine::Model &impl) {
    const std::string from = read_name(path, PATH_MAX - 256, call, "path");
    const std::vector<checkpoint::Rename> given = read_renames(renames, rename_count, rename_stride, call);
    const checkpoint::LoadOptions chosen = read_load_options(options, load_weights_flags, call);
    if (loaded) check_output(loaded, call, "fsdp_loaded");
    const checkpoint::LoadResult result = impl.checkpoints(call).load_weights(from, given, chosen);
    if (loaded) write_output(loaded, loaded_of(result));
  });
}

}  // extern "C"
