// SPDX-License-Identifier: Apache-2.0
// A checkpoint of a context's ranks: what goes into it until it is committed, then how far it is. The context has one
// under way at most, and keeps it, and its models, until it has ended.
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
    uint64_t step = 0;  // 0: the models'
    checkpoint::SaveChoice save = {};
  };
  struct SavingProgress {
    bool committed = false;  // it was asked to be: what follows counts
    checkpoint::SaveProgress save = {};
    std::string name = {};
    uint64_t step = 0;
    std::optional<fsdp_status> failure = {};  // of one that has ended
  };

  Saving(Context &context, SavingChoice choice) : context_(context), choice_(std::move(choice)) {}
  Saving(const Saving &) = delete;
  Saving &operator=(const Saving &) = delete;

  // Until it is committed; INVALID_STATE later, INVALID_ARGUMENT for a name that is there.
  void add(std::shared_ptr<Model> model, const std::string &name);
  void add_bytes(checkpoint::SavedBytes bytes);
  // Collective over the job: the save is under way when it returns. self: kept by the context.
  static void commit(const std::shared_ptr<Saving> &self, const char *call);
  void wait(const char *call) override;
  // Any thread.
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
  std::shared_ptr<checkpoint::Save> save_;  // once it is committed
  uint64_t step_ = 0;
  bool told_ = false;  // the first rank's warning
};

}  // namespace fsdp::engine
