// SPDX-License-Identifier: Apache-2.0
// Checkpoints: saves a model to a folder, and loads it.
#include <algorithm>
#include <climits>
#include <cstring>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/text.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

constexpr size_t max_name = 1024;  // longest name of a tensor in another program's file

std::string read_folder(const char *folder, const char *call) {
  return read_name(folder, PATH_MAX - 256, call, "folder");
}

fsdp_save_options read_save_options(const fsdp_save_options *given, const char *call) {
  const auto options = read_options(given, call, "fsdp_save_options");
  constexpr uint32_t known = FSDP_SAVE_REPLACE | FSDP_SAVE_COMMIT_MANIFEST;
  check_flags(options.flags, known, call, "fsdp_save_options.flags");
  if (options.flags == known)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_save_options.flags: without a rename nothing is replaced at once", call);
  if (options.step > max_steps)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_save_options.step is {}, the highest is {}", call, options.step, max_steps);
  return options;
}

checkpoint::SaveChoice choice_of(const fsdp_save_options &options) {
  return {.replace = (options.flags & FSDP_SAVE_REPLACE) != 0,
          .commit_manifest = (options.flags & FSDP_SAVE_COMMIT_MANIFEST) != 0,
          .keep = options.keep};
}

constexpr uint32_t load_flags = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED |
                                FSDP_LOAD_FALLBACK | FSDP_LOAD_IF_ANY | FSDP_LOAD_ONE_REPLICA;
constexpr uint32_t load_model_flags = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED |
                                      FSDP_LOAD_IF_ANY | FSDP_LOAD_ONE_REPLICA;
constexpr uint32_t load_weights_flags = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED | FSDP_LOAD_IF_ANY;

checkpoint::LoadOptions read_load_options(const fsdp_load_options *given, uint32_t flags, const char *call) {
  const auto options = read_options(given, call, "fsdp_load_options");
  check_flags(options.flags, flags, call, "fsdp_load_options.flags");
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_load_options.reserved is {}, it must be 0", call, options.reserved);
  const auto has = [&](uint32_t flag) { return (options.flags & flag) != 0; };
  return {!has(FSDP_LOAD_WEIGHTS_ONLY), has(FSDP_LOAD_ALLOW_MISSING), has(FSDP_LOAD_ALLOW_UNEXPECTED),
          has(FSDP_LOAD_FALLBACK),      has(FSDP_LOAD_IF_ANY),        has(FSDP_LOAD_ONE_REPLICA)};
}

checkpoint::Rename read_rename(const fsdp_rename &given, uint64_t index, const char *call) {
  const auto field = [&](const char *name) { return format_text("renames[{}].{}", index, name); };
  check_flags(given.flags, FSDP_RENAME_TRANSPOSED, call, field("flags").c_str());
  if (given.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0", call, field("reserved"), given.reserved);
  return {read_name(given.theirs, max_name, call, field("theirs").c_str()),
          read_name(given.ours, max_name, call, field("ours").c_str()),
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
  loaded.loaded_tensors = result.tensors.loaded.size();
  loaded.missing_tensors = result.tensors.missing.size();
  loaded.unexpected_tensors = result.tensors.unexpected.size();
  const size_t length = cut_length(result.name, sizeof loaded.name - 1);
  std::memcpy(loaded.name, result.name.data(), length);
  return loaded;
}

engine::Saving::SavingChoice read_saving_choice(const char *folder, const fsdp_save_options *options,
                                                const char *call) {
  const fsdp_save_options given = read_save_options(options, call);
  return {read_folder(folder, call), given.step, choice_of(given)};
}

std::string read_model_name(const char *name, const char *call) {
  return name && *name ? read_name(name, max_name, call, "name") : "";
}

// Runs a call of a checkpoint, inside its context.
template <class Handle, class Body>
fsdp_status in_checkpoint(Handle *handle, const char *name, Body &&body) noexcept {
  std::shared_ptr<HandledCheckpoint> held;
  try {
    held = acquire(handle, name);
    engine::CallScope scope(*held->context, name);
    body(*held);
    scope.done();
    return FSDP_OK;
  } catch (...) {
    return report_current(held ? held->context.get() : nullptr);
  }
}

engine::Saving &saving_of(HandledCheckpoint &held, const char *call) {
  if (!held.saving)
    fail(FSDP_INVALID_STATE, "{}: this checkpoint was opened to be read; fsdp_begin_checkpoint begins one", call);
  return *held.saving;
}

const checkpoint::OpenedCheckpoint &opened_of(const HandledCheckpoint &held, const char *call) {
  if (held.saving)
    fail(FSDP_INVALID_STATE, "{}: this checkpoint is one to be saved; fsdp_open_checkpoint opens one to be read", call);
  return held.opened;
}

void write_name(char (&to)[32], const std::string &name) {
  std::memcpy(to, name.data(), cut_length(name, sizeof to - 1));
}

fsdp_checkpoint_status status_of(const checkpoint::OpenedCheckpoint &opened) {
  fsdp_checkpoint_status status = FSDP_CHECKPOINT_STATUS_INIT;
  status.state = FSDP_CHECKPOINT_OPENED;
  for (const checkpoint::ManifestFile &file : opened.manifest.files) status.bytes_in_all += file.bytes;
  status.step = opened.manifest.step;
  status.ranks = opened.manifest.ranks;
  write_name(status.name, opened.name);
  return status;
}

fsdp_checkpoint_status status_of(const engine::Saving &saving) {
  const engine::Saving::SavingProgress progress = saving.progress();
  fsdp_checkpoint_status status = FSDP_CHECKPOINT_STATUS_INIT;
  status.state = FSDP_CHECKPOINT_OPEN;
  if (!progress.committed) return status;
  status.state = progress.save.packed ? FSDP_CHECKPOINT_WRITING : FSDP_CHECKPOINT_COPYING;
  if (progress.save.ended) status.state = progress.failure ? FSDP_CHECKPOINT_FAILED : FSDP_CHECKPOINT_COMMITTED;
  if (progress.failure) status.status = *progress.failure;
  status.bytes = progress.save.bytes, status.bytes_in_all = progress.save.bytes_in_all;
  status.step = progress.step;
  write_name(status.name, progress.name);
  return status;
}

}  // namespace

extern "C" {

fsdp_status fsdp_save(fsdp_model *model, const char *folder, const fsdp_save_options *options) {
  constexpr auto call = "fsdp_save";
  return in_model(model, call, [&](engine::Model &impl) {
    const std::string path = read_folder(folder, call);
    const fsdp_save_options given = read_save_options(options, call);
    const std::optional<uint64_t> step = given.step ? std::optional(given.step) : std::nullopt;
    impl.checkpoints(call).save(path, step, choice_of(given));
  });
}

fsdp_status fsdp_load(fsdp_model *model, const char *folder, const fsdp_load_options *options, fsdp_loaded *loaded) {
  constexpr auto call = "fsdp_load";
  return in_model(model, call, [&](engine::Model &impl) {
    const std::string path = read_folder(folder, call);
    const checkpoint::LoadOptions given = read_load_options(options, load_flags, call);
    if (loaded) check_output(loaded, call, "fsdp_loaded");
    const checkpoint::LoadResult result = impl.checkpoints(call).load(call, path, given);
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

fsdp_status fsdp_describe_load(const fsdp_model *model, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_describe_load";
  return in_model(model, call, [&](engine::Model &impl) {
    write_text(impl.checkpoints(call).describe_load(call), buffer, size_bytes, call);
  });
}

fsdp_status fsdp_begin_checkpoint(fsdp_context *context, const char *folder, const fsdp_save_options *options,
                                  fsdp_checkpoint **checkpoint) {
  constexpr auto call = "fsdp_begin_checkpoint";
  if (checkpoint) *checkpoint = nullptr;
  return call_context(context, call, [&](auto &impl) {
    check_pointer(checkpoint, call, "checkpoint");
    impl->require_world(call);
    const auto held = std::make_shared<HandledCheckpoint>();
    held->context = impl;
    held->saving = std::make_shared<engine::Saving>(*impl, read_saving_choice(folder, options, call));
    *checkpoint = NewHandle<fsdp_checkpoint>(held).give_out();
  });
}

fsdp_status fsdp_add_checkpoint_model(fsdp_checkpoint *checkpoint, const char *name, fsdp_model *model) {
  constexpr auto call = "fsdp_add_checkpoint_model";
  return in_checkpoint(checkpoint, call, [&](HandledCheckpoint &held) {
    saving_of(held, call).add(acquire(model, call), read_model_name(name, call));
  });
}

fsdp_status fsdp_add_checkpoint_bytes(fsdp_checkpoint *checkpoint, const char *name, const void *data,
                                      uint64_t size_bytes, fsdp_bytes_owner owner) {
  constexpr auto call = "fsdp_add_checkpoint_bytes";
  return in_checkpoint(checkpoint, call, [&](HandledCheckpoint &held) {
    engine::Saving &saving = saving_of(held, call);
    if (owner != FSDP_BYTES_ONCE && owner != FSDP_BYTES_PER_RANK)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is not an fsdp_bytes_owner", call, owner);
    if (size_bytes) check_pointer(data, call, "data");
    const auto *bytes = static_cast<const std::byte *>(data);
    saving.add_bytes({read_name(name, max_name, call, "name"), owner == FSDP_BYTES_PER_RANK,
                      std::vector<std::byte>(bytes, bytes + size_bytes)});
  });
}

fsdp_status fsdp_commit_checkpoint(fsdp_checkpoint *checkpoint) {
  constexpr auto call = "fsdp_commit_checkpoint";
  return in_checkpoint(checkpoint, call, [&](HandledCheckpoint &held) {
    saving_of(held, call);
    engine::Saving::commit(held.saving, call);
  });
}

fsdp_status fsdp_get_checkpoint_status(const fsdp_checkpoint *checkpoint, fsdp_checkpoint_status *status) {
  constexpr auto call = "fsdp_get_checkpoint_status";
  return guard([&] {
    const auto held = acquire(checkpoint, call);
    held->context->check_process();
    check_output(status, call, "fsdp_checkpoint_status");
    write_output(status, held->saving ? status_of(*held->saving) : status_of(held->opened));
  });
}

fsdp_status fsdp_wait_checkpoint(fsdp_checkpoint *checkpoint) {
  constexpr auto call = "fsdp_wait_checkpoint";
  return in_checkpoint(checkpoint, call, [&](HandledCheckpoint &held) { saving_of(held, call).wait(call); });
}

fsdp_status fsdp_open_checkpoint(fsdp_context *context, const char *folder, fsdp_checkpoint **checkpoint) {
  constexpr auto call = "fsdp_open_checkpoint";
  if (checkpoint) *checkpoint = nullptr;
  return call_context(context, call, [&](auto &impl) {
    check_pointer(checkpoint, call, "checkpoint");
    impl->require_world(call);
    const std::string path = read_folder(folder, call);
    const auto held = std::make_shared<HandledCheckpoint>();
    held->context = impl;
    NewHandle<fsdp_checkpoint> handle(held);
    held->opened = checkpoint::open_checkpoint(impl->world_team(), path);
    *checkpoint = handle.give_out();
  });
}

fsdp_status fsdp_load_checkpoint_model(fsdp_checkpoint *checkpoint, const char *name, fsdp_model *model,
                                       const fsdp_load_options *options, fsdp_loaded *loaded) {
  constexpr auto call = "fsdp_load_checkpoint_model";
  return in_model(model, call, [&](engine::Model &impl) {
    const auto held = acquire(checkpoint, call);
    if (held->context.get() != &impl.context())
      fail(FSDP_INVALID_HANDLE, "{}: the model belongs to another context than the checkpoint", call);
    const checkpoint::OpenedCheckpoint &opened = opened_of(*held, call);
    checkpoint::LoadOptions given = read_load_options(options, load_model_flags, call);
    given.model = read_model_name(name, call);
    if (loaded) check_output(loaded, call, "fsdp_loaded");
    const checkpoint::LoadResult result = impl.checkpoints(call).load(call, opened.path, given);
    if (loaded) write_output(loaded, loaded_of(result));
  });
}

fsdp_status fsdp_read_checkpoint_bytes(fsdp_checkpoint *checkpoint, const char *name, void *data,
                                       uint64_t *size_bytes) {
  constexpr auto call = "fsdp_read_checkpoint_bytes";
  return in_checkpoint(checkpoint, call, [&](HandledCheckpoint &held) {
    const checkpoint::OpenedCheckpoint &opened = opened_of(held, call);
    check_pointer(size_bytes, call, "size_bytes");
    const engine::Context &context = *held.context;
    const std::string wanted = read_name(name, max_name, call, "name");
    const checkpoint::ManifestTensor &bytes = checkpoint::find_bytes(opened, wanted, context.rank());
    const uint64_t room = *size_bytes, size = *size_bytes = bytes.shape[0];
    if (!data) return;
    if (room < size) fail(FSDP_INVALID_ARGUMENT, "{}: data has room for {} bytes, there are {}", call, room, size);
    const std::vector<std::byte> read = checkpoint::read_bytes(opened, bytes, [&] { context.waiter().poll(); });
    std::ranges::copy(read, static_cast<std::byte *>(data));
  });
}

void fsdp_destroy_checkpoint(fsdp_checkpoint *checkpoint) {
  const auto held = find(checkpoint);
  if (!held) return;
  if (held->context->in_child()) return forget(checkpoint);
  remove(checkpoint);
}

fsdp_status fsdp_list_checkpoints(const char *folder, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_list_checkpoints";
  return guard(
      [&] { write_text(checkpoint::describe_checkpoints(read_folder(folder, call)), buffer, size_bytes, call); });
}

}  // extern "C"
