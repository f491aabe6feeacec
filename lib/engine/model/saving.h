// SPDX-License-Identifier: Apache-2.0
// A checkpoint of a context's ranks. Before its commit it collects contents; afterwards it reports progress. The
// context has at most one save under way, and keeps the save and its models until the save has ended.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/job/save.h"
#include "engine/context/checkpoint_slot.h"

namespace fsdp::engine {

class Context;
class Model;

class Saving final : public OpenSave {
 public:
  struct SavingChoice {
    std::string folder;
    uint64_t step = 0;  // 0: the step of the models
    checkpoint::SaveChoice save = {};
  };
  struct SavingProgress {
    bool committed = false;  // commit() was called; the fields below are valid only then
    checkpoint::SaveProgress save = {};
    std::string name = {};
    uint64_t step = 0;
    std::optional<fsdp_status> failure = {};  // the error, if the save has ended with one
  };

  Saving(Context &context, SavingChoice choice) : context_(context), choice_(std::move(choice)) {}
  Saving(const Saving &) = delete;
  Saving &operator=(const Saving &) = delete;

  // Must be called before the commit; throws INVALID_STATE later, and INVALID_ARGUMENT if the name exists already.
  void add(std::shared_ptr<Model> model, const std::string &name);
  void add_bytes(checkpoint::SavedBytes bytes);
  // Collective over the job. On return the save is under way, and the context keeps `self`.
  static void commit(const std::shared_ptr<Saving> &self, const char *call);
  void wait(const char *call) override;
  // Any thread may call it.
  SavingProgress progress() const;
  void give_up(fsdp_status status, const char *why) noexcept override;
  bool under_way() const noexcept override;
  void release_models() override;

 private:
  struct NamedModel {
    std::shared_ptr<Model> model;
    std::string name;
  };
  void require_open(const char *call) const;
  uint64_t find_step(const char *call) const;
  checkpoint::SaveOrder prepare(const char *call);
  void end();

  Context &context_;
  SavingChoice choice_;
  std::vector<NamedModel> models_;
  std::vector<checkpoint::SavedBytes> bytes_;
  mutable std::mutex mutex_;
  std::shared_ptr<checkpoint::Save> save_;  // set by the commit
  uint64_t step_ = 0;
  bool warned_ = false;  // the first rank's warning was logged
};

}  // namespace fsdp::engine
