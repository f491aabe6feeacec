// SPDX-License-Identifier: Apache-2.0
// Checkpoints in the background, and of several models. Included by fsdp.hpp.
#ifndef FSDP_CHECKPOINT_HPP
#define FSDP_CHECKPOINT_HPP

#include <fsdp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"

namespace fsdp {

enum class CheckpointState : fsdp_checkpoint_state {
  open = FSDP_CHECKPOINT_OPEN,
  copying = FSDP_CHECKPOINT_COPYING,
  writing = FSDP_CHECKPOINT_WRITING,
  committed = FSDP_CHECKPOINT_COMMITTED,
  failed = FSDP_CHECKPOINT_FAILED,
  opened = FSDP_CHECKPOINT_OPENED
};

/** A checkpoint that is being saved while training goes on, or one that was opened to be read. A save outlives it. */
class Checkpoint {
 public:
  /** Begins a checkpoint for the folder; nothing of it is in the folder yet. */
  static Checkpoint begin(const Context &context, const std::string &folder, const SaveOptions &options = {}) {
    fsdp_checkpoint *made = nullptr;
    const fsdp_status status = fsdp_begin_checkpoint(context.get(), folder.c_str(), &options, &made);
    return own(context, made, status);
  }
  /** Opens the folder's newest checkpoint, or the checkpoint that the folder itself is. */
  static Checkpoint open(const Context &context, const std::string &folder) {
    fsdp_checkpoint *made = nullptr;
    const fsdp_status status = fsdp_open_checkpoint(context.get(), folder.c_str(), &made);
    return own(context, made, status);
  }

  void add_model(const std::string &name, const Model &model) {
    detail::check(fsdp_add_checkpoint_model(get(), name.c_str(), model.get()));
  }
  void add_bytes(const std::string &name, const void *data, std::uint64_t size_bytes,
                 BytesOwner owner = BytesOwner::once) {
    detail::check(
        fsdp_add_checkpoint_bytes(get(), name.c_str(), data, size_bytes, static_cast<fsdp_bytes_owner>(owner)));
  }
  /** Saves it while training goes on. */
  void commit() { detail::check(fsdp_commit_checkpoint(get())); }
  void wait() { detail::check(fsdp_wait_checkpoint(get())); }
  fsdp_checkpoint_status status() const {
    auto status = detail::sized<fsdp_checkpoint_status>();
    detail::check(fsdp_get_checkpoint_status(get(), &status));
    return status;
  }
  CheckpointState state() const { return static_cast<CheckpointState>(status().state); }

  Loaded load_model(const std::string &name, Model &model, const LoadOptions &options = {}) {
    auto loaded = detail::sized<fsdp_loaded>();
    detail::check(fsdp_load_checkpoint_model(get(), name.c_str(), model.get(), &options, &loaded));
    return loaded;
  }
  std::vector<unsigned char> read_bytes(const std::string &name) {
    std::uint64_t size_bytes = 0;
    detail::check(fsdp_read_checkpoint_bytes(get(), name.c_str(), nullptr, &size_bytes));
    std::vector<unsigned char> data(static_cast<std::size_t>(size_bytes));
    detail::check(fsdp_read_checkpoint_bytes(get(), name.c_str(), data.data(), &size_bytes));
    return data;
  }

  fsdp_checkpoint *get() const noexcept { return raw_.get(); }

 private:
  Checkpoint(detail::KeptHooks hooks, fsdp_checkpoint *raw) : hooks_(std::move(hooks)), raw_(raw) {}
  static Checkpoint own(const Context &context, fsdp_checkpoint *made, fsdp_status status) {
    Checkpoint checkpoint(context.hooks(), made);
    detail::check(status);
    return checkpoint;
  }

  detail::KeptHooks hooks_;  // outlives raw_
  detail::Handle<fsdp_checkpoint, fsdp_destroy_checkpoint> raw_;
};

}  // namespace fsdp

#endif
