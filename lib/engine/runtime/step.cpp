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

std::string compare_scalings(uint32_t rank, const Scalings &given, uint32_t first, const Scalings &expected) {
  if (given == expected) return {};
  for (uint64_t i = 0; i < Scalings::max_kept; ++i)
    if (!(given.kept(i) == expected.kept(i)))
      return format_text("the scaling of gradients number {} of this step was {} on rank {}, {} on rank {}", i + 1,
                         describe(given.kept(i)), rank, describe(expected.kept(i)), first);
  return format_text(
      "the scalings of gradients of this step differ after the first {}: rank {} made {} in all, rank {} {}",
      Scalings::max_kept, rank, given.count(), first, expected.count());
}

}  // namespace

bool Scaling::operator==(const Scaling &other) const {
  return kind == other.kind && bits_of(number) == bits_of(other.number) && bits_of(norm) == bits_of(other.norm);
}

void Scalings::add(const Scaling &scaling) {
  if (count_ < max_kept) first_[count_] = scaling;
  ++count_;
  for (const uint64_t bits : {static_cast<uint64_t>(scaling.kind), bits_of(scaling.number), bits_of(scaling.norm)})
    hash_ = (std::rotl(hash_, 23) ^ bits) * 0x9E3779B97F4A7C15ull;
}

std::string describe_differences(uint32_t rank, const StepNumbers &given, uint32_t first, const StepNumbers &expected) {
  std::string text;
  const auto compare = [&](const char *field, auto other, auto expected) {
    if (other != expected)
      text += format_text("{}rank {} gave {} {}, rank {} gave {}", text.empty() ? "" : "; ", rank, field, other, first,
                          expected);
  };
  compare("beta1", given.beta1, expected.beta1);
  compare("beta2", given.beta2, expected.beta2);
  compare("epsilon", given.epsilon, expected.epsilon);
  compare("weight_decay", given.weight_decay, expected.weight_decay);
  compare("step", given.step, expected.step);
  if (given.max_norm >= 0 && expected.max_norm >= 0) {
    compare("max_norm", given.max_norm, expected.max_norm);
    if (given.asks_norm != expected.asks_norm)
      text += format_text("{}rank {} asked fsdp_apply_grads for the norm, rank {} did not", text.empty() ? "" : "; ",
                          given.asks_norm ? rank : first, given.asks_norm ? first : rank);
  }
  if (const std::string scalings = compare_scalings(rank, given.scalings, first, expected.scalings); !scalings.empty())
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
  collected_ = gives_chunks_ = false;
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

void Step::require_returned(const char *call) const {
  require_no_matrices(call);
  if (gives_chunks_)
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: chunks of shards are given on this rank, and not all of them are written to the file; call "
               "fsdp_next_shard_chunk until element_count is 0 first",
               call);
}

void Step::require_no_matrices(const char *call) const {
  if (collected_)
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: matrices are collected on this rank, and ranks may be at different ones; call "
               "fsdp_return_matrices first",
               call);
}

void Step::require_grads(const char *call) const {
  require_window(call);
  if (!window_has_grads())
    fsdp::fail(FSDP_INVALID_STATE,
               "{}: there are no gradients in this update window; fsdp_finish_grads opens one that has them", call);
}

}  // namespace fsdp::engine
