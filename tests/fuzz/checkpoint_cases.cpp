// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <string>

#include "memory.h"

namespace fuzz {
namespace {

// Never a name that is made up: folders are made.
const char *folder_of(Rank &rank) {
  static constexpr const char *others[] = {nullptr, "", "/dev/null", "/proc/nowhere", "fuzz-checkpoints/in/it", "\xff"};
  return rank.wild() ? others[rank.random.below(std::size(others))] : "fuzz-checkpoints";
}

fsdp_status save_model(Rank &rank) {
  fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
  options.step = rank.number(rank.random.below(4));
  options.keep = rank.number32(3);
  constexpr uint32_t replace = FSDP_SAVE_REPLACE;
  options.flags = rank.wild() ? rank.flags(replace) : replace;
  const Input<fsdp_save_options> input(rank, options);
  return fsdp_save(rank.model(), folder_of(rank), input.pointer());
}

// Of whichever model was saved last: what fits is taken.
fsdp_status load_model(Rank &rank) {
  constexpr uint32_t all = FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED |
                           FSDP_LOAD_FALLBACK | FSDP_LOAD_IF_ANY;
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags =
      rank.wild() ? rank.flags(all) : FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED | FSDP_LOAD_IF_ANY;
  options.reserved = rank.wild() && rank.random.one_in(8) ? 1 : 0;
  const Input<fsdp_load_options> input(rank, options);
  Output<fsdp_loaded> loaded(rank);
  const char *const folder = folder_of(rank);
  return loaded(fsdp_load(rank.model(), folder, input.pointer(), loaded.pointer()));
}

// Of a checkpoint as of any other files, under names that hardly anything has.
fsdp_status load_weights(Rank &rank) {
  constexpr uint32_t all = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED;
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
  // Never further than the array goes.
  if (stride > sizeof(fsdp_rename) && stride <= 4096) stride = sizeof(fsdp_rename);
  Output<fsdp_loaded> loaded(rank);
  const char *const folder = folder_of(rank);
  return loaded(fsdp_load_weights(rank.model(), folder, rank.or_null(renames), rank.random.below(3), stride,
                                  input.pointer(), loaded.pointer()));
}

}  // namespace

const std::vector<Case> &checkpoint_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_save", save_model}, {"fsdp_load", load_model}, {"fsdp_load_weights", load_weights}};
  return cases;
}

}  // namespace fuzz
