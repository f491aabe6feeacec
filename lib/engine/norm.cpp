// SPDX-License-Identifier: Apache-2.0
// What the ranks of a model measure of its main grads together: norms, of further models too, and what is not finite.
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "engine/optimizer.h"

namespace fsdp::engine {

// This rank's sum of squares of every parameter. Those that it has nothing of are 0 for ever: nobody writes there.
void Optimizer::measure_squares(double *squares, device::Stream &caller) {
  for (size_t i = 0; i < squares_.size(); ++i) squares_[i].result = squares + measured_ordinals_[i];
  caller.sum_all_squares(squares_);
}

// Every holder's values go to all_values(), in the order of its ranks.
void Optimizer::exchange(const double *own, size_t count, const char *what) {
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope flight(*runtime_.flights.meetings, what, count * sizeof(double));
  runtime_.holders().all_gather(own, count * sizeof(double), all_values(), what);
}

// Hands every parameter's values of all slots, in order, to `take`, some parameters at a time.
template <class Take>
void Optimizer::exchange_values(Take take) {
  const layout::Mesh &mesh = runtime_.spec.mesh;
  for (size_t first = 0; first < names_.size(); first += memory::norm_chunk) {
    const size_t count = std::min<size_t>(memory::norm_chunk, names_.size() - first);
    exchange(own_values() + first, count, "values of parameters");
    for (size_t p = 0; p < count; ++p)
      for (uint32_t slot = 0; slot < mesh.slots(); ++slot) take(first + p, all_values()[mesh.holder(slot) * count + p]);
  }
}

namespace {

std::string describe_limit(double max_norm) {
  return max_norm > 0 ? format_text("max_norm {}", max_norm) : "the norm alone";
}

constexpr double scaled_otherwise = -2;  // in the place of a max_norm

[[noreturn]] void refuse(const NormDispute &dispute, uint32_t model) {
  const auto odd = static_cast<int32_t>(dispute.odd), first = static_cast<int32_t>(dispute.first);
  if (dispute.by_odd == scaled_otherwise)
    fail_rank(FSDP_MISMATCH, odd,
              "the gradient norm: model {}: rank {} has scaled its gradients otherwise than rank {} (fsdp_scale_grads, "
              "fsdp_clip_grads); call "
              "fsdp_discard_step on every rank to go on",
              model, odd, first);
  fail_rank(FSDP_MISMATCH, odd, "the gradient norm: model {}: rank {} asked for {}, rank {} for {}; nothing was scaled",
            model, odd, describe_limit(dispute.by_odd), first, describe_limit(dispute.by_first));
}

}  // namespace

// What ranks do with the norm, so that those who would scale differently know it before any does. Where callers tell
// their shares, these come along.
NormDispute Optimizer::meet_for_norm(double max_norm) {
  constexpr size_t told = 3;
  const double share = norm_.callers_tell() ? *norm_.share() : 0;
  const double own[told] = {share, max_norm, std::bit_cast<double>(runtime_.step.scalings().hash())};
  exchange(own, told, "the gradient norm");
  transport::Team &team = runtime_.holders();
  const auto scalings = [&](uint32_t r) { return std::bit_cast<uint64_t>(all_values()[told * r + 2]); };
  for (uint32_t r = 1; r < team.size(); ++r) {
    const double limit = all_values()[1], other = all_values()[told * r + 1];
    const auto odd = static_cast<double>(team.world_rank(r)), first = static_cast<double>(team.world_rank(0));
    if (scalings(r) != scalings(0)) return {odd, scaled_otherwise, first, scaled_otherwise};
    if (other != limit) return {odd, other, first, limit};
  }
  if (norm_.callers_tell())
    for (uint32_t r = 0; r < team.size(); ++r) norm_.shares()[r] = all_values()[told * r];
  return {};
}

// Ranks of other models wait for this one's norm also where its own ranks do not agree. So the dispute goes along, and
// the first one in the mesh's order is what all of its ranks report.
NormDispute Optimizer::exchange_further(const layout::Mesh &further, double max_norm, double &squares,
                                        const NormDispute &own) {
  const double mine[] = {squares, max_norm, own.odd, own.by_odd, own.first, own.by_first};
  const auto told =
      runtime_.context.exchange_values(&further, mine, std::size(mine), 0, "the gradient norm over a further mesh");
  squares = told[0].values[0];
  for (size_t r = 1; r < told.size(); ++r) squares += told[r].values[0];
  for (const auto &other : told)
    if (const double *values = other.values; values[2] >= 0) return {values[2], values[3], values[4], values[5]};
  const double limit = told[0].values[1];
  for (size_t r = 1; r < told.size(); ++r)
    if (const double other = told[r].values[1]; other != limit)
      return {static_cast<double>(further.ranks[r]), other, static_cast<double>(further.ranks[0]), limit};
  return {};
}

// Two ranks of the model's own mesh both have the whole model's norm, which would count twice.
void Optimizer::require_other_parts(const layout::Mesh &further) const {
  const auto &own = runtime_.spec.mesh.ranks;
  for (const uint32_t rank : further.ranks)
    if (rank != runtime_.context.rank() && std::find(own.begin(), own.end(), rank) != own.end())
      fail(FSDP_INVALID_ARGUMENT,
           "the gradient norm: rank {} is in the mesh given and in the model's own, whose norm would count twice; "
           "the mesh joins ranks of different models (NULL: the model alone)",
           rank);
}

// Each slot's share first, then the slots in order: the same additions for every strategy.
void Optimizer::measure_norm(const layout::Mesh *further, double max_norm, device::Stream &caller) {
  const CallSpan span(runtime_, "grad_norm");
  if (further) require_other_parts(*further);
  runtime_.join_window(caller);
  measure_squares(norm_.squares(), caller);
  caller.sum_values(norm_.share(), norm_.squares(), names_.size());
  runtime_.leave_window(caller);
  NormDispute dispute = meet_for_norm(max_norm);
  if (further) return measure_further(*further, max_norm, dispute, caller);
  if (dispute.odd >= 0) refuse(dispute, runtime_.teams.number);
  norm_.find(max_norm, caller);
  known_norm_ = {true, {}};
}

// The host adds the norms of models, and so waits for this one's.
void Optimizer::measure_further(const layout::Mesh &further, double max_norm, NormDispute dispute,
                                device::Stream &caller) {
  if (known_norm_.measured) known_norm_.value = last_norm();  // if ranks disagree it stays the last
  double squares = 0;
  if (dispute.odd < 0) {
    norm_.find(0, caller);
    squares = norm_.read().squares;
  }
  dispute = exchange_further(further, max_norm, squares, dispute);
  if (dispute.odd >= 0) refuse(dispute, runtime_.teams.number);
  known_norm_ = {true, std::sqrt(squares)};
}

void Optimizer::grad_norm(const layout::Mesh *further, device::Stream &caller, double *norm) {
  measure_norm(further, 0, caller);
  if (norm) *norm = *last_norm();
}

std::optional<double> Optimizer::last_norm() const {
  if (!known_norm_.measured || known_norm_.value) return known_norm_.value;
  return norm_.read().norm;
}

void Optimizer::param_grad_norms(device::Stream &caller, double *norms, uint64_t count) {
  if (count != names_.size())
    fail(FSDP_INVALID_ARGUMENT, "fsdp_get_param_grad_norms: norm_count is {}, the model has {} parameters", count,
         names_.size());
  const CallSpan span(runtime_, "param_grad_norms");
  runtime_.join_window(caller);
  measure_squares(own_values(), caller);
  synchronize(caller);
  std::fill_n(norms, count, 0.0);
  exchange_values([&](size_t p, double squares) { norms[p] += squares; });
  for (size_t p = 0; p < names_.size(); ++p) norms[p] = std::sqrt(norms[p]);
}

// What the model's own ranks find is the same on all of them, whoever reads it.
void Optimizer::clip_grads(const layout::Mesh *further, double max_norm, device::Stream &caller, double *norm) {
  constexpr auto call = "fsdp_clip_grads";
  if (!(max_norm > 0)) fail(FSDP_INVALID_ARGUMENT, "{}: max_norm is {}, it must be above 0", call, max_norm);
  const CallSpan span(runtime_, "clip_grads");
  measure_norm(further, max_norm, caller);
  const bool known = further || norm_.callers_tell();
  const double found = known ? *last_norm() : Scaling::of_the_model;
  runtime_.step.scaled({ScalingKind::clip, max_norm, found});
  if (!further)
    clip_to_norm(caller);
  else if (std::isfinite(found) && found > max_norm)
    multiply_grads(max_norm / found, caller);
  if (norm) *norm = known ? found : *last_norm();
}

void Optimizer::clip_to_norm(device::Stream &caller) {
  const CallSpan span(runtime_, "scale_grads");
  runtime_.join_window(caller);
  norm_.await(caller);
  caller.scale_all_by(grads_, norm_.factor());
  runtime_.leave_window(caller);
}

const char *Optimizer::find_nonfinite(device::Stream &caller) {
  const CallSpan span(runtime_, "check_grads");
  auto *counts = reinterpret_cast<uint64_t *>(own_values());
  runtime_.join_window(caller);
  for (size_t i = 0; i < squares_.size(); ++i)
    caller.count_nonfinite(counts + measured_ordinals_[i], squares_[i].values, squares_[i].count);
  synchronize(caller);
  size_t first = names_.size();
  exchange_values([&](size_t p, double count) {
    if (std::bit_cast<uint64_t>(count)) first = std::min(first, p);
  });
  return first < names_.size() ? names_[first] : nullptr;
}

}  // namespace fsdp::engine
