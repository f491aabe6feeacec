// SPDX-License-Identifier: Apache-2.0

#include "engine/model/checkpoints.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <span>
#include <thread>

#include <fmt/format.h>

#include "base/dtype.h"
#include "base/error.h"
#include "base/float_environment.h"
#include "base/text.h"
#include "memory/plane.h"

namespace fsdp::engine {

// Only names need to be escaped, because they are the only free text in the JSON.

namespace {

using Out = std::back_insert_iterator<std::string>;

// Describes the published planes of quantized parameters, with the names of fsdp_get_plane. Sizes are those of the
// whole buffers, with padding.
void describe_planes(Out out, const memory::BucketPlan &bucket) {
  fmt::format_to(out, "\"quantization\": \"{}\", \"planes\": [", quantization_name(bucket.quantization));
  const char *separator = "";
  for (const memory::PlanePlan &plane : bucket.planes) {
    if (!memory::is_published(plane.kind)) continue;
    memory::PlanePlan whole = plane;
    whole.extent = memory::Extent::whole;
    fmt::format_to(out, "{}{{\"name\": \"{}\", \"dtype\": \"{}\", \"full_bytes\": {}}}", separator,
                   memory::plane_name(plane), dtype_name(plane.dtype), bucket.bytes(whole, "a plane"));
    separator = ", ";
  }
  fmt::format_to(out, "], ");
}

void describe_bucket(Out out, const memory::GroupSpec &group, const memory::BucketPlan &bucket) {
  fmt::format_to(out, "{{\"dtype\": \"{}\", \"grad_dtype\": \"{}\", \"reduce_dtype\": \"{}\", \"frozen\": {}, ",
                 dtype_name(bucket.dtype), dtype_name(bucket.grad_dtype), dtype_name(bucket.wire_dtype), bucket.frozen);
  if (bucket.main_storage != FSDP_MAIN_FLOAT32 && !bucket.frozen)
    fmt::format_to(out, "\"main_storage\": \"{}\", ", bucket.main_storage == FSDP_MAIN_SPLIT16 ? "split16" : "none");
  if (bucket.coded_states) fmt::format_to(out, "\"states\": \"8bit\", ");
  if (group.params[bucket.params.front()].by_caller()) fmt::format_to(out, "\"optimizer\": \"caller\", ");
  if (bucket.quantization) describe_planes(out, bucket);
  fmt::format_to(out, "\"shard_count\": {}, \"full_count\": {}, \"padding_count\": {}, \"sub_buckets\": [",
                 bucket.layout.shard_count, bucket.layout.full_count,
                 bucket.layout.full_count - bucket.layout.used_count);
  for (size_t s = 0; s < bucket.layout.sub_buckets.size(); ++s) {
    const auto &sub = bucket.layout.sub_buckets[s];
    fmt::format_to(out, "{}{{\"granule\": {}, \"shard_count\": {}, \"full_offset\": {}}}", s ? ", " : "", sub.granule,
                   sub.shard_count, sub.full_offset);
  }
  fmt::format_to(out, "], \"parameters\": [");
  for (size_t t = 0; t < bucket.params.size(); ++t) {
    const auto &param = group.params[bucket.params[t]];
    fmt::format_to(out, "{}\n      {{\"name\": {}, \"shape\": [{}], \"full_offset\": {}, \"granule\": {}", t ? "," : "",
                   quote_json(param.name), fmt::join(param.shape, ", "), bucket.layout.tensors[t].full_offset,
                   bucket.layout.tensors[t].granule);
    if (param.row_dimensions > 1) fmt::format_to(out, ", \"row_dimensions\": {}", param.row_dimensions);
    if (param.is_box())
      fmt::format_to(out, ", \"global_shape\": [{}], \"global_offset\": [{}]", fmt::join(param.global_shape, ", "),
                     fmt::join(param.global_offset, ", "));
    fmt::format_to(out, "}}");
  }
  fmt::format_to(out, "]}}");
}

// Describes the parts of full gradients that are lent. Each part uses one slot of the pool.
void describe_parts(Out out, const memory::GroupSpec &group, std::span<const memory::PartPlan> parts, uint64_t behind) {
  fmt::format_to(out, "\"full_grad_parts\": [");
  for (const memory::PartPlan &part : parts) {
    fmt::format_to(out, "{}{{\"bytes\": {}, \"offset\": {}, \"parameters\": [", &part == parts.data() ? "" : ", ",
                   part.full_grad.bytes, part.full_grad.offset + behind);
    for (const uint32_t param : part.params)
      fmt::format_to(out, "{}{}", param == part.params.front() ? "" : ", ", quote_json(group.params[param].name));
    fmt::format_to(out, "]}}");
  }
  fmt::format_to(out, "], ");
}

// Describes the pieces, each of which is gathered by itself. `by_piece`: each has a buffer of its own.
void describe_pieces(Out out, const memory::GroupPlan &group) {
  fmt::format_to(out, "\"pieces_have_buffers\": {}, \"pieces\": [", group.by_piece);
  for (const memory::PiecePlan &piece : group.pieces)
    fmt::format_to(out, "{}{{\"compute_offset\": {}, \"gathered_bytes\": {}, \"elements\": {}, \"padding\": {}}}",
                   &piece == group.pieces.data() ? "" : ", ", piece.compute.offset, piece.gathered_bytes,
                   piece.element_count, piece.padding_count);
  fmt::format_to(out, "], ");
}

void describe_group_mesh(Out out, const layout::Mesh &mesh) {
  fmt::format_to(out, "\"replicate_size\": {}, \"shard_size\": {}, \"ranks\": [{}], ", mesh.replicate_size,
                 mesh.shard_size, fmt::join(mesh.ranks, ", "));
}

void describe_group(Out out, const memory::ModelSpec &spec, const memory::ModelPlan &plan, size_t g) {
  const memory::GroupPlan &group = plan.groups[g];
  const bool lent = group.trainable && !group.persistent_grad;
  const uint64_t behind = lent ? plan.region(memory::RegionId::kept_grads, spec.groups[g].mesh).bytes : 0;
  const auto parts = plan.parts_of(group);
  uint64_t full_grad_bytes = 0;
  for (const memory::PartPlan &part : parts) full_grad_bytes += part.full_grad.bytes;
  fmt::format_to(out,
                 "  {{\"name\": {}, \"strategy\": {}, \"compute_offset\": {}, \"gathered_bytes\": {}, "
                 "\"full_grad_bytes\": {}, \"full_grad_offset\": {}, ",
                 quote_json(spec.groups[g].name), spec.groups[g].strategy, group.pieces.front().compute.offset,
                 group.gathered_bytes(), full_grad_bytes, parts.front().full_grad.offset + behind);
  if (parts.size() > 1) describe_parts(out, spec.groups[g], parts, behind);
  if (group.pieces.size() > 1) describe_pieces(out, group);
  if (spec.groups[g].mesh) describe_group_mesh(out, spec.mesh_of(spec.groups[g]));
  fmt::format_to(out, "\"buckets\": [");
  for (size_t b = 0; b < group.buckets.size(); ++b) {
    if (b) fmt::format_to(out, ",\n    ");
    describe_bucket(out, spec.groups[g], plan.buckets[group.buckets[b]]);
  }
  fmt::format_to(out, "]}}");
}

}  // namespace

std::string describe(const memory::ModelSpec &spec, const memory::ModelPlan &plan) {
  std::string text;
  const Out out = std::back_inserter(text);
  fmt::format_to(out,
                 "{{\"layout_hash\": \"{:016x}\", \"replicate_size\": {}, \"shard_size\": {}, \"elements\": {}, "
                 "\"padding\": {},\n",
                 plan.layout_hash, spec.mesh().replicate_size, spec.mesh().shard_size, plan.element_count,
                 plan.padding_count);
  fmt::format_to(out, "\"gather_pool\": {{\"bytes\": {}, \"lower_bound_bytes\": {}, \"slots\": [{}]}},\n",
                 plan.gather_pool.size_bytes, plan.gather_pool.lower_bound_bytes,
                 fmt::join(plan.gather_pool.slots, ", "));
  fmt::format_to(out, "\"grad_pool\": {{\"bytes\": {}, \"lower_bound_bytes\": {}, \"slots\": [{}]}},\n\"groups\": [\n",
                 plan.grad_pool.size_bytes, plan.grad_pool.lower_bound_bytes, fmt::join(plan.grad_pool.slots, ", "));
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (g) fmt::format_to(out, ",\n");
    describe_group(out, spec, plan, g);
  }
  text += "\n]}\n";
  return text;
}

std::string describe_mesh(const memory::ModelSpec &spec) {
  std::string text = format_text("{} ranks, replicate {} x shard {}", spec.mesh().size(), spec.mesh().replicate_size,
                                 spec.mesh().shard_size);
  constexpr const char *names[] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    if (const auto count = std::ranges::count(spec.groups, strategy, &memory::GroupSpec::strategy))
      text += format_text(", {} groups {}", count, names[strategy - FSDP_STRATEGY_NO_SHARD]);
  for (uint32_t number = 1; number < spec.meshes.size(); ++number) {
    const auto group = std::ranges::find(spec.groups, number, &memory::GroupSpec::mesh);
    text += format_text(", {} groups on {} meshes of replicate {} x shard {}",
                        std::ranges::count(spec.groups, number, &memory::GroupSpec::mesh), group->instances.size(),
                        spec.meshes[number].replicate_size, spec.meshes[number].shard_size);
  }
  return text;
}

using checkpoint::ElementType;
using checkpoint::KeptTensor;

namespace {

constexpr double max_steps = 9007199254740992.0;  // a double counts exactly up to this number

constexpr size_t max_told = 20;  // most names in one message of the log

std::string some_of(const char *what, const std::vector<std::string> &names) {
  std::string text = format_text("; {} {}", names.size(), what);
  for (size_t i = 0; i < std::min(names.size(), max_told); ++i) text += (i ? ", " : ": ") + quote_json(names[i]);
  return names.size() > max_told ? text + ", ..." : text;
}

std::string list_of(const char *what, const std::vector<std::string> &names) {
  std::string text = format_text(",\n\"{}\":[", what);
  for (const std::string &name : names) text += (text.ends_with('[') ? "" : ",") + quote_json(name);
  return text + "]";
}

std::optional<uint64_t> seed_of(const memory::ModelSpec &spec) {
  return memory::rounds_randomly(spec) ? std::optional(spec.rounding_seed) : std::nullopt;
}

// The unique name of the folder, for any path that leads to it. Errors are ignored.
std::string canonical(const std::string &folder) {
  std::error_code ignored;
  return std::filesystem::weakly_canonical(folder, ignored).string();
}

}  // namespace

checkpoint::ModelShards Checkpoints::shards() const { return {runtime_.spec, runtime_.plan, counts_steps_}; }

const Bucket &Checkpoints::bucket_of(const KeptTensor &tensor) const {
  return runtime_.storage->buckets()[static_cast<size_t>(tensor.bucket - runtime_.plan.buckets.data())];
}

const Plane &Checkpoints::plane_of(const KeptTensor &tensor) const {
  return bucket_of(tensor).planes[static_cast<size_t>(tensor.plane - tensor.bucket->planes.data())];
}

layout::Slice Checkpoints::slice_of(const KeptTensor &tensor) const {
  return runtime_.slice_of(tensor.layout(), tensor.tensor, tensor.plane->owned, tensor.bucket->mesh);
}

uint64_t Checkpoints::step() const {
  if (counts_steps_) return runtime_.step.adamw_step();
  return loaded_step_ + runtime_.step.version() - loaded_version_;
}

// ---- save ----

struct Checkpoints::CopyStream {
  explicit CopyStream(device::Device &device)
      : stream(device.create_stream("save")), before(device.create_event()), copied(device.create_event()) {}
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<device::Event> before, copied;
};

Checkpoints::Checkpoints(Runtime &runtime, bool counts_steps) : runtime_(runtime), counts_steps_(counts_steps) {}
Checkpoints::~Checkpoints() = default;

// Runs on a thread of the save.
void Checkpoints::read(const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) const {
  if (!tensor.plane) {
    std::memcpy(to.data(), reinterpret_cast<const std::byte *>(&saved_steps_) + first, to.size());
    return;
  }
  read_with(tensor, first, to, [this](const std::byte *from, std::span<std::byte> bytes) {
    if (runtime_.storage->is_in_file(from))
      runtime_.storage->home_file()->read(from, bytes);
    else if (!copies_)
      std::memcpy(bytes.data(), from, bytes.size());
    else
      read_device(from, bytes);
  });
}

// Codes are read as they are stored.
void Checkpoints::read_with(const KeptTensor &tensor, uint64_t first, std::span<std::byte> to,
                            const CompactNumbers::CopyOut &copy) const {
  const Plane &plane = plane_of(tensor);
  const Bucket &bucket = bucket_of(tensor);
  if (tensor.numbers_name.empty() && CompactNumbers::has(bucket, plane))
    CompactNumbers(runtime_, bucket, plane, tensor.tensor, to.size() / sizeof(float) + 2).read_bytes(first, to, copy);
  else
    copy(plane.at(slice_of(tensor)) + first, to);
}

// Copies on a stream of its own, so that the caller's streams go on.
void Checkpoints::read_device(const std::byte *from, std::span<std::byte> to) const {
  copies_->stream->copy(to.data(), from, to.size());
  copies_->stream->record(*copies_->copied);
  while (!copies_->copied->done()) {
    runtime_.context.failure().check();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// The name of the checkpoint from which this model was loaded, if it is in `folder`; otherwise empty.
std::string Checkpoints::spared(const std::string &folder) const {
  return !loaded_name_.empty() && canonical(folder) == loaded_folder_ ? loaded_name_ : "";
}

void Checkpoints::add_to(checkpoint::SaveOrder &order, const std::string &name, const char *call) {
  runtime_.step.require_weights(call);
  runtime_.require_eager(call);
  device::Stream &caller = runtime_.caller_stream(nullptr, call);
  runtime_.join_window(caller);
  if (!runtime_.context.device_traits().host_memory) {
    if (!copies_) copies_ = std::make_unique<CopyStream>(runtime_.context.device());
    order.piece_bytes = checkpoint::Staging::block_bytes;  // large pieces, so that there are few copies from the device
    caller.record(*copies_->before);
    copies_->stream->wait(*copies_->before);
  }
  saved_steps_ = static_cast<double>(runtime_.step.adamw_step());
  if (std::string loaded = spared(order.folder); !loaded.empty()) order.choice.spared.push_back(std::move(loaded));
  const transport::Team &team = runtime_.team();
  checkpoint::SavedModel model{
      std::make_shared<const checkpoint::ModelShards>(shards()),
      {name, describe_mesh(runtime_.spec), runtime_.plan.layout_hash, seed_of(runtime_.spec)},
      team.rank(),
      {},
      [this](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) { read(tensor, first, to); }};
  for (uint32_t r = 0; r < team.size(); ++r) model.ranks.push_back(team.world_rank(r));
  order.models.push_back(std::move(model));
  const Region &staging = runtime_.storage->region(memory::RegionId::save_staging);
  if (const uint64_t bytes = runtime_.plan.region(memory::RegionId::save_staging).bytes)
    order.staging.add({staging.data, bytes}, staging.memory);
}

void Checkpoints::save(const std::string &folder, std::optional<uint64_t> given, checkpoint::SaveChoice choice) {
  constexpr auto call = "fsdp_save";
  Context &context = runtime_.context;
  runtime_.step.require_weights(call);
  const CallSpan span(runtime_, "save");
  context.await_saving();
  checkpoint::SaveOrder order{folder, given.value_or(step())};
  order.choice = std::move(choice);
  add_to(order, "", call);
  const checkpoint::SaveResult result =
      checkpoint::save({runtime_.team(), context.world(), context.waiter()}, std::move(order));
  if (!result.warning.empty()) context.log(FSDP_LOG_WARNING, "fsdp_save: " + result.warning);
}

void Checkpoints::await_copied() {
  const std::shared_ptr<checkpoint::Save> save = save_.lock();
  if (!save) return;
  if (!save->progress().packed) {
    const WaitSpan span(runtime_, WaitKind::checkpoint);
    while (!save->progress().packed) {
      runtime_.context.waiter().poll();
      save->await_packed(std::chrono::milliseconds(20));
    }
  }
  save_.reset();
  runtime_.context.checkpoint_slot().release_models();
}

// ---- load ----

// Reads the step count of PyTorch's AdamW, which other programs store in various dtypes.
void Checkpoints::note_steps(const KeptTensor &tensor, const ElementType &type, std::span<const std::byte> element) {
  double steps = 0;
  if (type.dtype) {
    float value = 0;
    runtime_.context.device().transfer(&value, FSDP_FLOAT32, element.data(), type.dtype, 1);
    steps = value;
  } else {
    std::memcpy(&steps, element.data(), sizeof steps);
  }
  if (!(steps >= 0 && steps <= max_steps) || steps != std::floor(steps))
    fail(FSDP_INVALID_ARGUMENT, "{} is {}, which is no number of steps", quote_json(tensor.name), steps);
  if (steps_.value_or(steps) != steps)
    fail(FSDP_INVALID_ARGUMENT, "{} is {}, but of parameters before it {}; one optimizer steps all of them",
         quote_json(tensor.name), steps, *steps_);
  steps_ = steps;
}

void Checkpoints::write_float64(const Plane &plane, std::byte *to, std::span<const std::byte> elements) const {
  const FloatEnvironment nearest;
  std::array<float, 1024> rounded;
  for (size_t done = 0, all = elements.size() / sizeof(double); done < all;) {
    const size_t some = std::min(all - done, rounded.size());
    for (size_t i = 0; i < some; ++i) {
      double value = 0;
      std::memcpy(&value, elements.data() + (done + i) * sizeof value, sizeof value);
      rounded[i] = checkpoint::narrow(value, plane.dtype());
    }
    runtime_.storage->transfer(to + done * dtype_size(plane.dtype()), plane.dtype(), rounded.data(), FSDP_FLOAT32,
                               some);
    done += some;
  }
}

void Checkpoints::write(const KeptTensor &tensor, uint64_t first, const ElementType &type,
                        std::span<const std::byte> elements) {
  if (!tensor.plane) return note_steps(tensor, type, elements);
  const Plane &plane = plane_of(tensor);
  if (CompactNumbers::has(bucket_of(tensor), plane) && (tensor.numbers_name.empty() || is_converted(type)))
    return write_compact(tensor, first, type, elements);
  std::byte *to = plane.at(slice_of(tensor)) + first * dtype_size(plane.dtype());
  if (type.dtype)
    runtime_.storage->transfer(to, plane.dtype(), elements.data(), type.dtype, elements.size() * 8 / type.bits);
  else
    write_float64(plane, to, elements);
}

void Checkpoints::write_compact(const KeptTensor &tensor, uint64_t first, const ElementType &type,
                                std::span<const std::byte> elements) {
  const FloatEnvironment nearest;
  std::vector<float> values(elements.size() * 8 / type.bits);
  for (size_t i = 0; !type.dtype && i < values.size(); ++i) {
    double value = 0;
    std::memcpy(&value, elements.data() + i * sizeof value, sizeof value);
    values[i] = static_cast<float>(value);
  }
  if (type.dtype)
    runtime_.context.device().transfer(values.data(), FSDP_FLOAT32, elements.data(), type.dtype, values.size());
  CompactNumbers numbers(runtime_, bucket_of(tensor), plane_of(tensor), tensor.tensor, values.size());
  if (tensor.numbers_name.empty())
    numbers.write(first, values);
  else
    encoder_.add(&tensor, numbers, first, values);
}

checkpoint::LoadResult Checkpoints::load_into(const char *call, const LoadInto &take) {
  runtime_.step.require_window(call);
  runtime_.step.require_returned(call);
  runtime_.require_eager(call);
  device::Stream &caller = runtime_.caller_stream(nullptr, call);
  const CallSpan span(runtime_, call + std::string_view("fsdp_").size());
  runtime_.join_window(caller);
  const checkpoint::ModelShards shards = this->shards();
  const checkpoint::WriteKept write = [this](const KeptTensor &tensor, uint64_t first, const ElementType &type,
                                             std::span<const std::byte> elements) {
    this->write(tensor, first, type, elements);
  };
  const checkpoint::ReadKept read = [this](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) {
    read_with(tensor, first, to, [this](const std::byte *from, std::span<std::byte> bytes) {
      runtime_.storage->transfer(bytes.data(), FSDP_UINT8, from, FSDP_UINT8, bytes.size());
    });
  };
  const auto begin = [this] {
    steps_.reset();
    encoder_.clear();
  };
  // Clears blocks that a failed load leaves in the encoder: their keys are tensors of this call.
  struct Clearing {
    StateEncoder &encoder;
    ~Clearing() { encoder.clear(); }
  } clearing{encoder_};
  return take({shards, runtime_.plan.layout_hash, begin, write, read, runtime_.teams.front().outer.get()});
}

// Logs which names were loaded. Without this log, a model with a mistyped name would start without that tensor
// unnoticed.
void Checkpoints::note_load(const char *call, const std::string &from, const checkpoint::LoadResult &result) {
  const checkpoint::LoadedTensors &tensors = result.tensors;
  runtime_.context.log(FSDP_LOG_INFO,
                       format_text("{}: {}: {} tensors loaded{}{}{}", call, from, tensors.loaded.size(),
                                   some_of("missing", tensors.missing), some_of("unexpected", tensors.unexpected),
                                   tensors.encoded.empty() ? "" : some_of("encoded from numbers", tensors.encoded)));
  load_text_ = format_text("{{\"call\":{},\"name\":{},\"step\":{}{}{}{}}}", quote_json(call), quote_json(result.name),
                           result.manifest.step, list_of("loaded", tensors.loaded), list_of("missing", tensors.missing),
                           list_of("unexpected", tensors.unexpected));
}

// With another seed the model trains equally well, but not to the same bits.
void Checkpoints::note_seed(const char *call, const checkpoint::LoadResult &result,
                            const std::optional<std::string> &model) const {
  if (!memory::rounds_randomly(runtime_.spec)) return;
  for (const checkpoint::ManifestModel &stored : result.manifest.models)
    if ((!model || stored.name == *model) && stored.rounding_seed &&
        *stored.rounding_seed != runtime_.spec.rounding_seed)
      runtime_.context.log(FSDP_LOG_INFO, format_text("{}: the model was trained with rounding_seed {} and has {} here",
                                                      call, *stored.rounding_seed, runtime_.spec.rounding_seed));
}

std::string Checkpoints::describe_load(const char *call) const {
  if (load_text_.empty()) fail(FSDP_INVALID_STATE, "{}: nothing has been loaded into this model", call);
  return load_text_;
}

// Ranks read the number of optimizer steps with the tensors that they keep. All ranks that read a number must have read
// the same one; the other ranks adopt it.
void Checkpoints::agree_on_steps(const char *call) {
  if (runtime_.spec.meshes.size() == 1) return;
  const transport::Team &team = runtime_.team();
  const double own = steps_.value_or(-1);
  std::vector<double> all(team.size());
  runtime_.team().all_gather(&own, sizeof own, all.data(), "the optimizer's steps in a checkpoint");
  const auto read = [](double steps) { return steps >= 0; };
  const auto first = std::ranges::find_if(all, read);
  for (auto other = first; other != all.end(); ++other)
    if (read(*other) && *other != *first)
      fail(FSDP_INVALID_ARGUMENT,
           "{}: the checkpoint has {} optimizer steps for the parameters of rank {} and {} for those of rank {}; a "
           "model has one number of steps, so save them as one model, or load with FSDP_LOAD_WEIGHTS_ONLY",
           call, *first, team.world_rank(static_cast<uint32_t>(first - all.begin())), *other,
           team.world_rank(static_cast<uint32_t>(other - all.begin())));
  if (first != all.end()) steps_ = *first;
}

checkpoint::LoadResult Checkpoints::load(const char *call, const std::string &folder,
                                         const checkpoint::LoadOptions &options) {
  checkpoint::LoadResult result = load_into(call, [&](const checkpoint::LoadedModel &model) {
    return checkpoint::load(runtime_.team(), runtime_.context.waiter(), folder, model, options);
  });
  for (const std::string &problem : result.passed_over)
    runtime_.context.log(FSDP_LOG_WARNING, format_text("{}: passed over: {}", call, problem));
  for (const std::string &problem : result.older_unreadable)
    runtime_.context.log(FSDP_LOG_WARNING, format_text("{}: an older checkpoint cannot be read: {}", call, problem));
  if (result.name.empty()) return result;
  if (result.tensors.loaded.empty() &&
      !result.tensors.missing.empty()) {  // with FSDP_LOAD_IF_ANY, the checkpoint has no tensor of this model
    note_load(call, std::filesystem::path(canonical(folder)) / result.name, result);
    result.name.clear();
    result.manifest.step = 0;
    return result;
  }
  note_seed(call, result, options.model);
  if (options.states) agree_on_steps(call);
  if (steps_ && options.states) runtime_.step.stepped(static_cast<uint64_t>(*steps_));
  loaded_step_ = result.manifest.step;
  loaded_version_ = runtime_.step.version() + 1;
  std::filesystem::path path = canonical(folder);
  if (result.name != ".") path /= result.name;  // ".": the folder itself is the checkpoint
  loaded_folder_ = path.parent_path(), loaded_name_ = result.name = path.filename();
  note_load(call, path, result);
  return result;
}

checkpoint::LoadResult Checkpoints::load_weights(const std::string &path, std::span<const checkpoint::Rename> renames,
                                                 const checkpoint::LoadOptions &options) {
  constexpr auto call = "fsdp_load_weights";
  checkpoint::LoadResult result = load_into(call, [&](const checkpoint::LoadedModel &model) {
    return checkpoint::load_weights(runtime_.team(), runtime_.context.waiter(), path, model, renames, options);
  });
  note_load(call, path, result);
  return result;
}

}  // namespace fsdp::engine
