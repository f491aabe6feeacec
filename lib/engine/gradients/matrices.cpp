// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/matrices.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/dtype.h"

namespace fsdp::engine {

namespace {

using memory::Matrix;
using memory::MatrixWave;
constexpr auto collect_call = "fsdp_collect_matrices", next_call = "fsdp_next_matrix",
               return_call = "fsdp_return_matrices";
constexpr const char *weights_name = "main_weight";
constexpr auto file_rows = "rows of matrices on their way to the file, or from it";

std::string describe(const memory::ModelSpec &spec, const Matrix &matrix) {
  const memory::GroupSpec &group = spec.groups[matrix.group];
  return format_text("matrix {} (split {}) of parameter '{}' of group '{}'", matrix.batch, matrix.split,
                     group.params[matrix.param].name, group.name);
}

}  // namespace

Matrices::Matrices(Runtime &runtime, Optimizer &optimizer) : runtime_(runtime), optimizer_(optimizer) {
  if (plan().matrices.empty()) return;
  device::Device &device = runtime.context.device();
  order_ = device.create_event();
  worked_.create(device);
  turns_.resize(runtime.comms.size());
  for (auto &turns : turns_)
    for (Turn &turn : turns) turn.ready = device.create_event();
  left_out_.resize(plan().matrices.size());
  std::map<std::pair<uint32_t, uint64_t>, const Shard *> shards;
  for (const Shard &shard : optimizer.shards()) shards[{shard.group, shard.param_index}] = &shard;
  for (const Matrix &matrix : plan().matrices) {
    const auto own = shards.find({matrix.group, matrix.param});
    shards_.push_back(own == shards.end() ? nullptr : own->second);
  }
  // Finds the routes of all waves once, so that the lists have room for the longest route.
  for (uint32_t wave = 0; wave < plan().waves.size(); ++wave) route(wave);
  moves_.reserve(std::max(route_.inner.capacity(), route_.outer.capacity()));
}

// ---- what travels ----

MatrixPlane Matrices::read_plane(const char *name, const char *field) const {
  if (!name) return {};
  if (std::string_view(name) == weights_name) return {MatrixPlane::Values::weights};
  const auto &states = runtime_.spec.states;
  const auto found = std::ranges::find(states, name, &memory::StateSpec::name);
  if (found == states.end()) {
    std::string known = format_text("NULL for the main grads, '{}'", weights_name);
    for (const memory::StateSpec &state : states) known += format_text(", '{}'", state.name);
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is '{}'; it can be {}", collect_call, field, name, known);
  }
  return {MatrixPlane::Values::state, static_cast<uint32_t>(found - states.begin())};
}

// All ranks have the same buckets, so a refusal is the same on all ranks.
void Matrices::check_plane(const MatrixPlane &plane, const char *name) const {
  for (const Matrix &matrix : plan().matrices) {
    const memory::BucketPlan &bucket = runtime_.plan.buckets[matrix.bucket];
    const char *why = nullptr;
    if (plane.values == MatrixPlane::Values::weights && bucket.main_storage == FSDP_MAIN_SPLIT16)
      why = "has its main weights in two halves (FSDP_MAIN_SPLIT16), which no call hands out";
    if (plane.values == MatrixPlane::Values::state) {
      const memory::PlanePlan *const state = bucket.find(PlaneKind::state, plane.state);
      if (!state)
        why = "has no such state, which belongs to another optimizer";
      else if (!is_number(state->dtype))
        why = "keeps that state in codes of 8 bits, which are no numbers";
    }
    if (why)
      fail(FSDP_INVALID_ARGUMENT, "{}: {}: parameter '{}' of group '{}' {}", collect_call,
           name ? format_text("'{}'", name) : "main grads",
           runtime_.spec.groups[matrix.group].params[matrix.param].name, runtime_.spec.groups[matrix.group].name, why);
  }
}

StatePart Matrices::part_of(const Shard &shard, const MatrixPlane &plane) const {
  switch (plane.values) {
    case MatrixPlane::Values::grads:
      return {reinterpret_cast<std::byte *>(shard.main_grad()), &shard.slice.count, FSDP_FLOAT32};
    case MatrixPlane::Values::weights: return {shard.main_weight(), &shard.slice.count, shard.main_weight_dtype()};
    case MatrixPlane::Values::state: break;
  }
  const Plane &state = shard.bucket->plane(PlaneKind::state, plane.state);
  return {state.at(runtime_.slice_of(state, shard.tensor, state.plan->owned)), &shard.slice.count, state.dtype()};
}

void Matrices::require_matrices(const char *call) const {
  if (plan().matrices.empty())
    fail(FSDP_INVALID_STATE, "{}: no parameter of the model has matrices; declare them with fsdp_param.matrix", call);
}

void Matrices::require_collected(const char *call) const {
  require_matrices(call);
  if (!runtime_.step.collected())
    fail(FSDP_INVALID_STATE, "{}: no matrices are collected; call fsdp_collect_matrices first", call);
}

// Matrices of parameters that a step leaves unchanged do not travel. All ranks know which these are.
void Matrices::leave_out() noexcept {
  for (size_t i = 0; i < left_out_.size(); ++i)
    left_out_[i] = optimizer_.is_kept(plan().matrices[i].group, plan().matrices[i].param);
}

MatrixPlanes Matrices::read_planes(const char *source, const char *target, fsdp_dtype dtype) const {
  MatrixPlanes planes{read_plane(source, "source"), read_plane(target ? target : source, "target"), dtype};
  check_plane(planes.source, source);
  check_plane(planes.target, target ? target : source);
  return planes;
}

template <class Visit>
void Matrices::for_each_mesh(Visit &&visit) {
  for (uint32_t mesh = 0; mesh < plan().of_mesh.size(); ++mesh)
    if (plan().of_mesh[mesh].front().end()) visit(streams_of(MatrixWave{.mesh = mesh}));
}

void Matrices::collect(const MatrixPlanes &planes, device::Stream &caller) {
  planes_ = planes;
  if (planes.has_grads()) optimizer_.settle_grads();
  leave_out();
  wave_ = next_ = collected_ = 0;
  given_ = false;
  runtime_.join_window(caller);
  caller.record(*order_);
  for_each_mesh([&](const WaveStreams &on) {
    on.inner.wait(*order_);
    if (on.outer) on.outer->wait(*order_);
  });
  runtime_.step.set_collected(true);
  while (collected_ < std::min<size_t>(plan().waves.size(), memory::MatrixPlan::turns)) collect_wave(collected_++);
}

// ---- waves ----

Matrices::WaveStreams Matrices::streams_of(const MatrixWave &wave) {
  MeshComms &comms = runtime_.comms[wave.mesh];
  const bool over_outer = comms.mesh.slices() > 1;
  return {comms,
          *comms.reducing.stream,
          over_outer ? &comms.outer->stream() : nullptr,
          runtime_.storage->region(memory::RegionId::matrices, wave.mesh).part(),
          runtime_.storage->own_part(memory::RegionId::file_rows, wave.mesh),
          comms.row_files[0].get(),
          comms.row_files[1].get()};
}

void Matrices::route(uint32_t wave) {
  const MatrixWave &of = plan().waves[wave];
  memory::find_route(runtime_.spec, runtime_.plan, of, runtime_.comms[of.mesh].rank(), left_out_, scratch_, route_);
}

// Orders later work on the second stream after the present work on the first one.
void Matrices::order(device::Stream &before, device::Stream &after) {
  before.record(*order_);
  if (!order_->done()) after.wait(*order_);
}

// Orders later writes into the turn after the reads of its last return on all ranks. The outer stream must not
// overwrite rows before inner ranks have pulled them. The inner stream waits for the outer stream later.
void Matrices::await_turn(const WaveStreams &on, const Turn &turn) {
  on.comms.reduces->await_release(turn.inner, on.inner);
  if (!on.outer) return;
  on.comms.outer->sum_comm().await_release(turn.outer, *on.outer);
  order(on.inner, *on.outer);
}

void Matrices::collect_wave(uint32_t number) {
  const MatrixWave &wave = plan().waves[number];
  const WaveStreams on = streams_of(wave);
  Turn &turn = turn_of(wave);
  route(number);
  await_turn(on, turn);
  if (on.outer) {
    bring(on, wave, route_.outer_rows, *on.outer);
    exchange(on, true, false);
    order(*on.outer, on.inner);
  }
  bring(on, wave, route_.whole, on.inner);
  bring(on, wave, route_.rows, on.inner);
  exchange(on, false, false);
  on.inner.record(*turn.ready);
}

void Matrices::return_wave(uint32_t number) {
  const MatrixWave &wave = plan().waves[number];
  const WaveStreams on = streams_of(wave);
  Turn &turn = turn_of(wave);
  route(number);
  worked_.for_each([&](const device::Event &event) { on.inner.wait(event); });
  take(on, wave, route_.whole, on.inner);
  turn.inner = exchange(on, false, true);
  take(on, wave, route_.rows, on.inner);
  if (!on.outer) return;
  order(on.inner, *on.outer);
  turn.outer = exchange(on, true, true);
  take(on, wave, route_.outer_rows, *on.outer);
}

Matrices::PlaneRows Matrices::rows_in(const WaveStreams &on, const MatrixWave &wave, const memory::OwnRows &rows,
                                      const MatrixPlane &plane) const {
  const Shard &shard = *shards_[wave.first + rows.matrix];
  const StatePart part = part_of(shard, plane);
  const uint64_t size = dtype_size(part.dtype);
  std::byte *const data = part.data + (rows.first - shard.slice.tensor_offset) * size;
  if (!runtime_.storage->is_in_file(data)) return {data, part.dtype, {}};
  std::byte *const memory = on.file_rows + rows.place * sizeof(float);
  return {memory, part.dtype, HomePages{runtime_.storage->home_file()->offset_of(data), rows.count * size, memory}};
}

// Copies rows from this rank's planes into the region.
void Matrices::bring(const WaveStreams &on, const MatrixWave &wave, const Rows &rows, device::Stream &stream) {
  if (FileLane *const file = &stream == on.outer ? on.outer_file : on.inner_file) {
    stream.record(*order_);
    file->wait(*order_);  // rows of earlier waves have left their memory
    for (const memory::OwnRows &some : rows)
      if (const PlaneRows from = rows_in(on, wave, some, planes_.source); from.pages)
        file->read(*from.pages, file_rows);
    file->release(stream);
  }
  for (const memory::OwnRows &some : rows) {
    const PlaneRows from = rows_in(on, wave, some, planes_.source);
    stream.cast(on.region.own + some.place * dtype_size(planes_.dtype), planes_.dtype, from.data, from.dtype,
                some.count);
  }
}

// Copies rows from the region into this rank's planes.
void Matrices::take(const WaveStreams &on, const MatrixWave &wave, const Rows &rows, device::Stream &stream) {
  for (const memory::OwnRows &some : rows) {
    const PlaneRows to = rows_in(on, wave, some, planes_.target);
    stream.cast(to.data, to.dtype, on.region.own + some.place * dtype_size(planes_.dtype), planes_.dtype, some.count);
  }
  FileLane *const file = &stream == on.outer ? on.outer_file : on.inner_file;
  if (!file) return;
  stream.record(*order_);
  file->wait(*order_);
  for (const memory::OwnRows &some : rows)
    if (const PlaneRows to = rows_in(on, wave, some, planes_.target); to.pages) file->write(*to.pages, file_rows);
  file->release(stream);
}

// Moves rows from their holders to the owners or, if `back`, from the owners to the holders.
transport::Ticket Matrices::exchange(const WaveStreams &on, bool over_outer, bool back) {
  const auto &route = over_outer ? route_.outer : route_.inner;
  if (route.empty()) return {};
  const uint64_t size = dtype_size(planes_.dtype);
  moves_.clear();
  uint64_t bytes = 0;
  for (const memory::MatrixMove &move : route) {
    bytes += move.count * size;
    moves_.push_back({back ? move.owner : move.holder, back ? move.holder : move.owner,
                      (back ? move.at_owner : move.at_holder) * size, move.count * size,
                      on.region.own + (back ? move.at_holder : move.at_owner) * size});
  }
  const char *const what = back ? "return_matrices" : "collect_matrices";
  const Traced traced(what);
  CollectiveStream &inner = on.comms.reducing;
  StreamTrace &trace = over_outer ? on.comms.outer->trace() : *inner.trace;
  transport::Collectives &comm = over_outer ? on.comms.outer->sum_comm() : *on.comms.reduces;
  trace.begin(what, traced, bytes);
  const transport::Ticket ticket = comm.exchange(over_outer ? transport::Part::alone(on.region.own) : on.region, moves_,
                                                 {no_group, what}, over_outer ? *on.outer : on.inner);
  if (!over_outer) runtime_.place_call({CallKind::values, 0});
  trace.end(what, traced, bytes, runtime_.step.version(), comm);
  return ticket;
}

// ---- the caller ----

bool Matrices::is_own(uint32_t index) const {
  const Matrix &matrix = plan().matrices[index];
  if (left_out_[index]) return false;
  const MeshComms &comms = runtime_.comms[runtime_.groups[matrix.group].spec->mesh];
  return matrix.owner == Matrix::every_rank || matrix.owner == comms.mesh.slot(comms.rank());
}

// Finds this rank's next matrix of the wave, and the matrices of the same shape that follow at equal distances.
std::optional<MatrixRun> Matrices::find_run() {
  const MatrixWave &wave = plan().waves[wave_];
  const uint32_t end = wave.first + wave.count;
  next_ = std::max(next_, wave.first);
  while (next_ < end && !is_own(next_)) ++next_;
  if (next_ == end) return std::nullopt;
  const auto at = [&](uint64_t index) -> const Matrix & { return plan().matrices[index]; };
  const Matrix &first = at(next_);
  MatrixRun run{&first, 1, first.count()};
  const auto follows = [&](uint64_t index) {
    const Matrix &matrix = at(index);
    return is_own(static_cast<uint32_t>(index)) && matrix.group == first.group && matrix.param == first.param &&
           matrix.split == first.split && matrix.batch == at(index - 1).batch + 1 &&
           (run.count == 1 || matrix.place - at(index - 1).place == run.stride);
  };
  for (; next_ + run.count < end && follows(next_ + run.count); ++run.count)
    if (run.count == 1) run.stride = at(next_ + 1).place - first.place;
  next_ += static_cast<uint32_t>(run.count);
  return run;
}

// Called when the caller's work on its last matrices is enqueued.
void Matrices::note_worked() {
  if (std::exchange(given_, false)) runtime_.context.device().caller_stream(stream_).record(worked_.of(stream_));
}

void Matrices::advance() {
  return_wave(wave_++);
  if (collected_ < plan().waves.size()) collect_wave(collected_++);
}

std::optional<GivenMatrices> Matrices::next(fsdp_stream stream, device::Stream &caller) {
  note_worked();
  std::optional<MatrixRun> run;
  while (!(run = find_run())) {
    if (wave_ + 1 == plan().waves.size()) return std::nullopt;
    advance();
  }
  const MatrixWave &wave = plan().waves[wave_];
  runtime_.wait(*turn_of(wave).ready, WaitKind::peers, caller);
  check_rounds(next_call);
  given_ = true;
  stream_ = stream;
  const uint64_t size = dtype_size(planes_.dtype);
  return GivenMatrices{run->first, run->count, run->stride * size,
                       streams_of(wave).region.own + run->first->place * size, planes_.dtype};
}

void Matrices::check_all_given() const {
  for (uint32_t index = std::max(next_, plan().waves[wave_].first); index < plan().matrices.size(); ++index)
    if (is_own(index))
      fail(FSDP_INVALID_STATE, "{}: this rank has not come to {}; call fsdp_next_matrix until its data is NULL",
           return_call, describe(runtime_.spec, plan().matrices[index]));
}

void Matrices::return_rest() {
  check_all_given();
  note_worked();
  while (wave_ + 1 < plan().waves.size()) advance();
  return_wave(wave_);
}

void Matrices::give_back(device::Stream &caller) {
  for_each_mesh([&](const WaveStreams &on) {
    runtime_.wait_idle(on.inner, WaitKind::peers, caller);
    if (on.outer) runtime_.wait_idle(*on.outer, WaitKind::peers, caller);
  });
  runtime_.await_file();  // threads of the next calls read it in no order with streams
  check_rounds(return_call);
  runtime_.step.set_collected(false);
  wrote_weights_ = wrote_weights_ || planes_.target.values == MatrixPlane::Values::weights;
  runtime_.leave_window(caller);
}

// Throws the error of a collective of this round that did not complete, which means that another rank has given the
// step up.
void Matrices::check_rounds(const char *call) {
  for (const MeshComms &comms : runtime_.comms) {
    auto broken = comms.reduces->broken();
    if (!broken && comms.outer) broken = comms.outer->sum_comm().broken();
    if (!broken) continue;
    runtime_.step.fail(broken->message);
    broken->message = format_text("{}: {}; call fsdp_discard_step on every rank to go on", call, broken->message);
    throw *broken;
  }
}

std::string Matrices::find_written() const {
  if (runtime_.step.collected() && planes_.target.values != MatrixPlane::Values::grads)
    return "matrices are collected, and may have been written to their target on some ranks; call "
           "fsdp_return_matrices and fsdp_publish_weights";
  if (wrote_weights_)
    return "fsdp_return_matrices has written main weights, which cannot be restored; call fsdp_publish_weights";
  return {};
}

}  // namespace fsdp::engine
