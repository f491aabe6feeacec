// SPDX-License-Identifier: Apache-2.0
#include "engine/optimizer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "base/dtype.h"
#include "engine/plane_slices.h"

namespace fsdp::engine {

Optimizer::Optimizer(Runtime &runtime, bool adamw)
    : runtime_(runtime), adamw_(adamw), norm_(runtime), quantizer_(runtime) {
  for (const Group &group : runtime.groups)
    for (const memory::ParamSpec &param : group.spec->params) names_.push_back(param.name.c_str());
  for_each_slice(runtime, {PlaneKind::main}, [&](const PlaneSlice &main) {
    const layout::Slice counted = memory::slice_of(main.bucket.plan->layout, main.tensor, Extent::shard,
                                                   runtime.spec.mesh, runtime.teams.all->rank());
    if (main.slice.count)
      shards_.push_back({main.group.index, main.param_index, main.ordinal, &main.bucket, main.slice, counted});
  });
  kept_.reserve(shards_.size());
  grads_.reserve(shards_.size());
  squares_.reserve(shards_.size());
  measured_ordinals_.reserve(shards_.size());
  list_grads();
  adopt(make_batches());
}

bool Optimizer::is_kept(const Shard &shard) const noexcept {
  const memory::ParamSpec &param = param_of(shard);
  if (!param.has_gradient()) return true;
  return param.skips_missing() && runtime_.step.window_has_grads() &&
         !runtime_.groups[shard.group].grad.given[shard.param_index];
}

// What all main grads are measured and scaled by, in a few launches. Of what is not trained they are zeros: one of
// them stands for all, and the result is written like the others.
void Optimizer::list_grads() noexcept {
  grads_.clear();
  squares_.clear();
  measured_ordinals_.clear();
  for (const Shard &shard : shards_) {
    const bool trained = param_of(shard).has_gradient();
    if (trained) grads_.push_back({main_grad(shard), shard.slice.count});
    if (shard.counted.count == 0) continue;
    const uint64_t granule = runtime_.placement(runtime_.groups[shard.group].places[shard.param_index]).granule;
    const auto *counted = reinterpret_cast<const float *>(shard.bucket->plane(PlaneKind::grad).at(shard.counted));
    squares_.push_back({nullptr, counted, trained ? shard.counted.count : 1, trained ? granule : 1});
    measured_ordinals_.push_back(shard.ordinal);
  }
  std::ranges::sort(grads_, std::less<>(), &device::FloatSpan::values);
  size_t last = 0;
  for (size_t i = 1; i < grads_.size(); ++i)
    if (grads_[last].values + grads_[last].count == grads_[i].values)
      grads_[last].count += grads_[i].count;
    else
      grads_[++last] = grads_[i];
  if (!grads_.empty()) grads_.resize(last + 1);
}

void Optimizer::list_trained() noexcept {
  list_grads();
  list_spans();
}

device::AdamWSpan Optimizer::span_of(const Shard &shard) const {
  const auto state = [&](uint32_t index) {
    return adamw_ ? reinterpret_cast<float *>(shard.bucket->plane(PlaneKind::state, index).at(shard.slice)) : nullptr;
  };
  return {main_weight(shard), main_grad(shard), state(0),
          state(1),           compute(shard),   shard.bucket->plane(PlaneKind::compute).dtype(),
          shard.slice.count};
}

namespace {

// Does b begin where a ends, everywhere?
bool continues(const device::AdamWSpan &a, const device::AdamWSpan &b) {
  const auto follows = [&](const void *end, const void *begin, uint64_t size) {
    return end ? static_cast<const std::byte *>(end) + a.count * size == begin : !begin;
  };
  return a.compute_dtype == b.compute_dtype && follows(a.weight, b.weight, sizeof(float)) &&
         follows(a.grad, b.grad, sizeof(float)) && follows(a.exp_avg, b.exp_avg, sizeof(float)) &&
         follows(a.exp_avg_sq, b.exp_avg_sq, sizeof(float)) &&
         follows(a.compute, b.compute, dtype_size(a.compute_dtype));
}

void add_span(std::vector<device::AdamWSpan> &spans, const device::AdamWSpan &span) noexcept {
  if (!spans.empty() && continues(spans.back(), span))
    spans.back().count += span.count;
  else
    spans.push_back(span);
}

}  // namespace

// What is done to each element depends on nothing else, so neither order nor cuts change a bit.
std::vector<AdamWBatch> Optimizer::make_batches(const memory::ParamSpec *changed, double lr_scale) const {
  std::map<std::pair<double, bool>, std::vector<ShardSpan>> alike;
  for (const Shard &shard : shards_) {
    const memory::ParamSpec &param = param_of(shard);
    alike[{&param == changed ? lr_scale : param.lr_scale, !(param.flags & FSDP_PARAM_NO_DECAY)}].push_back(
        {&shard, span_of(shard)});
  }
  std::vector<AdamWBatch> batches;
  for (auto &[key, shards] : alike) {
    std::ranges::sort(shards, std::less<>(), [](const ShardSpan &one) { return one.span.weight; });
    batches.push_back({key.first, key.second, {}, std::move(shards), {}});
    batches.back().spans.reserve(batches.back().shards.size());
  }
  return batches;
}

void Optimizer::adopt(std::vector<AdamWBatch> batches) noexcept {
  batches_ = std::move(batches);
  list_spans();
}

void Optimizer::list_spans() noexcept {
  kept_.clear();
  for (AdamWBatch &batch : batches_) {
    batch.spans.clear();
    for (const ShardSpan &one : batch.shards) add_span(is_kept(*one.shard) ? kept_ : batch.spans, one.span);
  }
}

const Shard &Optimizer::shard(uint64_t index, const char *call) const {
  if (index >= shards_.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: shard_index {} is outside [0, {})", call, index, shards_.size());
  return shards_[index];
}

float *Optimizer::main_weight(const Shard &shard) const {
  return reinterpret_cast<float *>(shard.bucket->plane(PlaneKind::main).at(shard.slice));
}

float *Optimizer::main_grad(const Shard &shard) const {
  return reinterpret_cast<float *>(shard.bucket->plane(PlaneKind::grad).at(shard.slice));
}

// NULL where the main weights are the compute weights, and where these are codes, which more than an element makes.
std::byte *Optimizer::compute(const Shard &shard) const {
  if (shard.bucket->plane(PlaneKind::main).plan->again || shard.bucket->plan->quantization) return nullptr;
  return shard.bucket->plane(PlaneKind::compute).at(shard.slice);
}

const Plane &Optimizer::state(const Shard &shard, const char *name, const char *call) const {
  const auto &states = runtime_.spec.states;
  for (size_t s = 0; s < states.size(); ++s)
    if (states[s].name == name) return shard.bucket->plane(PlaneKind::state, static_cast<uint32_t>(s));
  std::string known;
  for (const auto &state : states) known += format_text("{}'{}'", known.empty() ? "" : ", ", state.name);
  fail(FSDP_INVALID_ARGUMENT, "{}: the model has no optimizer state '{}'; it has: {}", call, name,
       known.empty() ? "none" : known);
}

void Optimizer::synchronize(device::Stream &stream) {
  stream.record(*runtime_.marks.order);
  if (!runtime_.marks.order->done()) runtime_.context.device().synchronize(*runtime_.marks.order);
}

void Optimizer::scale_grads(double factor, device::Stream &caller) {
  if (factor == 1.0) return;
  runtime_.step.scaled({ScalingKind::scale, factor, 0});
  multiply_grads(factor, caller);
}

void Optimizer::multiply_grads(double factor, device::Stream &caller) {
  const float value = static_cast<float>(factor);
  if (value == 1.0f) return;
  const CallSpan span(runtime_, "scale_grads");
  runtime_.join_window(caller);
  caller.scale_all(grads_, value);
  runtime_.leave_window(caller);
}

StepNumbers Optimizer::numbers(const fsdp_adamw_options &options) const {
  StepNumbers numbers;
  numbers.beta1 = options.beta1;  // defaults are filled in
  numbers.beta2 = options.beta2;
  numbers.epsilon = options.epsilon;
  numbers.weight_decay = options.weight_decay;
  numbers.step = options.step ? options.step : runtime_.step.adamw_step() + 1;
  return numbers;
}

void Optimizer::make_steps(double lr, const StepNumbers &numbers) {
  const auto step = static_cast<double>(numbers.step);
  device::AdamW adamw{};
  adamw.first = device::average_of(numbers.beta1);
  adamw.second = device::average_of(numbers.beta2);
  adamw.epsilon = static_cast<float>(numbers.epsilon);
  adamw.correction1 = static_cast<float>(1.0 - std::pow(numbers.beta1, step));
  adamw.correction2 = static_cast<float>(1.0 - std::pow(numbers.beta2, step));
  for (AdamWBatch &batch : batches_) {
    adamw.lr = static_cast<float>(lr * batch.lr_scale);
    adamw.weight_decay = batch.decays ? static_cast<float>(numbers.weight_decay) : 0.0f;
    batch.step = adamw;
  }
}

void Optimizer::step_adamw(double lr, const fsdp_adamw_options &options, device::Stream &caller) {
  const StepNumbers given = numbers(options);
  runtime_.join_window(caller);
  make_steps(lr, given);
  for (const AdamWBatch &batch : batches_) caller.adamw(batch.step, batch.spans);
  cast_spans(kept_, caller);
  quantizer_.quantize(caller);
  runtime_.step.stepped(given.step);
}

void Optimizer::step_adamw_captured(device::Stream &caller) {
  runtime_.join_window(caller);
  if (batches_.size() * memory::adamw_step_bytes > runtime_.plan.region(memory::RegionId::steps).bytes)
    fail(FSDP_UNSUPPORTED,
         "fsdp_step_adamw: parameters have {} different pairs of lr_scale and decay now, more than when the model was "
         "sealed; a capture has no room for them",
         batches_.size());
  const device::AdamW *step = steps();
  for (const AdamWBatch &batch : batches_) caller.adamw_from(step++, batch.spans);
  cast_spans(kept_, caller);
  quantizer_.quantize(caller);
  runtime_.step.stepped(runtime_.step.adamw_step() + 1);
}

void Optimizer::store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller) {
  make_steps(lr, numbers(options));
  device::AdamW *step = steps();
  for (const AdamWBatch &batch : batches_) caller.store_step(step++, batch.step);
}

// What a step keeps may have been loaded in its window.
void Optimizer::cast_spans(std::span<const device::AdamWSpan> spans, device::Stream &stream) const {
  for (const device::AdamWSpan &span : spans)
    if (span.compute) stream.cast(span.compute, span.compute_dtype, span.weight, FSDP_FLOAT32, span.count);
}

void Optimizer::cast_weights(device::Stream &stream) {
  for (const AdamWBatch &batch : batches_) cast_spans(batch.spans, stream);
  cast_spans(kept_, stream);
  quantizer_.quantize(stream);
}

}  // namespace fsdp::engine
