// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "memory.h"

namespace fuzz {
namespace {

fsdp_adamw_options choose_adamw(Rank &rank) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.beta1 = rank.real(0);
  options.beta2 = rank.real(0);
  options.epsilon = rank.real(1e-8);
  options.weight_decay = rank.real(0.1);
  options.step = rank.number(0);
  options.flags = rank.random.one_in(4)
                      ? rank.flags(FSDP_ADAMW_BETA1_ZERO | FSDP_ADAMW_BETA2_ZERO | FSDP_ADAMW_EPSILON_ZERO)
                      : rank.flags(0);
  options.reserved = rank.wild() && rank.random.one_in(8) ? 1 : 0;
  return options;
}

fsdp_status get_shard_count(Rank &rank) {
  Output<uint64_t> count(rank);
  return count(fsdp_get_shard_count(rank.model(), count.pointer()));
}

fsdp_status get_shard(Rank &rank) {
  Output<fsdp_shard> shard(rank);
  fsdp_model *const model = rank.model();
  return shard(fsdp_get_shard(model, rank.number(rank.random.below(4)), shard.pointer()));
}

fsdp_status get_shard_state(Rank &rank) {
  Output<fsdp_tensor> state(rank);
  fsdp_model *const model = rank.model();
  const char *const name = rank.wild() ? rank.name() : rank.random.one_in(2) ? "exp_avg" : "state";
  const fsdp_status status =
      state(fsdp_get_shard_state(model, rank.number(rank.random.below(4)), name, state.pointer()));
  if (status == FSDP_OK && rank.alone && state.whole())
    read_all(state.value().data, state.value().element_count * state.value().element_size);
  return status;
}

fsdp_status next_shard_chunk(Rank &rank) {
  Output<fsdp_shard> chunk(rank);
  fsdp_model *const model = rank.model();
  const fsdp_status status = chunk(fsdp_next_shard_chunk(model, rank.stream(), chunk.pointer()));
  if (status != FSDP_OK || !chunk.whole()) return status;
  if (!chunk.value().element_count)
    rank.chunked.erase(model);
  else if (rank.chunked.insert(model); rank.alone)
    read_all(chunk.value().main_grad, chunk.value().element_count * sizeof(float));
  return status;
}

fsdp_status get_shard_chunk_state(Rank &rank) {
  Output<fsdp_tensor> state(rank);
  fsdp_model *const model = rank.model();
  const char *const name = rank.wild() ? rank.name() : rank.aim.state.c_str();
  const fsdp_status status = state(fsdp_get_shard_chunk_state(model, name, state.pointer()));
  if (status == FSDP_OK && rank.alone && state.whole())
    read_all(state.value().data, state.value().element_count * state.value().element_size);
  return status;
}

const fsdp_mesh *of_norm(Rank &rank) { return rank.random.one_in(2) ? nullptr : rank.mesh(); }

fsdp_status get_grad_norm(Rank &rank) {
  Output<double> norm(rank);
  fsdp_model *const model = rank.model();
  return norm(fsdp_get_grad_norm(model, of_norm(rank), rank.stream(), norm.pointer()));
}

fsdp_status get_last_norm(Rank &rank) {
  Output<double> norm(rank);
  return norm(fsdp_get_last_norm(rank.model(), norm.pointer()));
}

fsdp_status get_param_norms(Rank &rank, decltype(&fsdp_get_param_grad_norms) get) {
  fsdp_model *const model = rank.model();
  uint64_t count = 0;
  for (const auto &[handle, facts] : rank.groups) count += facts.model == model ? facts.params.size() : 0;
  auto *const norms = reinterpret_cast<double *>(rank.buffer);
  return get(model, rank.stream(), rank.or_null(norms), rank.number(count));
}

fsdp_status get_param_grad_norms(Rank &rank) { return get_param_norms(rank, fsdp_get_param_grad_norms); }
fsdp_status get_param_weight_norms(Rank &rank) { return get_param_norms(rank, fsdp_get_param_weight_norms); }

fsdp_status count_zero_grads(Rank &rank) {
  Output<uint64_t> zeros(rank);
  return zeros(fsdp_count_zero_grads(rank.model(), rank.stream(), zeros.pointer()));
}

fsdp_status collect_matrices(Rank &rank) {
  fsdp_matrix_options given = FSDP_MATRIX_OPTIONS_INIT;
  const char *const names[] = {nullptr, "main_weight", "state", "exp_avg"};
  given.source = rank.wild() ? rank.name() : names[rank.random.below(std::size(names))];
  given.target = rank.wild() ? rank.name() : names[rank.random.below(std::size(names))];
  given.dtype = rank.choice(FSDP_FLOAT16);
  given.reserved = rank.wild() ? 1 : 0;
  const Input<fsdp_matrix_options> options(rank, given);
  fsdp_model *const model = rank.model();
  return fsdp_collect_matrices(model, options.pointer(), rank.stream());
}

fsdp_status next_matrix(Rank &rank) {
  Output<fsdp_matrix> matrix(rank);
  fsdp_model *const model = rank.model();
  const fsdp_status status = matrix(fsdp_next_matrix(model, rank.stream(), matrix.pointer()));
  if (status == FSDP_OK && rank.alone && matrix.whole() && matrix.value().data)
    for (uint64_t m = 0; m < matrix.value().count; ++m)
      read_all(static_cast<std::byte *>(matrix.value().data) + m * matrix.value().stride_bytes,
               matrix.value().rows * matrix.value().columns * 2);
  return status;
}

fsdp_status clip_grads(Rank &rank) {
  Output<double> norm(rank);
  fsdp_model *const model = rank.model();
  return norm(fsdp_clip_grads(model, of_norm(rank), rank.real(1), rank.stream(), norm.pointer()));
}

fsdp_status check_grads(Rank &rank) {
  Output<int32_t> found(rank);
  Output<const char *> name(rank);
  const fsdp_status status = fsdp_check_grads(rank.model(), rank.stream(), found.pointer(), name.pointer());
  return name(found(status));
}

fsdp_status apply_grads(Rank &rank) {
  Output<double> norm(rank);
  fsdp_model *const model = rank.model();
  std::vector<unsigned char> bytes(64 * 1024);
  const auto facts = rank.trainable(model);
  const uint64_t given = rank.number(rank.random.one_in(4) ? sizeof(fsdp_grad) + 8 : sizeof(fsdp_grad));
  const uint64_t stride =
      std::clamp<uint64_t>(given, sizeof(fsdp_grad), 4096);  // the elements lie where the call looks
  for (uint64_t i = 0; i < facts.size() && (i + 1) * stride < bytes.size(); ++i) {
    const fsdp_grad grad = {rank.random.one_in(8) || !facts[i].trained ? nullptr : rank.buffer,
                            rank.number(facts[i].element_count), rank.exactly(FSDP_FLOAT32), rank.wild() ? 1u : 0u};
    std::memcpy(bytes.data() + i * stride, &grad, sizeof grad);
  }
  const Input<fsdp_adamw_options> options(rank, choose_adamw(rank));
  const uint64_t count = rank.wild() ? rank.random.below(15) : facts.size();
  const fsdp_status status = fsdp_apply_grads(model, rank.or_null(reinterpret_cast<const fsdp_grad *>(bytes.data())),
                                              std::min<uint64_t>(count, 15), given, rank.real(0.01), rank.real(1),
                                              options.pointer(), rank.stream(), norm.pointer());
  require(status != FSDP_OK || is_stride<fsdp_grad>(given), "fsdp_apply_grads took a stride that cannot be");
  return norm(status);
}

fsdp_status step_adamw(Rank &rank) {
  const Input<fsdp_adamw_options> options(rank, choose_adamw(rank));
  fsdp_model *const model = rank.model();
  return fsdp_step_adamw(model, rank.real(0.01), options.pointer(), rank.stream());
}

// Aims at a parameter without main weights of its own, because few parameters are of this kind.
ParamFacts aim_at_bfloat16(Rank &rank) {
  for (const auto &[handle, facts] : rank.groups)
    for (uint64_t p = 0; facts.model == rank.aim.model && p < facts.params.size(); ++p)
      if (facts.main_storage == FSDP_MAIN_NONE && facts.params[p].dtype == FSDP_BFLOAT16 && !facts.params[p].frozen) {
        rank.aim.group = static_cast<fsdp_group *>(const_cast<void *>(handle));
        rank.aim.param = p;
        return facts.params[p];
      }
  return rank.param();
}

fsdp_status round_stochastic(Rank &rank) {
  const ParamFacts facts = aim_at_bfloat16(rank);
  fsdp_group *const group = rank.group();
  const uint64_t offset = facts.element_count ? rank.random.below(facts.element_count) : 0;
  const auto *const from = reinterpret_cast<const float *>(rank.buffer);
  return fsdp_round_stochastic(group, rank.number(rank.aim.param), rank.number(offset), rank.or_null(from),
                               rank.or_null(rank.buffer + buffer_bytes / 2), rank.number(facts.element_count - offset),
                               rank.number(1), rank.stream());
}

fsdp_status finish_grads(Rank &rank) {
  fsdp_model *const model = rank.model();
  return fsdp_finish_grads(model, rank.real(1), rank.number32(rank.aim.flags), rank.stream());
}

}  // namespace

const std::vector<Case> &optimizer_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_finish_grads", finish_grads},
      {"fsdp_get_shard_count", get_shard_count},
      {"fsdp_get_shard", get_shard},
      {"fsdp_get_shard_state", get_shard_state},
      {"fsdp_next_shard_chunk", next_shard_chunk},
      {"fsdp_get_shard_chunk_state", get_shard_chunk_state},
      {"fsdp_get_grad_norm", get_grad_norm},
      {"fsdp_get_last_norm", get_last_norm},
      {"fsdp_get_param_grad_norms", get_param_grad_norms},
      {"fsdp_get_param_weight_norms", get_param_weight_norms},
      {"fsdp_count_zero_grads", count_zero_grads},
      {"fsdp_scale_grads",
       [](Rank &rank) {
         fsdp_model *const model = rank.model();
         return fsdp_scale_grads(model, rank.real(0.5), rank.stream());
       }},
      {"fsdp_collect_matrices", collect_matrices},
      {"fsdp_next_matrix", next_matrix},
      {"fsdp_return_matrices",
       [](Rank &rank) {
         fsdp_model *const model = rank.model();
         return fsdp_return_matrices(model, rank.stream());
       }},
      {"fsdp_clip_grads", clip_grads},
      {"fsdp_check_grads", check_grads},
      {"fsdp_step_adamw", step_adamw},
      {"fsdp_round_stochastic", round_stochastic},
      {"fsdp_publish_weights", [](Rank &rank) { return fsdp_publish_weights(rank.model(), rank.stream()); }},
      {"fsdp_begin_update", [](Rank &rank) { return fsdp_begin_update(rank.model(), rank.stream()); }},
      {"fsdp_discard_step", [](Rank &rank) { return fsdp_discard_step(rank.model(), rank.stream()); }},
      {"fsdp_check_replicas",
       [](Rank &rank) {
         fsdp_model *const model = rank.model();
         return fsdp_check_replicas(model, rank.flags(0), rank.stream());
       }},
      {"fsdp_apply_grads", apply_grads},
  };
  return cases;
}

}  // namespace fuzz
