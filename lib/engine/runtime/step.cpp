// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/step.h"

#include <bit>
#include <cmath>

#include "base/error.h"

namespace fsdp::engine {

namespace {

uint64_t bits_of(double value) { return std::isnan(value) ? ~uint64_t{0} : std::bit_cast<uint64_t>(value); }

std::string describe(const Scaling &scaling) {
  switch (scaling.kind) {
    case ScalingKind::scale: return format_text("fsdp_scale_grads by {}", scaling.number);
    case ScalingKind::clip:
      if (scaling.norm == Scaling::of_the_model)
        return format_text("fsdp_clip_grads to max_norm {} at the norm of the model", scaling.number);
      return format_text("fsdp_clip_grads to max_norm {} at a norm of {}", scaling.number, scaling.norm);
    default: return "none";
  }
}

std::string compare_scalings(uint32_t rank, const Scalings &theirs, uint32_t first, const Scalings &of_first) {
  if (theirs == of_first) return {};
  for (uint64_t i = 0; i < Scalings::most_kept; ++i)
    if (!(theirs.kept(i) == of_first.kept(i)))
      return format_text("the scaling of gradients number {} of this step was {} on rank {}, {} on rank {}", i + 1,
                         describe(theirs.kept(i)), rank, describe(of_first.kept(i)), first);
  return format_text(
      "the scalings of gradients of this step differ after the first {}: rank {} made {} in all, rank {} {}",
      Scalings::most_kept, rank, theirs.count(), first, of_first.count());
}

}  // namespace

bool Scaling::operator==(const Scaling &other) const {
  return kind == other.kind && bits_of(number) == bits_of(other.number) && bits_of(norm) == bits_of(other.norm);
}

void Scalings::add(const Scaling &scaling) {
  if (count_ < most_kept) first_[count_] = scaling;
  ++count_;
  for (const uint64_t bits : {static_cast<uint64_t>(scaling.kind), bits_of(scaling.number), bits_of(scaling.norm)})
    hash_ = (std::rotl(hash_, 23) ^ bits) * 0x9E3779B97F4A7C15ull;
}

std::string compare_numbers(uint32_t rank, const StepNumbers &theirs, uint32_t first, const StepNumbers &of_first) {
  std::string text;
  const auto compare = [&](const char *field, auto other, auto expected) {
    if (other != expected)
      text += format_text("{}rank {} gave {} {}, rank {} gave {}", text.empty() ? "" : "; ", rank, field, other, first,
                          expected);
  };
  compare("beta1", theirs.beta1, of_first.beta1);
  compare("beta2", theirs.beta2, of_first.beta2);
  compare("epsilon", theirs.epsilon, of_first.epsilon);
  compare("weight_decay", theirs.weight_decay, of_first.weight_decay);
  compare("step", theirs.step, of_first.step);
  if (theirs.max_norm >= 0 && of_first.max_norm >= 0) {
    compare("max_norm", theirs.max_norm, of_first.max_norm);
    if (theirs.asks_norm != of_first.asks_norm)
      text += format_text("{}rank {} asked fsdp_apply_grads for the norm, rank {} did not", text.empty() ? "" : "; ",
                          theirs.asks_norm ? rank : first, theirs.asks_norm ? first : rank);
  }
  if (const std::string scalings = compare_scalings(rank, theirs.scalings, first, of_first.scalings); !scalings.empty())
    text += (text.empty() ? "" : "; ") + scalings;
  return text;
}

void Step::open_window(bool has_grads) {
  StepState::window_open = true;
  StepState::window_has_grads = has_grads;
}

void Step::close_window(bool ready) {
  StepState::version_ready = ready;
  StepState::window_open = StepState::window_has_grads = false;
  StepState::scalings.restart();
}

void Step::discard() {
  failure_.clear();
  StepState::window_open = StepState::window_has_grads = false;
  StepState::scalings.restart();
}

void Step::require_unfailed(const char *call) const {
  if (failed())
    fsdp::fail(FSDP_INVALID_STATE, "{}: this step has failed and must be discarded with fsdp_discard_step: {}", call,
               failure_);
}

void Step::require_weights(const char *call) const {
  require_unfailed(call);
  if (window_open())
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: the update window is open{}; close it with fsdp_publish_weights or a step that publishes{}", call,
               version() == 0 ? " (the model was sealed and nothing was published yet)" : "",
               version() == 0 ? "" : ", or with fsdp_discard_step");
}

void Step::require_window(const char *call) const {
  require_unfailed(call);
  if (!window_open())
    fsdp::fail(FSDP_INVALID_STATE, "{}: the update window is closed; fsdp_finish_grads or fsdp_begin_update opens it",
               call);
}

void Step::require_grads(const char *call) const {
  require_window(call);
  if (!window_has_grads())
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: there are no gradients in this update window; fsdp_finish_grads opens one that has them", call);
}

}  // namespace fsdp::engine
