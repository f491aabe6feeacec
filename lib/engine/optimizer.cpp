// SPDX-License-Identifier: Apache-2.0
#include "engine/optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>

#include "base/dtype.h"

namespace fsdp::engine {

Optimizer::Optimizer(Runtime &runtime, bool adamw) : runtime_(runtime), adamw_(adamw) {
  const layout::Mesh &mesh = runtime.spec.mesh;
  const uint32_t slot = mesh.slot(runtime.teams.all->rank());
  uint32_t ordinal = 0;
  for (const Group &group : runtime.groups) {
    for (uint32_t i = 0; i < group.places.size(); ++i, ++ordinal) {
      const ParamPlace &place = group.places[i];
      const memory::ParamSpec &param = runtime.param(group, i);
      names_.push_back(param.name.c_str());
      if (param.frozen()) continue;
      const memory::BucketPlan &bucket = runtime.plan.buckets[place.bucket];
      Shard shard{group.index, i, ordinal, place.bucket, bucket.layout.slice(place.tensor, slot, 1, mesh.slices()), {}};
      shard.counted = shard.slice;
      if (bucket.main_is_whole) shard.slice = {0, bucket.layout.tensors[place.tensor].full_offset, 0, param.element_count, 0};
      if (shard.slice.count) shards_.push_back(shard);
    }
  }
  make_batches();
}

device::AdamWSpan Optimizer::span_of(const Shard &shard) const {
  const Bucket &bucket = runtime_.storage->buckets()[shard.bucket];
  const auto state = [&](size_t index) {
    return adamw_ ? reinterpret_cast<float *>(bucket.states[index].at(shard.slice)) : nullptr;
  };
  return {main_weight(shard), main_grad(shard), state(0), state(1), compute(shard), bucket.plan->dtype, shard.slice.count};
}

namespace {

// Does b begin where a ends, everywhere?
bool continues(const device::AdamWSpan &a, const device::AdamWSpan &b) {
  const auto follows = [&](const void *end, const void *begin, uint64_t size) {
    return end ? static_cast<const std::byte *>(end) + a.count * size == begin : !begin;
  };
  return a.compute_dtype == b.compute_dtype && follows(a.weight, b.weight, sizeof(float)) &&
         follows(a.grad, b.grad, sizeof(float)) && follows(a.exp_avg, b.exp_avg, sizeof(float)) &&
         follows(a.exp_avg_sq, b.exp_avg_sq, sizeof(float)) && follows(a.compute, b.compute, dtype_size(a.compute_dtype));
}

void merge_neighbours(std::vector<device::AdamWSpan> &spans) {
  std::sort(spans.begin(), spans.end(), [](const auto &a, const auto &b) { return std::less<>()(a.weight, b.weight); });
  size_t last = 0;
  for (size_t i = 1; i < spans.size(); ++i) {
    if (continues(spans[last], spans[i])) {
      spans[last].count += spans[i].count;
    } else {
      spans[++last] = spans[i];
    }
  }
  spans.resize(last + 1);
}

}  // namespace

// What is done to each element depends on nothing else, so neither order nor cuts change a bit.
void Optimizer::make_batches() {
  std::map<std::pair<double, bool>, std::vector<device::AdamWSpan>> alike;
  for (const Shard &shard : shards_) {
    const memory::ParamSpec &param = runtime_.param(runtime_.groups[shard.group], shard.param_index);
    alike[{param.lr_scale, !(param.flags & FSDP_PARAM_NO_DECAY)}].push_back(span_of(shard));
  }
  for (auto &[key, spans] : alike) {
    merge_neighbours(spans);
    batches_.push_back({key.first, key.second, {}, std::move(spans)});
  }
}

const Shard &Optimizer::shard(uint64_t index, const char *call) const {
  if (index >= shards_.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: shard_index {} is outside [0, {})", call, index, shards_.size());
  return shards_[index];
}

float *Optimizer::main_weight(const Shard &shard) const {
  return reinterpret_cast<float *>(runtime_.storage->buckets()[shard.bucket].main.at(shard.slice));
}

float *Optimizer::main_grad(const Shard &shard) const {
  return reinterpret_cast<float *>(runtime_.storage->buckets()[shard.bucket].grad.at(shard.slice));
}

// NULL where the main weights are the compute weights.
std::byte *Optimizer::compute(const Shard &shard) const {
  const Bucket &bucket = runtime_.storage->buckets()[shard.bucket];
  return bucket.plan->main_is_compute ? nullptr : bucket.compute.at(shard.slice);
}

const Plane &Optimizer::state(const Shard &shard, const char *name, const char *call) const {
  const auto &states = runtime_.spec.states;
  for (size_t s = 0; s < states.size(); ++s)
    if (states[s].name == name) return runtime_.storage->buckets()[shard.bucket].states[s];
  std::string known;
  for (const auto &state : states) known += format_text("{}'{}'", known.empty() ? "" : ", ", state.name);
  fail(FSDP_INVALID_ARGUMENT, "{}: the model has no optimizer state '{}'; it has: {}", call, name,
       known.empty() ? "none" : known);
}

void Optimizer::synchronize(device::Stream &stream) {
  stream.record(*runtime_.order);
  if (!runtime_.order->done()) runtime_.context.device().synchronize(*runtime_.order);
}

// This rank's sum of squares of every parameter, in own_values().
void Optimizer::measure_squares(device::Stream &caller) {
  runtime_.join_window(caller);
  std::fill_n(own_values(), names_.size(), 0.0);
  for (const Shard &shard : shards_) {
    if (shard.counted.count == 0) continue;
    const Bucket &bucket = runtime_.storage->buckets()[shard.bucket];
    const uint64_t granule = runtime_.placement(runtime_.groups[shard.group].places[shard.param_index]).granule;
    caller.sum_squares(own_values() + shard.ordinal, reinterpret_cast<float *>(bucket.grad.at(shard.counted)),
                       shard.counted.count, granule);
  }
  synchronize(caller);
}

// The ranks that hold different slots: replicas hold the same, and come to the same.
comm::Team &Optimizer::holders() const {
  return runtime_.spec.mesh.slices() > 1 ? *runtime_.teams.all : runtime_.inner();
}

// Every holder's values go to all_values(), in the order of its ranks.
void Optimizer::exchange(const double *own, size_t count, const char *what) {
  const WaitSpan span(runtime_, Awaited::peers);
  const trace::FlightScope flight(*runtime_.meeting_flights, what, count * sizeof(double));
  holders().exchange_fixed(own, count * sizeof(double), all_values(), what);
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

// Each slot's total first, then the slots in order: the same additions for every strategy.
double Optimizer::grad_norm(device::Stream &caller) {
  const CallSpan span(runtime_, "grad_norm");
  measure_squares(caller);
  double own = 0, total = 0;
  for (size_t p = 0; p < names_.size(); ++p) own += own_values()[p];
  exchange(&own, 1, "the gradient norm");
  const layout::Mesh &mesh = runtime_.spec.mesh;
  for (uint32_t slot = 0; slot < mesh.slots(); ++slot) total += all_values()[mesh.holder(slot)];
  return std::sqrt(total);
}

void Optimizer::param_grad_norms(device::Stream &caller, double *norms, uint64_t count) {
  if (count != names_.size())
    fail(FSDP_INVALID_ARGUMENT, "fsdp_get_param_grad_norms: norm_count is {}, the model has {} parameters", count, names_.size());
  const CallSpan span(runtime_, "param_grad_norms");
  measure_squares(caller);
  std::fill_n(norms, count, 0.0);
  exchange_values([&](size_t p, double squares) { norms[p] += squares; });
  for (size_t p = 0; p < names_.size(); ++p) norms[p] = std::sqrt(norms[p]);
}

void Optimizer::scale_grads(double factor, device::Stream &caller) {
  const float value = static_cast<float>(factor);
  if (value == 1.0f) return;
  const CallSpan span(runtime_, "scale_grads");
  runtime_.join_window(caller);
  for (const Shard &shard : shards_) caller.scale(main_grad(shard), value, shard.slice.count);
  runtime_.leave_window(caller);
}

double Optimizer::clip_grads(double max_norm, device::Stream &caller) {
  if (!(max_norm > 0)) fail(FSDP_INVALID_ARGUMENT, "fsdp_clip_grads: max_norm is {}, it must be above 0", max_norm);
  const CallSpan span(runtime_, "clip_grads");
  const double norm = grad_norm(caller);
  if (std::isfinite(norm) && norm > max_norm) scale_grads(max_norm / norm, caller);
  return norm;
}

const char *Optimizer::find_nonfinite(device::Stream &caller) {
  const CallSpan span(runtime_, "check_grads");
  auto *counts = reinterpret_cast<uint64_t *>(own_values());
  runtime_.join_window(caller);
  std::fill_n(counts, names_.size(), uint64_t{0});
  for (const Shard &shard : shards_) {
    if (shard.counted.count == 0) continue;
    const Bucket &bucket = runtime_.storage->buckets()[shard.bucket];
    caller.count_nonfinite(counts + shard.ordinal, reinterpret_cast<float *>(bucket.grad.at(shard.counted)), shard.counted.count);
  }
  synchronize(caller);
  size_t first = names_.size();
  exchange_values([&](size_t p, double count) {
    if (std::bit_cast<uint64_t>(count)) first = std::min(first, p);
  });
  return first < names_.size() ? names_[first] : nullptr;
}

void Optimizer::make_steps(double lr, const fsdp_adamw_options &options, uint64_t step_number) {
  const double beta1 = options.flags & FSDP_ADAMW_BETA1_ZERO ? 0.0 : options.beta1 != 0 ? options.beta1 : 0.9;
  const double beta2 = options.beta2 != 0 ? options.beta2 : 0.999;
  const auto step = static_cast<double>(step_number);
  device::AdamW adamw{};
  adamw.beta1 = static_cast<float>(beta1);
  adamw.beta2 = static_cast<float>(beta2);
  adamw.epsilon = static_cast<float>(options.epsilon != 0 ? options.epsilon : 1e-8);
  adamw.correction1 = static_cast<float>(1.0 - std::pow(beta1, step));
  adamw.correction2 = static_cast<float>(1.0 - std::pow(beta2, step));
  for (Batch &batch : batches_) {
    adamw.lr = static_cast<float>(lr * batch.lr_scale);
    adamw.weight_decay = batch.decays ? static_cast<float>(options.weight_decay) : 0.0f;
    batch.step = adamw;
  }
}

void Optimizer::step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller) {
  const uint64_t step = options.step ? options.step : runtime_.adamw_step + 1;
  runtime_.join_window(caller);
  make_steps(lr, options, step);
  for (const Batch &batch : batches_) caller.adamw(batch.step, batch.spans);
  runtime_.adamw_step = step;
}

void Optimizer::step_adamw_captured(device::Stream &caller) {
  runtime_.join_window(caller);
  const device::AdamW *step = runtime_.storage->steps();
  for (const Batch &batch : batches_) caller.adamw_from(step++, batch.spans);
  ++runtime_.adamw_step;
}

void Optimizer::store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller) {
  make_steps(lr, options, runtime_.adamw_step + 1);
  device::AdamW *step = runtime_.storage->steps();
  for (const Batch &batch : batches_) caller.store_step(step++, batch.step);
}

void Optimizer::cast_weights(device::Stream &stream) {
  for (const Batch &batch : batches_)
    for (const device::AdamWSpan &span : batch.spans)
      if (span.compute) stream.cast(span.compute, span.compute_dtype, span.weight, FSDP_FLOAT32, span.count);
}

}  // namespace fsdp::engine
