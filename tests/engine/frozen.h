// SPDX-License-Identifier: Apache-2.0
// FROZEN quantized parameters: values that are awkward for them, planes as they are stored, and what holds them.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "checkpoint_folder.h"

namespace harness {

inline constexpr fsdp_quantization quantizations[] = {FSDP_QUANTIZE_FP8, FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK};
inline constexpr fsdp_unshard_mode unshard_modes[] = {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED};

inline ParamDef frozen(ParamDef param, fsdp_quantization quantization) {
  param.flags |= FSDP_PARAM_FROZEN;
  param.quantization = quantization;
  return param;
}

// A model of one group with one parameter.
inline Scenario frozen_setup(const ParamDef &param, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.groups = {{"g", {param}}};
  return setup;
}

// Values of many magnitudes; the largest comes last.
inline std::vector<float> awkward_values(uint64_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i)
    values[i] = std::ldexp(initial_weight(seed, i), static_cast<int>(i / 131 % 30) - 20) * (i % 97 ? 1.0f : 0.0f);
  values.back() = -3000;
  return values;
}

inline std::vector<uint8_t> random_bytes(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t &byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

inline std::vector<fsdp_plane> planes_of(fsdp_quantization quantization) {
  std::vector<fsdp_plane> planes{FSDP_PLANE_ROW, FSDP_PLANE_ROW_SCALE};
  if (quantization == FSDP_QUANTIZE_MXFP8) planes.insert(planes.end(), {FSDP_PLANE_COLUMN, FSDP_PLANE_COLUMN_SCALE});
  return planes;
}

using Planes = std::map<fsdp_plane, std::vector<uint8_t>>;

// The bytes of all planes, in the phases that show them.
inline Planes stored_planes(const Rank &rank, size_t group, size_t param) {
  Planes planes;
  for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD}) {
    FSDP(fsdp_unshard(rank.groups[group], phase, 0, stream()));
    for (const fsdp_plane plane : planes_of(rank.def(group).params[param].quantization)) {
      if ((plane >= FSDP_PLANE_COLUMN) != (phase == FSDP_BACKWARD)) continue;
      fsdp_tensor view = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_plane(rank.groups[group], param, phase, plane, &view));
      planes[plane].resize(view.element_count * view.element_size);
      copy_out(planes[plane].data(), view.data, planes[plane].size());
    }
    FSDP(fsdp_reshard(rank.groups[group], phase, 0, stream()));
  }
  return planes;
}

// Whatever bits: codes and scales that no number would give, NaN among them.
inline Planes random_planes(const ParamDef &param, uint32_t seed) {
  Planes planes;
  for (const fsdp_plane plane : planes_of(param.quantization)) {
    const bool column = plane >= FSDP_PLANE_COLUMN,
               scales = plane == FSDP_PLANE_ROW_SCALE || plane == FSDP_PLANE_COLUMN_SCALE;
    uint64_t bytes = 1;
    const auto shape = scales ? scale_shape(param.shape, block_of(param.quantization, column)) : param.shape;
    for (const uint64_t size : shape) bytes *= size;
    if (scales && param.quantization != FSDP_QUANTIZE_MXFP8) bytes *= sizeof(float);
    planes[plane] = random_bytes(bytes, seed * 8 + static_cast<uint32_t>(plane));
  }
  return planes;
}

inline fsdp_status load_plane(const Rank &rank, size_t group, size_t param, fsdp_plane plane,
                              const std::vector<uint8_t> &bytes, int32_t root = FSDP_EVERY_RANK) {
  const bool mxfp8 = rank.def(group).params[param].quantization == FSDP_QUANTIZE_MXFP8;
  const bool scales = plane == FSDP_PLANE_ROW_SCALE || plane == FSDP_PLANE_COLUMN_SCALE;
  const fsdp_dtype dtype = !scales ? FSDP_FLOAT8_E4M3 : mxfp8 ? FSDP_E8M0 : FSDP_FLOAT32;
  const bool gives = root == FSDP_EVERY_RANK || root == static_cast<int32_t>(rank.rank);
  if (!gives) return fsdp_load_plane(rank.groups[group], param, plane, nullptr, 0, 0, root, 0);
  return fsdp_load_plane(rank.groups[group], param, plane, bytes.data(), dtype,
                         bytes.size() / fsdp_get_dtype_size(dtype), root, 0);
}

inline void load_planes(const Rank &rank, size_t group, size_t param, const Planes &planes,
                        int32_t root = FSDP_EVERY_RANK) {
  for (const auto &[plane, bytes] : planes) FSDP(load_plane(rank, group, param, plane, bytes, root));
}

inline void publish(const Rank &rank) { FSDP(fsdp_publish_weights(rank.model, stream())); }

}  // namespace harness
