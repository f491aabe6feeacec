// SPDX-License-Identifier: Apache-2.0

#include "engine/gradients/optimizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <unordered_map>

#include "base/dtype.h"
#include "device/state_codes.h"
#include "engine/context/context.h"
#include "engine/weights/quantizer.h"

namespace fsdp::engine {

Optimizer::Optimizer(Runtime &runtime)
    : runtime_(runtime), norm_(runtime), quantizer_(runtime), weights_(runtime, own_values()) {
  for (const Group &group : runtime.groups)
    for (const memory::ParamSpec &param : group.spec->params) names_.push_back(param.name.c_str());
  for_each_slice(runtime, {PlaneKind::main}, [&](const PlaneSlice &main) {
    const layout::Slice counted =
        runtime.slice_of(main.bucket.plan->layout, main.tensor, Extent::shard, main.bucket.plan->mesh);
    if (main.slice.count)
      shards_.push_back({main.group.index, main.param_index, main.ordinal, &main.bucket, main.tensor, main.slice,
                         counted, runtime.answers_for(main.group, main.param_index),
                         device::state_blocks(main.slice.count)});
  });
  list_counting_ranks();
  kept_shards_.resize(shards_.size());
  if (runtime.storage->home_file()) home_.emplace(runtime, shards_);
  size_t compact_count = 0;
  kept_.reserve(shards_.size());
  clear_codes();
  grads_.reserve(shards_.size());
  squares_.reserve(shards_.size());
  measured_ordinals_.reserve(shards_.size());
  list_grads();
  std::vector<AdamWBatch> batches = make_batches();
  for (const AdamWBatch &batch : batches) compact_count += batch.compact_shards.size();
  kept_compact_.reserve(compact_count);
  adopt(std::move(batches));
}

bool Optimizer::is_kept(uint32_t group, uint32_t param_index) const noexcept {
  const memory::ParamSpec &param = runtime_.groups[group].spec->params[param_index];
  if (!param.has_gradient()) return true;
  return param.skips_missing() && runtime_.step.window_has_grads() && !runtime_.groups[group].grad.given[param_index];
}

// Lists the main grads, so that a few launches measure or scale all of them. Main grads that are not trained are zeros.
// One of these zeros stands for all of them, and its result is written like the others.
void Optimizer::list_grads() noexcept {
  grads_.clear();
  squares_.clear();
  measured_ordinals_.clear();
  for (const Shard &shard : shards_) {
    if (HomeUpdate::has_grads_in_file(shard)) continue;  // measured and scaled where they are read
    const bool trained = param_of(shard).has_gradient();
    if (trained) grads_.push_back({shard.main_grad(), shard.slice.count});
    if (shard.counted.count == 0 || !shard.answers) continue;
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

// First moments begin with the code of 0, which is not the byte 0. A file takes a second for a GB or two.
void Optimizer::clear_codes() {
  const std::vector<uint8_t> zeros(size_t{1} << 20, device::signed_zero_code);
  uint64_t all = 0, written = 0;
  for (const Shard &shard : shards_)
    if (shard.bucket->plan->coded_states) all += shard.slice.count;
  LongWork work(runtime_.context);
  for (const Shard &shard : shards_) {
    if (!shard.bucket->plan->coded_states) continue;
    std::byte *const codes = shard.bucket->plane(PlaneKind::state, 0).at(shard.slice);
    for (uint64_t done = 0; done < shard.slice.count; done += zeros.size()) {
      const uint64_t some = std::min<uint64_t>(zeros.size(), shard.slice.count - done);
      runtime_.storage->transfer(codes + done, FSDP_UINT8, zeros.data(), FSDP_UINT8, some);
      written += some;
      work.tell([&] {
        return format_text("fsdp_seal_model: rank {} has written {} of {} bytes of states in 8 bits",
                           runtime_.context.rank(), written, all);
      });
    }
  }
}

// The update of an element depends on no other element, so the order and the bounds of the spans do not change any
// bits.
std::vector<AdamWBatch> Optimizer::make_batches(const memory::ParamSpec *changed, double lr_scale) const {
  std::map<std::pair<double, bool>, AdamWBatch> alike;
  for (const Shard &shard : shards_) {
    const memory::ParamSpec &param = param_of(shard);
    alike[{&param == changed ? lr_scale : param.lr_scale, !(param.flags & FSDP_PARAM_NO_DECAY)}].add(runtime_, shard);
  }
  std::vector<AdamWBatch> batches;
  for (auto &[key, batch] : alike) {
    batch.lr_scale = key.first, batch.decays = key.second;
    batch.order();
    batches.push_back(std::move(batch));
  }
  return batches;
}

void Optimizer::adopt(std::vector<AdamWBatch> batches) noexcept {
  batches_ = std::move(batches);
  list_spans();
}

void Optimizer::list_spans() noexcept {
  const auto changes = [this](const Shard &shard) { return !param_of(shard).by_caller() && !is_kept(shard); };
  const auto in_file = [&](const Shard &shard) {
    return home_ && (changes(shard) ? HomeUpdate::updates_in_file(shard) : HomeUpdate::casts_in_file(shard));
  };
  kept_.clear(), kept_compact_.clear();
  for (AdamWBatch &batch : batches_) {
    batch.spans.clear(), batch.compact.clear();
    for (const auto &one : batch.shards)
      if (!in_file(*one.shard)) append(changes(*one.shard) ? batch.spans : kept_, one.span);
    for (const auto &one : batch.compact_shards)
      if (!in_file(*one.shard)) append(changes(*one.shard) ? batch.compact : kept_compact_, one.span);
  }
  for (size_t s = 0; home_ && s < shards_.size(); ++s) kept_shards_[s] = !changes(shards_[s]);
}

const Shard &Optimizer::shard(uint64_t index, const char *call) const {
  if (index >= shards_.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: shard_index {} is outside [0, {})", call, index, shards_.size());
  return shards_[index];
}

StatePart Optimizer::state(const Shard &shard, std::string_view name, const char *call) const {
  StatePart part = find_state(runtime_, shard, name, call);
  if (runtime_.storage->is_in_file(part.data)) part.data = nullptr;
  return part;
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
  if (home_) home_->scale_grads(value);
  runtime_.leave_window(caller);
}

StepNumbers Optimizer::numbers(const fsdp_adamw_options &options) const {
  StepNumbers numbers;
  numbers.beta1 = options.beta1;  // the defaults are filled in already
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
  adamw.number = static_cast<uint32_t>(numbers.step);
  adamw.seed = runtime_.spec.rounding_seed;
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
  for (const AdamWBatch &batch : batches_) {
    caller.adamw(batch.step, batch.spans);
    caller.compact_adamw(batch.step, batch.compact);
  }
  cast_kept(caller);
  if (home_) home_->step(batches_, kept_shards_, caller);
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
  for (const AdamWBatch &batch : batches_) {
    caller.adamw_from(step, batch.spans);
    caller.compact_adamw_from(step++, batch.compact);
  }
  cast_kept(caller);
  quantizer_.quantize(caller);
  runtime_.step.stepped(runtime_.step.adamw_step() + 1);
}

void Optimizer::store_steps(double lr, const fsdp_adamw_options &options, device::Stream &caller) {
  make_steps(lr, numbers(options));
  device::AdamW *step = steps();
  for (const AdamWBatch &batch : batches_) caller.store_step(step++, batch.step);
}

namespace {

// Casts main weights to compute weights. It also casts weights that a step does not update, because they may have been
// loaded in its window.
template <class Span>
void cast_spans(const std::vector<Span> &spans, device::Stream &stream) {
  for (const Span &span : spans)
    if (span.compute) stream.cast(span.compute, span.compute_dtype, span.weight, FSDP_FLOAT32, span.count);
}

}  // namespace

void Optimizer::cast_kept(device::Stream &stream) const {
  cast_spans(kept_, stream);
  cast_spans(kept_compact_, stream);
}

void Optimizer::cast_weights(device::Stream &stream) {
  for (const AdamWBatch &batch : batches_) {
    cast_spans(batch.spans, stream);
    cast_spans(batch.compact, stream);
  }
  cast_kept(stream);
  if (home_) home_->cast(stream);
  quantizer_.quantize(stream);
}

// The ranks of a model measure its main grads together: norms, also with further models, and counts of numbers that are
// not finite.

// Writes this rank's sum of squares for every parameter. If the rank has no part of a parameter, nothing is written,
// and the sum stays 0.
void Optimizer::measure_squares(double *squares, device::Stream &caller) {
  for (size_t i = 0; i < squares_.size(); ++i) squares_[i].result = squares + measured_ordinals_[i];
  caller.sum_all_squares(squares_);
  if (home_) home_->sum_squares(squares, caller);
}

// Brings the values of all holders into all_values(), in the order of their ranks.
void Optimizer::exchange(const double *own, size_t count, const char *what) {
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope flight(*runtime_.flights.meetings, what, count * sizeof(double));
  runtime_.holders().all_gather(own, count * sizeof(double), all_values(), what);
}

// Calls `take` with each parameter's value from every slot, in the order of slots, and with the rank that has the slot.
// If groups have several meshes, `take` gets the values of all ranks of the model, in the order of ranks.
template <class Take>
void Optimizer::exchange_values(const char *what, Take take) {
  const memory::ModelSpec &spec = runtime_.spec;
  const uint32_t slots = spec.value_count();
  for (size_t first = 0; first < names_.size(); first += memory::norm_chunk) {
    const size_t count = std::min<size_t>(memory::norm_chunk, names_.size() - first);
    exchange(own_values() + first, count, what);
    for (size_t p = 0; p < count; ++p)
      for (uint32_t slot = 0; slot < slots; ++slot) {
        const uint32_t holder = spec.meshes.size() > 1 ? slot : spec.mesh().holder(slot);
        take(first + p, all_values()[holder * count + p], holder);
      }
  }
}

// Lists which ranks of the model count each parameter; an empty list stands for all ranks.
void Optimizer::list_counting_ranks() {
  if (runtime_.spec.meshes.size() == 1) return;
  std::unordered_map<uint32_t, uint32_t> numbers;  // key: rank of the job; value: rank in the model
  for (uint32_t r = 0; r < runtime_.team().size(); ++r) numbers[runtime_.team().world_rank(r)] = r;
  for (const Group &group : runtime_.groups)
    for (uint64_t p = 0; p < group.places.size(); ++p) {
      std::vector<bool> &counting = counting_.emplace_back();
      const memory::GroupInstance *const instance = group.spec->counting(p);
      if (!instance) continue;
      counting.resize(runtime_.team().size());
      for (const uint32_t rank : instance->ranks) counting[numbers.at(rank)] = true;
    }
}

namespace {

std::string describe_limit(double max_norm) {
  return max_norm > 0 ? format_text("max_norm {}", max_norm) : "the norm alone";
}

[[noreturn]] void refuse(const NormDispute &dispute, uint32_t model) {
  const auto odd = static_cast<int32_t>(dispute.odd);
  if (dispute.scaled_differently)
    fail_rank(FSDP_MISMATCH, odd,
              "the gradient norm: model {}: rank {} has scaled its gradients otherwise than rank {} (fsdp_scale_grads, "
              "fsdp_clip_grads); call "
              "fsdp_discard_step on every rank to go on",
              model, odd, dispute.first);
  fail_rank(FSDP_MISMATCH, odd, "the gradient norm: model {}: rank {} asked for {}, rank {} for {}; nothing was scaled",
            model, odd, describe_limit(dispute.limit_of_odd), dispute.first, describe_limit(dispute.limit_of_first));
}

// The message of a rank to ranks of other models. All members are doubles, as Context::exchange_values() requires.
struct NormMessage {
  double squares, max_norm;
  double disputed = 0, odd = 0, first = 0, scaled_differently = 0, limit_of_odd = 0, limit_of_first = 0;

  static constexpr uint64_t value_count = 8;
  void set(const NormDispute &dispute) {
    disputed = 1, odd = dispute.odd, first = dispute.first, scaled_differently = dispute.scaled_differently;
    limit_of_odd = dispute.limit_of_odd, limit_of_first = dispute.limit_of_first;
  }
  std::optional<NormDispute> dispute() const {
    if (disputed == 0) return {};
    return NormDispute{static_cast<uint32_t>(odd), static_cast<uint32_t>(first), scaled_differently != 0, limit_of_odd,
                       limit_of_first};
  }
};
static_assert(sizeof(NormMessage) == NormMessage::value_count * sizeof(double));

}  // namespace

// Ranks exchange what they do with the norm, so that a difference is known before any rank scales. If callers exchange
// shares of the norm, these are in the same message.
std::optional<NormDispute> Optimizer::meet_for_norm(double max_norm) {
  constexpr size_t told = 3;
  const double share = norm_.callers_tell() ? *norm_.share() : 0;
  const double own[told] = {share, max_norm, std::bit_cast<double>(runtime_.step.scalings().hash())};
  exchange(own, told, "the gradient norm");
  transport::Team &team = runtime_.holders();
  const auto scalings = [&](uint32_t r) { return std::bit_cast<uint64_t>(all_values()[told * r + 2]); };
  for (uint32_t r = 1; r < team.size(); ++r) {
    const double limit = all_values()[1], other = all_values()[told * r + 1];
    const bool scaled_differently = scalings(r) != scalings(0);
    if (scaled_differently || other != limit)
      return NormDispute{team.world_rank(r), team.world_rank(0), scaled_differently, other, limit};
  }
  if (norm_.callers_tell())
    for (uint32_t r = 0; r < team.size(); ++r) norm_.shares()[r] = all_values()[told * r];
  return {};
}

// Ranks of other models wait for this model's norm even if its own ranks disagree. So the message includes a dispute,
// and all ranks report the first dispute in the order of the mesh.
std::optional<NormDispute> Optimizer::exchange_further(const layout::Mesh &further, double max_norm, double &squares,
                                                       const std::optional<NormDispute> &own) {
  NormMessage mine{squares, max_norm};
  if (own) mine.set(*own);
  double values[NormMessage::value_count];
  std::memcpy(values, &mine, sizeof mine);
  std::vector<NormMessage> told;
  for (const auto &message : runtime_.context.exchange_values(&further, values, NormMessage::value_count, 0,
                                                              "the gradient norm over a further mesh")) {
    NormMessage &of_rank = told.emplace_back();
    std::memcpy(static_cast<void *>(&of_rank), message.values, sizeof of_rank);
  }
  squares = told[0].squares;
  for (size_t r = 1; r < told.size(); ++r) squares += told[r].squares;
  for (const NormMessage &other : told)
    if (const auto dispute = other.dispute()) return dispute;
  const double limit = told[0].max_norm;
  for (size_t r = 1; r < told.size(); ++r)
    if (told[r].max_norm != limit)
      return NormDispute{further.ranks[r], further.ranks[0], false, told[r].max_norm, limit};
  return {};
}

// Checks that `further` contains no other rank of the model's own mesh. Such a rank has the same norm of the whole
// model, and that norm would count twice.
void Optimizer::require_other_parts(const layout::Mesh &further) const {
  const auto &own = runtime_.spec.mesh().ranks;
  for (const uint32_t rank : further.ranks)
    if (rank != runtime_.context.rank() && std::find(own.begin(), own.end(), rank) != own.end())
      fail(FSDP_INVALID_ARGUMENT,
           "the gradient norm: rank {} is in the mesh given and in the model's own, whose norm would count twice; "
           "the mesh joins ranks of different models (NULL: the model alone)",
           rank);
}

// Adds first within each slot and then over the slots in order, so every strategy makes the same additions.
void Optimizer::measure_norm(const layout::Mesh *further, double max_norm, device::Stream &caller) {
  const CallSpan span(runtime_, "grad_norm");
  if (further) require_other_parts(*further);
  runtime_.join_window(caller);
  measure_squares(norm_.squares(), caller);
  caller.sum_values(norm_.share(), norm_.squares(), names_.size());
  runtime_.leave_window(caller);
  const auto dispute = meet_for_norm(max_norm);
  if (further) return measure_further(*further, max_norm, dispute, caller);
  if (dispute) refuse(*dispute, runtime_.number());
  norm_.find(max_norm, caller);
  known_norm_ = {true, {}};
}

// The host adds the norms of several models, so it waits for the norm of this one.
void Optimizer::measure_further(const layout::Mesh &further, double max_norm, const std::optional<NormDispute> &own,
                                device::Stream &caller) {
  if (known_norm_.measured) known_norm_.value = last_norm();  // if ranks disagree, this remains the last norm
  double squares = 0;
  if (!own) {
    norm_.find(0, caller);
    squares = norm_.read().squares;
  }
  if (const auto dispute = exchange_further(further, max_norm, squares, own)) refuse(*dispute, runtime_.number());
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
  check_norm_count(count, "fsdp_get_param_grad_norms");
  const CallSpan span(runtime_, "param_grad_norms");
  runtime_.join_window(caller);
  measure_squares(own_values(), caller);
  synchronize(caller);
  add_norms("norms of gradients", norms);
}

void Optimizer::check_norm_count(uint64_t count, const char *call) const {
  if (count != names_.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: norm_count is {}, the model has {} parameters", call, count, names_.size());
}

// Makes the norms from the ranks' squares of each parameter.
void Optimizer::add_norms(const char *what, double *norms) {
  std::fill_n(norms, names_.size(), 0.0);
  exchange_values(what, [&](size_t p, double squares, uint32_t holder) {
    if (is_counted_by(p, holder)) norms[p] += squares;
  });
  for (size_t p = 0; p < names_.size(); ++p) norms[p] = std::sqrt(norms[p]);
}

namespace {

// Sets the values to zero, now and at the end of the scope. The second time is needed because norms of gradients add
// the values of all parameters but write only those of trained parameters.
struct ClearedValues {
  std::span<double> values;
  explicit ClearedValues(std::span<double> all) : values(all) { std::ranges::fill(values, 0.0); }
  ~ClearedValues() { std::ranges::fill(values, 0.0); }
  ClearedValues(const ClearedValues &) = delete;
  ClearedValues &operator=(const ClearedValues &) = delete;
};

}  // namespace

void Optimizer::param_weight_norms(device::Stream &caller, double *norms, uint64_t count) {
  check_norm_count(count, "fsdp_get_param_weight_norms");
  const CallSpan span(runtime_, "param_weight_norms");
  const ClearedValues cleared({own_values(), names_.size()});
  runtime_.join_window(caller);
  weights_.measure(caller);
  add_norms("norms of weights", norms);
  for_each_slice(runtime_, {PlaneKind::compute}, [&](const PlaneSlice &weights) {
    if (!is_number(weights.bucket.owned_plane().dtype()))
      norms[weights.ordinal] = std::numeric_limits<double>::quiet_NaN();
  });
}

uint64_t Optimizer::count_zero_grads(device::Stream &caller) {
  const CallSpan span(runtime_, "count_zero_grads");
  const ClearedValues cleared({own_values(), names_.size()});
  auto *counts = reinterpret_cast<uint64_t *>(own_values());
  runtime_.join_window(caller);
  for (const Shard &shard : shards_)
    if (shard.counted.count && shard.answers && !is_kept(shard) && !HomeUpdate::has_grads_in_file(shard))
      caller.count_zeros(counts + shard.ordinal,
                         reinterpret_cast<const float *>(shard.bucket->plane(PlaneKind::grad).at(shard.counted)),
                         shard.counted.count);
  synchronize(caller);
  if (home_)
    home_->read_grads(caller, [&](const Shard &shard, uint64_t, std::span<const float> numbers) {
      if (shard.answers && !is_kept(shard))
        counts[shard.ordinal] += static_cast<uint64_t>(std::ranges::count(numbers, 0.0F));
    });
  uint64_t zeros = 0;
  exchange_values("zeros of gradients",
                  [&](size_t, double count, uint32_t) { zeros += std::bit_cast<uint64_t>(count); });
  return zeros;
}

// The result is the same on all ranks of the model, including ranks that do not read the norm.
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
  if (home_) home_->scale_grads(norm_.read().factor);
  runtime_.leave_window(caller);
}

// The name of the parameter on a rank of the model.
const char *Optimizer::name_on(size_t ordinal, uint32_t holder) const {
  size_t first = 0;
  for (const Group &group : runtime_.groups) {
    const size_t param = ordinal - first;
    first += group.places.size();
    if (ordinal >= first) continue;
    for (const memory::GroupInstance &instance : group.spec->instances)
      if (std::ranges::find(instance.ranks, runtime_.team().world_rank(holder)) != instance.ranks.end())
        return instance.params[param].name.c_str();
    break;
  }
  return names_[ordinal];
}

const char *Optimizer::find_nonfinite(device::Stream &caller) {
  const CallSpan span(runtime_, "check_grads");
  auto *counts = reinterpret_cast<uint64_t *>(own_values());
  runtime_.join_window(caller);
  // Also checks the copies that no norm counts.
  for (const Shard &shard : shards_)
    if (shard.counted.count && param_of(shard).has_gradient() && !HomeUpdate::has_grads_in_file(shard))
      caller.count_nonfinite(counts + shard.ordinal,
                             reinterpret_cast<const float *>(shard.bucket->plane(PlaneKind::grad).at(shard.counted)),
                             shard.counted.count);
  synchronize(caller);
  if (home_)
    home_->read_grads(caller, [&](const Shard &shard, uint64_t begin, std::span<const float> numbers) {
      if (begin == 0) counts[shard.ordinal] = 0;
      counts[shard.ordinal] +=
          static_cast<uint64_t>(std::ranges::count_if(numbers, [](float number) { return !std::isfinite(number); }));
    });
  size_t first = names_.size();
  uint32_t found = 0;
  exchange_values("numbers that are not finite", [&](size_t p, double count, uint32_t holder) {
    if (std::bit_cast<uint64_t>(count) && p < first) first = p, found = holder;
  });
  return first < names_.size() ? name_on(first, found) : nullptr;
}

}  // namespace fsdp::engine
