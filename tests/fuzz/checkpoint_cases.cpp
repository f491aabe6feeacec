// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "memory.h"

namespace fuzz {
namespace {

// Never returns a made-up name, because calls make folders.
const char *folder_of(Rank &rank) {
  static constexpr const char *others[] = {nullptr, "", "/dev/null", "/proc/nowhere", "fuzz-checkpoints/in/it", "\xff"};
  return rank.wild() ? others[rank.random.below(std::size(others))] : "fuzz-checkpoints";
}

fsdp_status save_model(Rank &rank) {
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.step = rank.number(rank.random.below(4));
  options.keep = rank.number32(3);
  constexpr uint32_t all = FSDP_SAVE_REPLACE | FSDP_SAVE_COMMIT_MANIFEST;
  const uint32_t one = rank.random.one_in(8) ? +FSDP_SAVE_COMMIT_MANIFEST : +FSDP_SAVE_REPLACE;
  options.flags = rank.wild() ? rank.flags(all) : one;
  const Input<fsdp_save_options> input(rank, options);
  return fsdp_save(rank.model(), folder_of(rank), input.pointer());
}

// Loads the model that was saved last. Tensors that fit are taken.
fsdp_status load_model(Rank &rank) {
  constexpr uint32_t all = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED |
                           FSDP_LOAD_FALLBACK | FSDP_LOAD_IF_ANY | FSDP_LOAD_ONE_REPLICA;
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags =
      rank.wild() ? rank.flags(all) : FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED | FSDP_LOAD_IF_ANY;
  options.reserved = rank.wild() && rank.random.one_in(8) ? 1 : 0;
  const Input<fsdp_load_options> input(rank, options);
  Output<fsdp_loaded> loaded(rank);
  const char *const folder = folder_of(rank);
  return loaded(fsdp_load(rank.model(), folder, input.pointer(), loaded.pointer()));
}

// Loads weights from a checkpoint as if it belonged to another program, under names that hardly any tensor has.
fsdp_status load_weights(Rank &rank) {
  constexpr uint32_t all = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED | FSDP_LOAD_IF_ANY;
  constexpr uint32_t transposed = FSDP_RENAME_TRANSPOSED;
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags = rank.wild() ? rank.flags(all) : all;
  const Input<fsdp_load_options> input(rank, options);
  fsdp_rename renames[4] = {};
  const std::string theirs = rank.wild() ? "*" : "p*", ours = rank.wild() ? rank.or_null(rank.name()) ? "x" : "" : "*";
  for (fsdp_rename &one : renames)
    one = {rank.or_null(theirs.c_str()),
           rank.or_null(ours.c_str()),
           rank.number(0),
           rank.number(0),
           rank.number(0),
           rank.wild() ? rank.flags(transposed) : 0,
           rank.wild() ? 1u : 0u};
  uint64_t stride = rank.number(sizeof(fsdp_rename));
  // The stride must not lead beyond the array.
  if (stride > sizeof(fsdp_rename) && stride <= 4096) stride = sizeof(fsdp_rename);
  Output<fsdp_loaded> loaded(rank);
  const char *const folder = folder_of(rank);
  return loaded(fsdp_load_weights(rank.model(), folder, rank.or_null(renames), rank.random.below(3), stride,
                                  input.pointer(), loaded.pointer()));
}

// ---- handles ----

void make_room_for_checkpoint(Rank &rank) {
  auto &checkpoints = rank.alive[a_checkpoint];
  if (checkpoints.size() < 4) return;
  fsdp_destroy_checkpoint(static_cast<fsdp_checkpoint *>(checkpoints.front()));
  checkpoints.erase(checkpoints.begin());
}

fsdp_status begin_checkpoint(Rank &rank) {
  make_room_for_checkpoint(rank);
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.step = rank.number(rank.random.below(4));
  constexpr uint32_t replace = FSDP_SAVE_REPLACE;
  options.flags = rank.wild() ? rank.flags(replace) : replace;
  const Input<fsdp_save_options> input(rank, options);
  const char *const folder = folder_of(rank);
  return make<fsdp_checkpoint>(rank, a_checkpoint, [&](fsdp_checkpoint **checkpoint) {
    return fsdp_begin_checkpoint(rank.context(), folder, input.pointer(), checkpoint);
  });
}

fsdp_status open_checkpoint(Rank &rank) {
  make_room_for_checkpoint(rank);
  const char *const folder = folder_of(rank);
  return make<fsdp_checkpoint>(rank, a_checkpoint, [&](fsdp_checkpoint **checkpoint) {
    return fsdp_open_checkpoint(rank.context(), folder, checkpoint);
  });
}

const char *model_name(Rank &rank) { return rank.wild() ? rank.name() : nullptr; }
const char *bytes_name(Rank &rank) { return rank.wild() ? rank.name() : "a"; }

fsdp_status add_checkpoint_model(Rank &rank) {
  return fsdp_add_checkpoint_model(rank.checkpoint(), model_name(rank), rank.model());
}

fsdp_status add_checkpoint_bytes(Rank &rank) {
  const uint64_t size = rank.random.below(256);
  return fsdp_add_checkpoint_bytes(rank.checkpoint(), bytes_name(rank), rank.or_null(rank.buffer), size,
                                   rank.choice(FSDP_BYTES_PER_RANK));
}

fsdp_status commit_checkpoint(Rank &rank) { return fsdp_commit_checkpoint(rank.checkpoint()); }
fsdp_status wait_checkpoint(Rank &rank) { return fsdp_wait_checkpoint(rank.checkpoint()); }

fsdp_status get_checkpoint_status(Rank &rank) {
  Output<fsdp_checkpoint_status> status(rank);
  return status(fsdp_get_checkpoint_status(rank.checkpoint(), status.pointer()));
}

// The folder of checkpoints that are saved and opened in one call. In the folder of all other checkpoints, another
// context's save may end at any time and become the newest.
constexpr const char own_folder[] = "fuzz-own";

// Loads a model that was saved and opened for this call.
fsdp_status load_saved_model(Rank &rank) {
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.flags = FSDP_SAVE_REPLACE;
  fsdp_model *const model = rank.aim.model;
  fsdp_checkpoint *checkpoint = nullptr;
  fsdp_status status = fsdp_begin_checkpoint(rank.context(), own_folder, &options, &checkpoint);
  if (!status) status = fsdp_add_checkpoint_model(checkpoint, "m", model);
  if (!status) status = fsdp_commit_checkpoint(checkpoint);
  if (!status) status = fsdp_wait_checkpoint(checkpoint);
  fsdp_destroy_checkpoint(checkpoint);
  checkpoint = nullptr;
  if (!status) status = fsdp_begin_update(model, nullptr);
  if (!status) status = fsdp_open_checkpoint(rank.context(), own_folder, &checkpoint);
  if (!status) status = fsdp_load_checkpoint_model(checkpoint, "m", model, nullptr, nullptr);
  fsdp_destroy_checkpoint(checkpoint);
  return status;
}

fsdp_status load_checkpoint_model(Rank &rank) {
  if (rank.alone && rank.random.one_in(2)) return load_saved_model(rank);
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  constexpr uint32_t all = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED;
  options.flags = rank.wild() ? rank.flags(all) : FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED;
  const Input<fsdp_load_options> input(rank, options);
  Output<fsdp_loaded> loaded(rank);
  return loaded(
      fsdp_load_checkpoint_model(rank.checkpoint(), model_name(rank), rank.model(), input.pointer(), loaded.pointer()));
}

// Reads bytes that were saved and opened for this call.
fsdp_status read_saved_bytes(Rank &rank) {
  static constexpr char data[] = "bytes";
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.flags = FSDP_SAVE_REPLACE;
  fsdp_checkpoint *checkpoint = nullptr;
  uint64_t size = buffer_bytes;
  fsdp_status status = fsdp_begin_checkpoint(rank.context(), own_folder, &options, &checkpoint);
  if (!status) status = fsdp_add_checkpoint_bytes(checkpoint, "a", data, sizeof data, FSDP_BYTES_ONCE);
  if (!status) status = fsdp_commit_checkpoint(checkpoint);
  if (!status) status = fsdp_wait_checkpoint(checkpoint);
  fsdp_destroy_checkpoint(checkpoint);
  checkpoint = nullptr;
  if (!status) status = fsdp_open_checkpoint(rank.context(), own_folder, &checkpoint);
  if (!status) status = fsdp_read_checkpoint_bytes(checkpoint, "a", rank.buffer, &size);
  if (!status) require(size == sizeof data && !std::memcmp(rank.buffer, data, size), "other bytes than were saved");
  fsdp_destroy_checkpoint(checkpoint);
  return status;
}

fsdp_status read_checkpoint_bytes(Rank &rank) {
  if (rank.alone && rank.random.one_in(8)) return read_saved_bytes(rank);
  uint64_t size = rank.wild() ? rank.random.below(buffer_bytes) : buffer_bytes;
  return fsdp_read_checkpoint_bytes(rank.checkpoint(), bytes_name(rank), rank.or_null(rank.buffer),
                                    rank.or_null(&size));
}

fsdp_status describe_load(Rank &rank) {
  uint64_t size = rank.wild() ? rank.random.below(buffer_bytes) : buffer_bytes;
  return fsdp_describe_load(rank.model(), reinterpret_cast<char *>(rank.or_null(rank.buffer)), rank.or_null(&size));
}

fsdp_status list_checkpoints(Rank &rank) {
  uint64_t size = rank.wild() ? rank.random.below(buffer_bytes) : buffer_bytes;
  const char *const folder = folder_of(rank);
  return fsdp_list_checkpoints(folder, reinterpret_cast<char *>(rank.or_null(rank.buffer)), rank.or_null(&size));
}

fsdp_status destroy_checkpoint(Rank &rank) {
  fsdp_checkpoint *const checkpoint = rank.checkpoint();
  fsdp_destroy_checkpoint(checkpoint);
  auto &alive = rank.alive[a_checkpoint];
  alive.erase(std::remove(alive.begin(), alive.end(), checkpoint), alive.end());
  return FSDP_OK;
}

}  // namespace

const std::vector<Case> &checkpoint_cases() {
  static const std::vector<Case> cases = {{"fsdp_save", save_model},
                                          {"fsdp_load", load_model},
                                          {"fsdp_load_weights", load_weights},
                                          {"fsdp_describe_load", describe_load},
                                          {"fsdp_begin_checkpoint", begin_checkpoint},
                                          {"fsdp_add_checkpoint_model", add_checkpoint_model},
                                          {"fsdp_add_checkpoint_bytes", add_checkpoint_bytes},
                                          {"fsdp_commit_checkpoint", commit_checkpoint},
                                          {"fsdp_wait_checkpoint", wait_checkpoint},
                                          {"fsdp_get_checkpoint_status", get_checkpoint_status},
                                          {"fsdp_open_checkpoint", open_checkpoint},
                                          {"fsdp_load_checkpoint_model", load_checkpoint_model},
                                          {"fsdp_read_checkpoint_bytes", read_checkpoint_bytes},
                                          {"fsdp_list_checkpoints", list_checkpoints},
                                          {"fsdp_destroy_checkpoint", destroy_checkpoint}};
  return cases;
}

}  // namespace fuzz
