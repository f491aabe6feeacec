// SPDX-License-Identifier: Apache-2.0
#include "engine/model/saving.h"

#include <algorithm>

#include "base/text.h"
#include "engine/model/model.h"
#include "trace/timeline.h"
#include "transport/exchange.h"

namespace fsdp::engine {
namespace {

constexpr std::chrono::milliseconds poll_period(20);

}  // namespace

void Saving::require_open(const char *call) const {
  if (save_) fail(FSDP_INVALID_STATE, "{}: this checkpoint was committed already", call);
}

void Saving::add(std::shared_ptr<Model> model, const std::string &name) {
  constexpr auto call = "fsdp_add_checkpoint_model";
  require_open(call);
  if (&model->context() != &context_)
    fail(FSDP_INVALID_HANDLE, "{}: the model belongs to another context than the checkpoint", call);
  for (const NamedModel &other : models_) {
    if (other.model == model) fail(FSDP_INVALID_ARGUMENT, "{}: the model is in this checkpoint already", call);
    if (other.name == name)
      fail(FSDP_INVALID_ARGUMENT, "{}: the checkpoint has a model named {} already", call, quote_json(name));
  }
  model->checkpoints(call);  // throws unless the model is sealed and its context does more than plan
  models_.push_back({std::move(model), name});
}

void Saving::add_bytes(checkpoint::SavedBytes bytes) {
  constexpr auto call = "fsdp_add_checkpoint_bytes";
  require_open(call);
  if (std::ranges::find(bytes_, bytes.name, &checkpoint::SavedBytes::name) != bytes_.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: the checkpoint has bytes named {} already", call, quote_json(bytes.name));
  bytes_.push_back(std::move(bytes));
}

// The step of the checkpoint. Models that are stepped together are at the same step.
uint64_t Saving::find_step(const char *call) const {
  if (choice_.step) return choice_.step;
  uint64_t step = 0;
  for (const NamedModel &named : models_) step = std::max(step, named.model->checkpoints(call).step());
  return step;
}

checkpoint::SaveOrder Saving::prepare(const char *call) {
  if (models_.empty() && bytes_.empty())
    fail(FSDP_INVALID_STATE, "{}: there is nothing in this checkpoint; add a model or bytes", call);
  checkpoint::SaveOrder order{choice_.folder, find_step(call)};
  order.bytes = bytes_;
  order.choice = choice_.save;
  for (const NamedModel &named : models_) named.model->checkpoints(call).add_to(order, named.name, call);
  return order;
}

// If one rank cannot begin the save, for example because a model is in its update window, no rank does.
void Saving::commit(const std::shared_ptr<Saving> &self, const char *call) {
  Context &context = self->context_;
  self->require_open(call);
  const trace::Span span(context.timeline(), trace::EventKind::call, "commit_checkpoint");
  context.await_saving();
  checkpoint::SaveOrder order;
  transport::attempt_together(context.world_team(), "a checkpoint's models", [&] { order = self->prepare(call); });
  const uint64_t step = order.step;
  auto save = std::make_shared<checkpoint::Save>(
      checkpoint::SaveRanks{context.world_team(), context.world(), context.waiter()}, std::move(order));
  for (const NamedModel &named : self->models_) named.model->checkpoints(call).watch(save);
  {
    const std::lock_guard lock(self->mutex_);
    self->save_ = std::move(save);
    self->step_ = step;
    self->bytes_.clear();
  }
  context.checkpoint_slot().set(self);
}

void Saving::wait(const char *call) {
  if (!save_)
    fail(FSDP_INVALID_STATE, "{}: this checkpoint was not committed; call fsdp_commit_checkpoint first", call);
  const trace::Span span(context_.timeline(), trace::EventKind::wait, "wait for a checkpoint");
  try {
    while (!save_->progress().ended) {
      context_.waiter().poll();
      save_->await_end(poll_period);
    }
  } catch (Error &error) {  // an interrupt ends only this wait
    error.ends_context = error.status != FSDP_INTERRUPTED;
    throw;
  }
  end();
  const checkpoint::SaveResult result = save_->result();
  if (!result.warning.empty() && !std::exchange(warned_, true))
    context_.log(FSDP_LOG_WARNING, "a checkpoint: " + result.warning);
}

void Saving::end() {
  release_models();
  context_.checkpoint_slot().forget(this);
}

// Releases the models once the save no longer reads them.
void Saving::release_models() {
  std::vector<NamedModel> last;  // destroyed outside the lock
  const std::lock_guard lock(mutex_);
  if (save_ && save_->progress().packed) last.swap(models_);
}

Saving::SavingProgress Saving::progress() const {
  const std::lock_guard lock(mutex_);
  if (!save_) return {};
  SavingProgress progress{true, save_->progress(), save_->name(), step_};
  if (progress.save.ended)
    if (const auto failure = capture_error([&] { save_->result(); })) progress.failure = failure->status;
  return progress;
}

void Saving::give_up(fsdp_status status, const char *why) noexcept {
  const std::lock_guard lock(mutex_);
  if (save_) save_->give_up(status, why);
}

bool Saving::under_way() const noexcept {
  const std::lock_guard lock(mutex_);
  return save_ && !save_->progress().ended;
}

}  // namespace fsdp::engine
