// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "memory.h"

namespace fuzz {
namespace {

constexpr uint64_t max_params = 4, param_room = 112;

// Descriptors lie in memory at any stride up to param_room, and have names and shapes of their own.
struct Params {
  // narrow: sized as main weights in fewer bits than fp32 need it.
  Params(Rank &rank, bool narrow) : bytes(max_params * 4096 + 8192), is_narrow(narrow) {
    count = rank.random.below(max_params + 1);
    stride = rank.wild() ? rank.nonsense() : rank.random.one_in(4) ? param_room : sizeof(fsdp_param);
    for (uint64_t i = 0; i < count; ++i) declare(rank, i);
  }

  void declare(Rank &rank, uint64_t i) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.struct_size = rank.number(sizeof(fsdp_param));
    if (const char *const name = rank.name()) param.name = (names[i] = name).c_str();
    uint64_t elements = 1;
    for (auto &size : shapes[i])
      size = rank.wild() ? (rank.random.one_in(2) ? 0 : uint64_t{1} << 63) : 1 + rank.random.below(12);
    param.shape = rank.or_null(shapes[i]);
    param.dimension_count = static_cast<uint32_t>(rank.random.below(4));
    for (uint32_t d = 0; d < param.dimension_count; ++d) elements *= shapes[i][d];
    if (rank.wild()) param.dimension_count = 17 + static_cast<uint32_t>(rank.random.below(47));
    param.dtype = rank.random.one_in(2) ? 0 : rank.choice(FSDP_FLOAT16);
    param.flags = rank.random.one_in(2) ? rank.flags(FSDP_PARAM_FROZEN | FSDP_PARAM_NO_DECAY | FSDP_PARAM_LR_ZERO)
                                        : rank.flags(0);
    param.granule = rank.random.one_in(2) ? 0 : rank.choice(FSDP_GRANULE_TENSOR);
    param.granule_rows = rank.number(2);
    param.lr_scale = rank.real(0);
    param.user_data = reinterpret_cast<void *>(rank.nonsense());
    if (rank.random.one_in(4)) {
      for (uint32_t d = 0; d < 64; ++d) {
        offsets[i][d] = rank.wild() ? rank.nonsense() : rank.random.below(8);
        wholes[i][d] = rank.wild() ? rank.nonsense() : shapes[i][d] + offsets[i][d];
      }
      param.global_shape = rank.or_null(wholes[i]);
      param.global_offset = rank.or_null(offsets[i]);
    }
    const bool frozen = param.flags & FSDP_PARAM_FROZEN;
    const bool narrow = is_narrow && !frozen && !rank.wild();
    if (narrow && param.dtype == FSDP_FLOAT16) param.dtype = FSDP_BFLOAT16;
    const bool fits = param.dimension_count == 2 && !(frozen && param.global_shape) && !narrow;
    const fsdp_quantization kind = rank.random.one_in(2) ? FSDP_QUANTIZE_FP8_BLOCK : FSDP_QUANTIZE_FP8;
    param.quantization = rank.exactly(fits && rank.random.one_in(4) ? kind : 0);
    // Hardly any of these sizes can be divided into blocks of 32.
    if (fits && rank.random.one_in(8)) {
      shapes[i][0] = shapes[i][1] = 32;
      param.quantization = rank.exactly(FSDP_QUANTIZE_MXFP8);
      elements = 32 * 32;
    }
    if (frozen && !param.quantization && rank.random.one_in(4)) param.dtype = FSDP_UINT8;
    param.missing_grad = rank.choice(FSDP_MISSING_GRAD_SKIP);
    param.row_dimensions = rank.wild() ? static_cast<uint32_t>(rank.nonsense())
                                       : static_cast<uint32_t>(rank.random.below(param.dimension_count % 64 + 1));
    piece += i && rank.random.one_in(4);
    param.piece = rank.number32(piece);
    // In groups with SPLIT16 the caller updates no bf16 parameter.
    param.optimizer = rank.exactly(!frozen && !narrow && rank.random.one_in(4) ? FSDP_OPTIMIZER_CALLER + 0 : 0);
    choose_matrices(rank, i, param);
    if (stride <= 4096) std::memcpy(bytes.data() + i * stride, &param, sizeof param);
    facts.push_back(
        {elements, param.dtype ? param.dtype : FSDP_FLOAT32, (param.flags & FSDP_PARAM_FROZEN) != 0, names[i]});
  }

  void choose_matrices(Rank &rank, uint64_t i, fsdp_param &param) {
    const bool fits = param.dimension_count == 2 && !(param.flags & FSDP_PARAM_FROZEN) && !param.global_shape;
    param.matrix = rank.exactly(fits && rank.random.one_in(2) ? FSDP_MATRIX_LAST_TWO + 0 : 0);
    if (!param.matrix || rank.random.one_in(2)) return;
    splits[i][0] = rank.wild() ? rank.nonsense() : shapes[i][0] / 2;
    splits[i][1] = shapes[i][0] - splits[i][0];
    const bool halves = splits[i][0] > 0;
    param.matrix_splits = rank.or_null(halves ? splits[i] : splits[i] + 1);
    param.matrix_split_count = rank.number(halves ? 2 : 1);
  }

  std::vector<unsigned char> bytes;
  std::string names[max_params];
  uint64_t shapes[max_params][64], wholes[max_params][64], offsets[max_params][64], splits[max_params][2];
  uint64_t count, stride;
  uint32_t piece = 0;
  bool is_narrow;
  std::vector<ParamFacts> facts;
};

fsdp_status create_group(Rank &rank) {
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  options.flags = rank.random.one_in(4) ? rank.flags(FSDP_GROUP_RESIDENT | FSDP_GROUP_ROOT) : rank.flags(0);
  options.strategy = rank.random.one_in(2) ? 0 : rank.choice(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  options.grad_dtype = rank.exactly(0);
  options.reduce_dtype = rank.exactly(0);
  options.main_storage = rank.random.one_in(8) ? rank.choice(FSDP_MAIN_NONE) : 0;
  options.backward_weights = rank.random.one_in(8) ? rank.choice(FSDP_BACKWARD_WEIGHTS_NONE) : 0;
  options.mesh = rank.random.one_in(4) ? rank.mesh() : nullptr;
  options.grad_op = rank.random.one_in(8) ? rank.choice(FSDP_GRAD_OP_FACTOR) : 0;
  options.outer_strategy = rank.random.one_in(8) ? rank.choice(FSDP_OUTER_OPTIM) : 0;
  options.grad_factor = rank.real(0.5);
  const Input<fsdp_group_options> input(rank, options);
  fsdp_model *const model = rank.model();
  const auto known = rank.main_storages.find(model);
  const fsdp_main_storage of_model = known == rank.main_storages.end() ? 0 : known->second;
  const fsdp_main_storage storage = options.main_storage ? options.main_storage : of_model;
  const Params params(rank, storage > FSDP_MAIN_FLOAT32);
  const char *const name = rank.name();
  const std::string kept = name ? name : "";
  fsdp_group *made = nullptr;
  const fsdp_status status = make<fsdp_group>(
      rank, a_group,
      [&](auto **out) {
        const auto *first = rank.or_null(reinterpret_cast<const fsdp_param *>(params.bytes.data()));
        return fsdp_create_group(model, name, first, params.count, params.stride, input.pointer(), out);
      },
      &made);
  require(!made || is_stride<fsdp_param>(params.stride, offsetof(fsdp_param, row_dimensions)),
          "fsdp_create_group took a stride that cannot be");
  if (made) rank.groups[made] = {model, params.facts, kept, storage};
  return status;
}

fsdp_status load_param(Rank &rank) {
  const ParamFacts facts = rank.param();
  fsdp_group *const group = rank.group();
  std::fill_n(rank.buffer, buffer_bytes, static_cast<unsigned char>(rank.random.below(64)));
  return fsdp_load_param(group, rank.number(rank.aim.param), rank.or_null(rank.buffer), rank.exactly(facts.dtype),
                         rank.number(facts.element_count), rank.exactly(rank.random.one_in(2) ? FSDP_EVERY_RANK : 0),
                         rank.flags(0));
}

// Aims at the first parameter of that kind, because there are few of them. Keeps the aim if there is none.
uint64_t find_quantized(const Rank &rank, fsdp_group *group, bool frozen, fsdp_param &param) {
  for (uint64_t i = 0; i < max_params && fsdp_get_param_info(group, i, &param) == FSDP_OK; ++i)
    if (frozen ? param.quantization && param.flags & FSDP_PARAM_FROZEN : param.quantization == FSDP_QUANTIZE_MXFP8)
      return i;
  return rank.aim.param;
}

uint64_t blocks_of(uint64_t size) { return (size + 127) / 128; }

fsdp_status load_plane(Rank &rank) {
  fsdp_group *const group = rank.group();
  fsdp_param param = FSDP_PARAM_INIT;
  const uint64_t index = find_quantized(rank, group, true, param);
  const bool mxfp8 = param.quantization == FSDP_QUANTIZE_MXFP8;
  const fsdp_plane plane = rank.exactly(rank.choice(mxfp8 ? FSDP_PLANE_COLUMN_SCALE : FSDP_PLANE_ROW_SCALE));
  uint64_t count = 1;
  for (uint32_t d = 0; d < param.dimension_count; ++d) count *= param.shape[d];
  const bool codes = plane == FSDP_PLANE_ROW || plane == FSDP_PLANE_COLUMN;
  if (!codes && mxfp8) count /= 32;
  if (!codes && param.quantization == FSDP_QUANTIZE_FP8) count = 1;
  if (!codes && param.quantization == FSDP_QUANTIZE_FP8_BLOCK && param.dimension_count == 2)
    count = blocks_of(param.shape[0]) * blocks_of(param.shape[1]);
  return fsdp_load_plane(group, rank.number(index), plane, rank.or_null(rank.buffer),
                         rank.exactly(codes   ? FSDP_FLOAT8_E4M3 + 0
                                      : mxfp8 ? FSDP_E8M0 + 0
                                              : FSDP_FLOAT32 + 0),
                         rank.number(count), rank.exactly(rank.random.one_in(2) ? FSDP_EVERY_RANK : 0), rank.flags(0));
}

const char *state_name(Rank &rank) {
  return rank.wild() ? rank.name() : rank.random.one_in(2) ? "exp_avg" : "exp_avg_sq";
}

fsdp_status load_state(Rank &rank) {
  const ParamFacts facts = rank.param();
  fsdp_group *const group = rank.group();
  std::fill_n(rank.buffer, buffer_bytes, static_cast<unsigned char>(rank.random.below(64)));
  return fsdp_load_state(group, rank.number(rank.aim.param), state_name(rank), rank.or_null(rank.buffer),
                         rank.exactly(static_cast<int32_t>(1 + rank.random.below(3))), rank.number(facts.element_count),
                         rank.exactly(rank.random.one_in(2) ? FSDP_EVERY_RANK : 0), rank.flags(0));
}

// Reads rows of this rank's chunk, or of another rank's, which are refused unless this rank keeps all rows.
fsdp_status load_chunk(Rank &rank) {
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  fsdp_group *const group = rank.group();
  if (fsdp_get_chunk(group, rank.aim.param, static_cast<uint32_t>(rank.random.below(rank.world_size)), &chunk) !=
      FSDP_OK)
    chunk = {};
  const uint64_t skipped = chunk.row_count ? rank.random.below(chunk.row_count) : 0;
  std::fill_n(rank.buffer, buffer_bytes, static_cast<unsigned char>(rank.random.below(64)));
  return fsdp_load_chunk(group, rank.number(rank.aim.param), rank.or_null(rank.buffer),
                         rank.exactly(static_cast<int32_t>(1 + rank.random.below(3))),
                         rank.number(chunk.row_offset + skipped), rank.number(chunk.row_count - skipped),
                         rank.flags(0));
}

// A call that fills the buffer with a whole tensor.
template <class Call>
fsdp_status read_whole(Rank &rank, Call &&read_it) {
  const ParamFacts facts = rank.param();
  fsdp_group *const group = rank.group();
  const fsdp_dtype dtype = rank.exactly(static_cast<int32_t>(1 + rank.random.below(3)));
  std::fill_n(rank.buffer, buffer_bytes, static_cast<unsigned char>(0xA5));
  const fsdp_status status = read_it(group, rank.number(rank.aim.param), rank.or_null(rank.buffer), dtype,
                                     rank.number(facts.element_count), rank.exactly(FSDP_EVERY_RANK), rank.flags(0));
  const bool refused =
      status != FSDP_OK && status < FSDP_MISMATCH;  // otherwise parts may have arrived before a peer failed
  const uint64_t may_write = refused ? 0 : max_elements * sizeof(float);
  require(std::all_of(rank.buffer + may_write, rank.buffer + buffer_bytes, [](auto byte) { return byte == 0xA5; }),
          "a call that reads wrote what it may not");
  return status;
}

fsdp_status read_state(Rank &rank) {
  const char *const given = state_name(rank);
  return read_whole(rank, [&](fsdp_group *group, uint64_t param, auto... rest) {
    return fsdp_read_state(group, param, given, rest...);
  });
}

fsdp_status get_param(Rank &rank) {
  Output<fsdp_tensor> tensor(rank);
  fsdp_group *const group = rank.group();
  const fsdp_status status =
      tensor(fsdp_get_param(group, rank.number(rank.aim.param), rank.exactly(rank.aim.phase), tensor.pointer()));
  if (status == FSDP_OK && rank.alone && tensor.whole())
    read_all(tensor.value().data, tensor.value().element_count * tensor.value().element_size);
  return status;
}

fsdp_status get_params(Rank &rank) {
  Tensors tensors(rank);
  fsdp_group *const group = rank.group();
  const fsdp_status status = tensors(
      fsdp_get_params(group, rank.exactly(rank.aim.phase), tensors.pointer(), tensors.count(), tensors.stride()));
  for (uint64_t i = 0; status == FSDP_OK && rank.alone && i < tensors.count(); ++i)
    if (const fsdp_tensor view = tensors.at(i); view.data)  // quantized parameters have none
      read_all(view.data, view.element_count * view.element_size);
  return status;
}

fsdp_status get_plane(Rank &rank) {
  Output<fsdp_tensor> tensor(rank);
  fsdp_group *const group = rank.group();
  const fsdp_plane plane = rank.exactly(rank.choice(FSDP_PLANE_COLUMN_SCALE));
  const fsdp_status status =
      tensor(fsdp_get_plane(group, rank.number(rank.aim.param), rank.exactly(rank.aim.phase), plane, tensor.pointer()));
  if (status == FSDP_OK && rank.alone && tensor.whole())
    read_all(tensor.value().data, tensor.value().element_count * tensor.value().element_size);
  return status;
}

fsdp_status swizzle_scales(Rank &rank) {
  std::vector<uint8_t> room(1 << 16);
  uint64_t size = rank.random.below(room.size());
  fsdp_group *const group = rank.group();
  fsdp_param param = FSDP_PARAM_INIT;
  const uint64_t index = find_quantized(rank, group, false, param);
  const fsdp_plane plane =
      rank.exactly(rank.aim.phase == FSDP_BACKWARD ? FSDP_PLANE_COLUMN_SCALE : FSDP_PLANE_ROW_SCALE);
  return fsdp_swizzle_scales(group, rank.number(index), rank.exactly(rank.aim.phase), plane,
                             rank.random.below(2) ? room.data() : nullptr, &size, rank.stream());
}

fsdp_status get_chunk(Rank &rank) {
  Output<fsdp_chunk> chunk(rank);
  return chunk(fsdp_get_chunk(rank.group(), rank.number(rank.aim.param), rank.number32(0), chunk.pointer()));
}

fsdp_status load_grad(Rank &rank) {
  const ParamFacts facts = rank.param();
  fsdp_group *const group = rank.group();
  std::fill_n(rank.buffer, buffer_bytes, static_cast<unsigned char>(rank.random.below(64)));
  return fsdp_load_grad(group, rank.number(rank.aim.param), rank.or_null(rank.buffer),
                        rank.exactly(static_cast<int32_t>(1 + rank.random.below(3))), rank.number(facts.element_count),
                        rank.exactly(rank.random.one_in(2) ? FSDP_EVERY_RANK : 0), rank.flags(0));
}

// Waits if a call that may not wait found that peers have not yet read a buffer.
template <class Call>
fsdp_status wait_if_busy(uint32_t flags, Call &&call) {
  const fsdp_status status = call(flags);
  return status == FSDP_BUSY && flags & FSDP_GRAD_NO_WAIT ? call(flags & ~uint32_t{FSDP_GRAD_NO_WAIT}) : status;
}

fsdp_status acquire_grad(Rank &rank) {
  Output<fsdp_tensor> tensor(rank);
  Output<int32_t> accumulate(rank);
  fsdp_group *const group = rank.group();
  const uint64_t param = rank.number(rank.aim.param);
  const fsdp_status status = tensor(wait_if_busy(rank.flags(FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT), [&](uint32_t flags) {
    return fsdp_acquire_grad(group, param, flags, rank.stream(), tensor.pointer(), accumulate.pointer());
  }));
  if (status == FSDP_OK && rank.alone && tensor.whole())
    std::memset(tensor.value().data, static_cast<int>(rank.random.below(64)),
                tensor.value().element_count * tensor.value().element_size);
  return accumulate(status);
}

fsdp_status acquire_grads(Rank &rank) {
  Tensors tensors(rank);
  int32_t accumulate[8];
  std::fill_n(accumulate, 8, -1);
  fsdp_group *const group = rank.group();
  const fsdp_status status =
      tensors(wait_if_busy(rank.flags(FSDP_GRAD_ZEROED | FSDP_GRAD_NO_WAIT), [&](uint32_t flags) {
        return fsdp_acquire_grads(group, flags, rank.stream(), tensors.pointer(), tensors.count(), tensors.stride(),
                                  rank.or_null(accumulate));
      }));
  const uint64_t written = status == FSDP_OK ? tensors.count() : 0;
  require(std::all_of(accumulate + written, accumulate + 8, [](int32_t value) { return value == -1; }),
          "fsdp_acquire_grads wrote an accumulate that it may not");
  for (uint64_t i = 0; rank.alone && i < written; ++i)
    if (const fsdp_tensor grad = tensors.at(i); grad.data)
      std::memset(grad.data, static_cast<int>(rank.random.below(64)), grad.element_count * grad.element_size);
  return status;
}

fsdp_status put_grad(Rank &rank) {
  const ParamFacts facts = rank.param();
  fsdp_group *const group = rank.group();
  const void *const data = rank.random.one_in(8) ? nullptr : rank.buffer;
  const uint64_t param = rank.number(rank.aim.param), count = rank.number(facts.element_count);
  const fsdp_dtype dtype = rank.exactly(FSDP_FLOAT32);
  return wait_if_busy(rank.flags(FSDP_GRAD_NO_WAIT), [&](uint32_t flags) {
    return fsdp_put_grad(group, param, data, dtype, count, flags, rank.stream());
  });
}

fsdp_status in_phase(Rank &rank, fsdp_status (*call)(fsdp_group *, fsdp_phase, uint32_t, fsdp_stream)) {
  return call(rank.group(), rank.exactly(rank.aim.phase), rank.flags(0), rank.stream());
}

fsdp_status in_piece(Rank &rank, fsdp_status (*call)(fsdp_group *, uint32_t, fsdp_phase, uint32_t, fsdp_stream)) {
  return call(rank.group(), rank.number32(rank.aim.piece), rank.exactly(rank.aim.phase), rank.flags(0), rank.stream());
}

}  // namespace

const std::vector<Case> &group_cases() {
  static const std::vector<Case> cases = {
      {"fsdp_create_group", create_group},
      {"fsdp_load_param", load_param},
      {"fsdp_read_param", [](Rank &rank) { return read_whole(rank, fsdp_read_param); }},
      {"fsdp_load_plane", load_plane},
      {"fsdp_load_state", load_state},
      {"fsdp_read_state", read_state},
      {"fsdp_load_grad", load_grad},
      {"fsdp_read_grad", [](Rank &rank) { return read_whole(rank, fsdp_read_grad); }},
      {"fsdp_load_chunk", load_chunk},
      {"fsdp_set_param_lr_scale",
       [](Rank &rank) {
         fsdp_group *const group = rank.group();
         const uint64_t param = rank.number(rank.aim.param);
         return fsdp_set_param_lr_scale(group, param, rank.real(0.5));
       }},
      {"fsdp_set_param_trainable",
       [](Rank &rank) {
         fsdp_group *const group = rank.group();
         const uint64_t param = rank.number(rank.aim.param);
         const int32_t trainable = rank.exactly(rank.random.one_in(4) ? 0 : 1);
         const fsdp_status status = fsdp_set_param_trainable(group, param, trainable);
         if (status == FSDP_OK) rank.groups.at(group).params.at(param).trained = trainable;
         return status;
       }},
      {"fsdp_get_param", get_param},
      {"fsdp_get_params", get_params},
      {"fsdp_get_plane", get_plane},
      {"fsdp_swizzle_scales", swizzle_scales},
      {"fsdp_get_chunk", get_chunk},
      {"fsdp_prefetch", [](Rank &rank) { return in_phase(rank, fsdp_prefetch); }},
      {"fsdp_unshard", [](Rank &rank) { return in_phase(rank, fsdp_unshard); }},
      {"fsdp_reshard", [](Rank &rank) { return in_phase(rank, fsdp_reshard); }},
      {"fsdp_unshard_piece", [](Rank &rank) { return in_piece(rank, fsdp_unshard_piece); }},
      {"fsdp_reshard_piece", [](Rank &rank) { return in_piece(rank, fsdp_reshard_piece); }},
      {"fsdp_restore_view", [](Rank &rank) { return fsdp_restore_view(rank.group()); }},
      {"fsdp_acquire_grad", acquire_grad},
      {"fsdp_acquire_grads", acquire_grads},
      {"fsdp_put_grad", put_grad},
      {"fsdp_complete_grad",
       [](Rank &rank) {
         fsdp_group *const group = rank.group();
         return fsdp_complete_grad(group, rank.number(rank.aim.param), rank.flags(0), rank.stream());
       }},
      {"fsdp_reduce_grad",
       [](Rank &rank) { return fsdp_reduce_grad(rank.group(), rank.number32(rank.aim.flags), rank.stream()); }},
  };
  return cases;
}

}  // namespace fuzz
