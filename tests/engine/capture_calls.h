// SPDX-License-Identifier: Apache-2.0
// Calls by name, for tests that check the same rule for many calls.
#pragma once

#include "graph.h"

namespace harness {

using Call = std::function<fsdp_status(Rank &, cudaStream_t)>;
struct NamedCall {
  std::string name;
  Call call;
};

inline fsdp_status acquire_grad(Rank &rank, cudaStream_t stream) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  return fsdp_acquire_grad(rank.groups[0], 0, 0, stream, &grad, &accumulate);
}

inline fsdp_status get_norm(Rank &rank, cudaStream_t stream) {
  double norm = 0;
  return fsdp_get_grad_norm(rank.model, nullptr, stream, &norm);
}

inline fsdp_status get_param_norms(Rank &rank, cudaStream_t stream) {
  double norms[10] = {};
  return fsdp_get_param_grad_norms(rank.model, stream, norms, 10);
}

inline fsdp_status get_weight_norms(Rank &rank, cudaStream_t stream) {
  double norms[10] = {};
  return fsdp_get_param_weight_norms(rank.model, stream, norms, 10);
}

inline fsdp_status count_zeros(Rank &rank, cudaStream_t stream) {
  uint64_t zeros = 0;
  return fsdp_count_zero_grads(rank.model, stream, &zeros);
}

inline fsdp_status clip(Rank &rank, cudaStream_t stream) {
  double norm = 0;
  return fsdp_clip_grads(rank.model, nullptr, 1.0, stream, &norm);
}

inline fsdp_status check_finite(Rank &rank, cudaStream_t stream) {
  int32_t found = 0;
  return fsdp_check_grads(rank.model, stream, &found, nullptr);
}

inline fsdp_status apply(Rank &rank, cudaStream_t stream, double *norm) {
  std::vector<fsdp_grad> grads;
  for (const GroupDef &group : rank.setup.groups)
    for (const ParamDef &param : group.params) {
      fsdp_grad grad{};
      grad.element_count = param.count();
      grad.dtype = FSDP_FLOAT32;
      grads.push_back(grad);  // data NULL: none
    }
  return fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.1, 0, nullptr, stream, norm);
}

inline fsdp_status apply_with_norm(Rank &rank, cudaStream_t stream) {
  double norm = 0;
  return apply(rank, stream, &norm);
}

inline fsdp_status load_param(Rank &rank, cudaStream_t) {
  const std::vector<float> values(rank.def(0).params[0].count());
  return fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0);
}

inline fsdp_status load_grad(Rank &rank, cudaStream_t) {
  const std::vector<float> values(rank.def(0).params[0].count());
  return fsdp_load_grad(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0);
}

inline fsdp_status read_grad(Rank &rank, cudaStream_t) {
  std::vector<float> values(rank.def(0).params[0].count());
  return fsdp_read_grad(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0);
}

inline fsdp_status load_chunk(Rank &rank, cudaStream_t) {
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  FSDP(fsdp_get_chunk(rank.groups[0], 0, rank.rank, &chunk));
  const std::vector<float> values(chunk.element_count);
  return fsdp_load_chunk(rank.groups[0], 0, values.data(), FSDP_FLOAT32, chunk.row_offset, chunk.row_count, 0);
}

inline fsdp_status next_chunk(Rank &rank, cudaStream_t stream) {
  fsdp_shard chunk = FSDP_SHARD_INIT;
  return fsdp_next_shard_chunk(rank.model, stream, &chunk);
}

inline fsdp_status read_param(Rank &rank, cudaStream_t) {
  std::vector<float> values(rank.def(0).params[0].count());
  return fsdp_read_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0);
}

}  // namespace harness
