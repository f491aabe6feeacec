// SPDX-License-Identifier: Apache-2.0

#include "engine/model/model.h"

#include <algorithm>
#include <array>
#include <memory_resource>
#include <utility>

#include "base/dtype.h"
#include "engine/runtime/param_settings.h"
#include "engine/runtime/teams.h"
#include "memory/plane.h"

namespace fsdp::engine {

Model::Model(std::shared_ptr<Context> context, memory::ModelSpec spec, fsdp_optimizer optimizer, GroupDefaults defaults)
    : context_(std::move(context)), declaration_(*context_, std::move(spec), optimizer, defaults) {
  context_->add_model(this);
}

void Model::seal() {
  declaration_.require_unsealed("fsdp_seal_model");
  context_->require_no_other_capture(nullptr, "fsdp_seal_model");
  if (!context_->planning()) return seal_running();
  plan_ = declaration_.make_plan();
  declaration_.seal();
  log_granules();
  log_padding();
}

// A rank with a failed plan (for example because a schedule lacks a group) still meets the others, which would
// otherwise wait for it.
void Model::seal_running() {
  const trace::Span span(context_->timeline(), trace::EventKind::call, "seal_model");
  const memory::ModelSpec &spec = declaration_.spec();
  std::vector<Teams> teams{create_teams(*context_, spec.mesh(), "the model")};
  transport::Team *const team = teams.front().all.get();
  declaration_.number_meshes_alike(*team);
  std::unique_ptr<memory::ModelPlan> made;
  const auto unplanned = capture_error([&] { made = declaration_.make_plan(); });
  const uint32_t number = context_->flight().count_models(name_ranks(*team, context_->world_size()));
  teams.front().number = number;
  verify_declarations(*team, spec, unplanned ? memory::ModelPlan{} : *made, number);
  transport::share_error(*team, unplanned, "fsdp_seal_model");
  plan_ = std::move(made);
  check_meshes(*team, spec);
  declaration_.learn_instances(*team);
  // Plans again, because the loads of other meshes are known now.
  transport::attempt_together(*team, "fsdp_seal_model", [&] { memory::plan_matrices(spec, *plan_); });
  create_teams_of_groups(teams);
  const TeamMemory exchanges = team_memory(teams, *context_, spec);
  plan_->region(memory::RegionId::messages).bytes = exchanges.message_bytes;
  plan_->acted_message_bytes = exchanges.acted_bytes;
  plan_->region(memory::RegionId::device_messages).bytes = exchanges.device_bytes;
  if (std::ranges::none_of(teams,
                           [](const Teams &mesh_teams) { return mesh_teams.inner_data->traits().receives_slices; }))
    drop_received(*plan_);
  runtime_ = std::make_unique<Runtime>(*context_, spec, *plan_, declaration_.arenas(), std::move(teams));
  runtime_->step.set_lr_scales(hash_lr_scales(spec));
  runtime_->set_trained(hash_trained(spec), true);
  // If another rank fails, this rank drops its parts, too, and the model is not sealed.
  std::unique_ptr<SealedParts> parts;
  transport::attempt_together(*team, "fsdp_seal_model", [&] {
    parts = std::make_unique<SealedParts>(*runtime_, declaration_.adamw(), declaration_.counts_steps());
  });
  parts_ = std::move(parts);
  // Until here the error of the disk is one of the seal, after which the context goes on.
  runtime_->storage->tell_file_errors([this](const Error &error) { context_->fail_for_good(error, false); });
  warn_of_queues(*context_, runtime_->teams);
  if (context_->debug()) views_.emplace(*runtime_, runtime_->number());
  declaration_.seal();
  context_->log(FSDP_LOG_INFO,
                format_text("sealed a model of {} groups, {} elements, {} bytes on this rank", spec.groups.size(),
                            plan_->element_count, runtime_->storage->allocated_bytes()[0]));
  log_granules();
  log_padding();
  log_memory();
}

// If a team fails, the ranks of all other teams must fail as well.
void Model::create_teams_of_groups(std::vector<Teams> &teams) {
  const memory::ModelSpec &spec = declaration_.spec();
  transport::Team &all = *teams.front().all;
  const auto create_axes_of = [&](uint32_t mesh, const std::string &what) {
    create_axes(teams[mesh], *context_, spec.meshes[mesh], spec.communicates(spec.meshes[mesh]), what);
  };
  if (spec.meshes.size() == 1) return create_axes_of(0, "the model");
  transport::attempt_together(all, "fsdp_seal_model", [&] { create_axes_of(0, "the model"); });
  for (uint32_t mesh = 1; mesh < spec.meshes.size(); ++mesh)
    transport::attempt_together(all, "fsdp_seal_model", [&] {
      const std::string what = format_text("mesh {} of the model", mesh);
      teams.push_back(create_teams(*context_, spec.meshes[mesh], what));
      teams.back().number = teams.front().number;
      verify_declarations(*teams.back().all, spec, *plan_, teams.front().number, mesh);
      create_axes_of(mesh, what);
    });
}

namespace {

std::string describe_granule(const memory::ParamSpec &param, uint64_t rows) {
  memory::ParamSpec usual = param;
  usual.coded_states = false;
  const bool by_states = param.coded_states && memory::raised_granule(usual) != rows;
  return format_text(
      "its granule is {} rows, not {}: {} keeps them together", rows,
      param.granule == FSDP_GRANULE_BLOCK ? param.granule_rows : 1,
      by_states ? "a block of 256 elements with states in 8 bits" : quantization_name(param.quantization));
}

}  // namespace

// Logs which parameters are stored differently from their declaration.
void Model::log_granules() const {
  if (!context_->logs(FSDP_LOG_INFO)) return;
  const auto tell = [&](const memory::GroupSpec &group, const memory::ParamSpec &param, const std::string &text) {
    context_->log(FSDP_LOG_INFO, format_text("parameter '{}' of group '{}': {}", param.name, group.name, text));
  };
  for (const memory::GroupSpec &group : declaration_.spec().groups)
    for (const memory::ParamSpec &param : group.params) {
      if (const uint64_t rows = memory::raised_granule(param)) tell(group, param, describe_granule(param, rows));
      if (declaration_.codes_states() && !param.by_caller() && memory::cuts_coded_blocks(param))
        tell(group, param, "its states are fp32, since the blocks of such a box are no blocks of the whole tensor");
    }
}

// Logs each piece whose padding is more than 5 % of its elements.
void Model::log_padding() const {
  constexpr uint64_t tolerated = 20;  // up to one element in 20 may be padding
  if (!context_->logs(FSDP_LOG_INFO)) return;
  for (size_t g = 0; g < plan_->groups.size(); ++g) {
    const std::vector<memory::PiecePlan> &pieces = plan_->groups[g].pieces;
    for (size_t p = 0; pieces.size() > 1 && p < pieces.size(); ++p)
      if (pieces[p].padding_count > pieces[p].element_count / tolerated)
        context_->log(
            FSDP_LOG_INFO,
            format_text("piece {} of group '{}' is padded by {} to {} elements; to save memory, put its parameters "
                        "into a piece with others",
                        p, declaration_.spec().groups[g].name, pieces[p].padding_count,
                        pieces[p].element_count + pieces[p].padding_count));
  }
}

// Logs the regions that the seal has allocated, to show how memory is used.
void Model::log_memory() const {
  if (!context_->logs(FSDP_LOG_DEBUG)) return;
  for (const memory::RegionPlan &region : plan_->regions)
    if (region.bytes)
      context_->log(FSDP_LOG_DEBUG,
                    format_text("model {}: {}{}: {} bytes", runtime_->number(), region.what,
                                region.reach == memory::Reach::common ? " of all ranks" : "", region.bytes));
}

const memory::ModelPlan &Model::plan(const char *call) const {
  if (!declaration_.sealed()) fail(FSDP_INVALID_STATE, "{}: the model is not sealed; call fsdp_seal_model first", call);
  return *plan_;
}

void Model::refuse_parts(const char *call) const {
  plan(call);
  context_->require_world(call);
  fail(FSDP_INTERNAL, "{}: a sealed model lacks a part", call);
}

Runtime &Model::runtime(const char *call) {
  plan(call);
  context_->require_world(call);
  parts_->graphs.require_no_replay(call);
  return *runtime_;
}

UpdateWindow &Model::update(const char *call) {
  runtime(call);
  return parts_->update;
}

// Work that can fail comes first, so that a failed call changes nothing.
void Model::set_lr_scale(const Group &group, uint64_t param_index, double lr_scale) {
  constexpr auto call = "fsdp_set_param_lr_scale";
  Runtime &state = runtime(call);
  state.require_eager(call);
  memory::ParamSpec &param = declaration_.param(group.index, param_index);
  if (param.frozen())
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' is FROZEN and has no optimizer", call, param.name,
         group.name());
  if (param.lr_scale == lr_scale) return;
  Optimizer &optimizer = parts_->optimizer;
  optimizer.adopt(optimizer.make_batches(&param, lr_scale));
  param.lr_scale = lr_scale == 0 ? 0 : lr_scale;  // no negative zero, so that equal scales have equal bits
  param.flags = lr_scale == 0 ? param.flags | FSDP_PARAM_LR_ZERO : param.flags & ~uint32_t{FSDP_PARAM_LR_ZERO};
  state.step.set_lr_scales(hash_lr_scales(spec()));
}

void Model::set_trainable(const Group &group, uint64_t param_index, bool trainable) {
  constexpr auto call = "fsdp_set_param_trainable";
  Runtime &state = runtime(call);
  state.require_eager(call);
  memory::ParamSpec &param = declaration_.param(group.index, param_index);
  if (param.frozen())
    fail(FSDP_INVALID_STATE,
         "{}: parameter '{}' of group '{}' was declared FROZEN, and has neither gradient nor optimizer; declare it "
         "without FSDP_PARAM_FROZEN to train it later",
         call, param.name, group.name());
  parts_->update.require_between_steps(call);
  if (param.trained == trainable) return;
  param.trained = trainable;
  parts_->optimizer.list_trained();
  parts_->reducer.forget_cleared();
  state.set_trained(hash_trained(spec()), trains_all(spec()));
}

// A loaded gradient counts as a gradient on all ranks, as if each of them had computed it.
void Model::load_grad(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                      int32_t root) {
  parts_->optimizer.settle_grads();
  params("fsdp_load_grad").load_grad(group, param_index, data, dtype, element_count, root);
  group.grad.given[param_index] = 1;
  parts_->optimizer.list_spans();
}

// FSDP_BUSY comes from a call that was inside the model. CallScope reports it as if the call had not entered.
void Model::note_failure(const char *call, Error &error) noexcept {
  if (error.status == FSDP_BUSY) context_->flight().leave_failed(FSDP_BUSY);
  if (parts_) parts_->graphs.note_failure(call, error);
}

std::string Model::unfinished() const { return parts_ ? parts_->update.list_unfinished() : std::string(); }

std::string Model::open_graph() const { return parts_ ? parts_->graphs.describe_open() : std::string(); }

uint64_t Model::role_bytes(fsdp_role role, uint32_t rank) const {
  constexpr auto call = "fsdp_get_role_bytes";
  const memory::ModelPlan &model_plan = plan(call);
  // The text needs a fixed buffer, because every step may make this call and a step must allocate nothing.
  std::array<std::byte, 1024> room;
  std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
  return model_plan.role_bytes(places_of(spec(), rank, call, &memory))[role];
}

uint64_t Model::allocated_bytes(fsdp_role role) {
  return runtime("fsdp_get_allocated_bytes").storage->allocated_bytes()[role];
}

void Model::get_info(fsdp_model_info &info) const {
  const memory::ModelPlan &model_plan = plan("fsdp_get_model_info");
  info.group_count = spec().groups.size();
  info.param_count = model_plan.param_count;
  info.element_count = model_plan.element_count;
  info.padding_count = model_plan.padding_count;
  info.gather_pool_bytes = model_plan.gather_pool.size_bytes;
  info.gather_lower_bound_bytes = model_plan.gather_pool.lower_bound_bytes;
  info.reduce_pool_bytes = model_plan.grad_pool.size_bytes;
  info.reduce_lower_bound_bytes = model_plan.grad_pool.lower_bound_bytes;
  info.layout_hash = model_plan.layout_hash;
}

void Model::get_stats(fsdp_stats &stats) {
  const Runtime &state = runtime("fsdp_get_stats");
  const Stats &counted = state.stats;
  stats.version = state.step.version();
  stats.step = state.step.adamw_step();
  stats.gathers = counted.gathers;
  stats.reduces = counted.reduces;
  stats.all_gathers = counted.all_gathers;
  stats.reduce_scatters = counted.reduce_scatters;
  stats.all_reduces = counted.all_reduces;
  stats.gathered_bytes = counted.gathered_bytes;
  stats.gathered_row_bytes = counted.gathered_row_bytes;
  stats.gathered_column_bytes = counted.gathered_column_bytes;
  stats.reduced_bytes = counted.reduced_bytes;
  stats.prefetches = counted.prefetches;
  stats.dropped_prefetches = counted.dropped_prefetches;
  stats.gathered_groups = counted.gathered_groups;
  stats.peak_gathered_groups = counted.peak_gathered_groups;
  stats.pending_grad_groups = counted.pending_grads;
  stats.peak_pending_grad_groups = counted.peak_pending_grads;
  stats.gather_wait_ns = counted.gather_wait_ns;
  stats.reduce_wait_ns = counted.reduce_wait_ns;
  stats.peer_wait_ns = counted.peer_wait_ns;
  stats.checkpoint_stall_ns = counted.checkpoint_stall_ns;
  stats.home_wait_ns = counted.home_wait_ns;
  if (const auto &file = state.storage->home_file())
    stats.home_read_bytes = file->read_bytes(), stats.home_written_bytes = file->written_bytes();
  stats.wait_ns = counted.gather_wait_ns + counted.reduce_wait_ns + counted.peer_wait_ns;
  stats.reduce_scatter_bytes = counted.reduce_scatter_bytes;
  stats.all_reduce_bytes = counted.all_reduce_bytes;
  for (const MeshComms &mesh_comms : state.comms) {
    if (!mesh_comms.outer) continue;
    const OuterStats outer = mesh_comms.outer->stats();
    stats.outer_all_reduces += outer.all_reduces;
    stats.outer_reduce_scatters += outer.reduce_scatters;
    stats.outer_all_gathers += outer.all_gathers;
    stats.outer_sent_bytes += outer.sent_bytes;
  }
  stats.allocations = context_->device().allocations();
  stats.last_rank = parts_->meetings.last_rank();
  stats.last_rank_lag_ns = parts_->meetings.last_lag_ns();
}

}  // namespace fsdp::engine
