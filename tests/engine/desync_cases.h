// SPDX-License-Identifier: Apache-2.0
// Ranks that call different things: what most do, what one does, and what every rank's message says. Run on one host
// by desync_test.cpp and on several by tests/network.
#pragma once

#include <algorithm>
#include <memory>
#include <ostream>
#include <vector>

#include "harness.h"

namespace desync {

using namespace harness;

using Body = std::function<void(Rank &)>;

struct Case {
  const char *name;
  Body usual, odd;                  // what most ranks do, and what one does; both end in a call that fails
  std::vector<const char *> words;  // in the message of every rank
  // MISMATCH, or INVALID_STATE where the step can be discarded by all: its message lists what each rank misses.
  std::vector<fsdp_status> statuses = {FSDP_MISMATCH};
};

inline void PrintTo(const Case &of, std::ostream *out) { *out << of.name; }

inline constexpr size_t embed = 0, layer0 = 1, layer1 = 2, head = 3;

inline Body reduce(std::vector<size_t> groups, uint32_t flags = FSDP_LAST) {
  return [=](Rank &rank) {
    for (const size_t g : groups) {
      put_all(rank, g, 1.0f);
      FSDP(fsdp_reduce_grad(rank.groups[g], flags, nullptr));
    }
  };
}
template <class... Bodies>
Body then(Bodies... bodies) {
  return [=](Rank &rank) { (bodies(rank), ...); };
}

inline void finish(Rank &rank) { FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr)); }
inline void finish_twice_as_large(Rank &rank) { FSDP(fsdp_finish_grads(rank.model, 2, 0, nullptr)); }
inline void publish(Rank &rank) { FSDP(fsdp_publish_weights(rank.model, nullptr)); }
inline void begin_update(Rank &rank) { FSDP(fsdp_begin_update(rank.model, nullptr)); }
inline void step(Rank &rank) { FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr)); }
inline void step_faster(Rank &rank) { FSDP(fsdp_step_adamw(rank.model, 0.2, nullptr, nullptr)); }
inline void close(Rank &rank) { FSDP(fsdp_close_context(rank.context)); }
inline void open_window(Rank &rank) { finish_step(rank, 0); }
inline void norm(Rank &rank) {
  double norm = 0;
  FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
}
inline void param_norms(Rank &rank) {
  std::vector<double> norms(10);
  FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, norms.data(), norms.size()));
}
inline void weight_norms(Rank &rank) {
  std::vector<double> norms(10);
  FSDP(fsdp_get_param_weight_norms(rank.model, nullptr, norms.data(), norms.size()));
}
inline void zeros(Rank &rank) {
  uint64_t count = 0;
  FSDP(fsdp_count_zero_grads(rank.model, nullptr, &count));
}
inline void clip(Rank &rank, double max_norm) {
  FSDP(fsdp_clip_grads(rank.model, nullptr, max_norm, nullptr, nullptr));
}
inline Body clip_to(double max_norm) {
  return [=](Rank &rank) { clip(rank, max_norm); };
}
inline Body scale_by(double factor) {
  return [=](Rank &rank) { FSDP(fsdp_scale_grads(rank.model, factor, nullptr)); };
}
// A step with one option set.
template <class Field, class Value>
inline Body step_with(Field field, Value value) {
  return [=](Rank &rank) {
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.*field = static_cast<std::remove_reference_t<decltype(options.*field)>>(value);
    FSDP(fsdp_step_adamw(rank.model, 0.1, &options, nullptr));
  };
}
inline Body values(uint64_t count, fsdp_value_op op = FSDP_VALUE_SUM) {
  return [=](Rank &rank) {
    double values[4] = {};
    FSDP(fsdp_all_reduce_values(rank.context, nullptr, values, count, op));
  };
}
inline void read_first(Rank &rank) { rank.read(embed, 0); }
inline void read_last(Rank &rank) { rank.read(head, 1); }
inline Body load(int32_t root, fsdp_dtype dtype = FSDP_FLOAT32) {
  return [=](Rank &rank) {
    const std::vector<float> data(rank.def(embed).params[0].count());
    FSDP(fsdp_load_param(rank.groups[embed], 0, data.data(), dtype, data.size(), root, 0));
  };
}
// The mesh has another rank that this rank may never have heard of: of ranks 0 to 3 on two hosts, one of the other
// host.
inline fsdp_mesh *mesh_of_two(Rank &rank) {
  const uint32_t other = rank.rank >= 2 ? rank.rank - 2 : rank.rank ^ 1;
  const uint32_t ranks[] = {std::min(rank.rank, other), std::max(rank.rank, other)};
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.ranks = ranks;
  options.rank_count = 2;
  fsdp_mesh *mesh = nullptr;
  FSDP(fsdp_create_mesh(rank.context, &options, &mesh));
  return mesh;
}
// Seals another model. It lives until the thread ends, since destroying it would replace the message of the seal.
inline Body seal(const char *group, fsdp_dtype dtype, fsdp_schedule_kind schedule, const char *second = nullptr,
                 bool with_one_other = false) {
  return [=](Rank &rank) {
    static thread_local std::unique_ptr<fsdp_model, decltype(&fsdp_destroy_model)> model(nullptr, fsdp_destroy_model);
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    const std::unique_ptr<fsdp_mesh, decltype(&fsdp_destroy_mesh)> mesh(with_one_other ? mesh_of_two(rank) : nullptr,
                                                                        fsdp_destroy_mesh);
    options.mesh = mesh.get();
    fsdp_model *made = nullptr;
    FSDP(fsdp_create_model(rank.context, &options, &made));
    model.reset(made);
    for (const char *name : {group, second}) {
      if (!name) continue;
      const uint64_t shape[] = {8, 4};
      fsdp_param param = FSDP_PARAM_INIT;
      param.name = name;
      param.shape = shape;
      param.dimension_count = 2;
      param.dtype = dtype;
      fsdp_group *handle = nullptr;
      FSDP(fsdp_create_group(made, name, &param, 1, sizeof param, nullptr, &handle));
    }
    FSDP(fsdp_set_schedule(made, schedule, nullptr));
    FSDP(fsdp_seal_model(made));
  };
}
inline const Body seal_alpha = seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL);
inline const Body seal_with_one_other = seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL, nullptr, true);
inline Body apply_with(double max_norm, bool asks_norm, double beta2 = 0) {
  return [=](Rank &rank) {
    std::vector<fsdp_grad> grads;
    for (const GroupDef &def : rank.setup.groups)
      for (const ParamDef &param : def.params) grads.push_back({nullptr, param.count(), FSDP_FLOAT32, 0});
    fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
    options.beta2 = beta2;
    double norm = 0;
    FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.1, max_norm, &options, nullptr,
                          asks_norm ? &norm : nullptr));
  };
}
inline void apply(Rank &rank) { apply_with(0, false)(rank); }

inline const Body all = reduce({head, layer1, layer0, embed});
inline const std::vector<fsdp_status> discardable = {FSDP_MISMATCH, FSDP_INVALID_STATE};

inline const Case cases[] = {
    // Reduces: the n-th of each rank is compared with the n-th of the others.
    {"AnotherGroup",
     then(reduce({head, layer1}), finish),
     then(reduce({head, layer0}), finish),
     {"'layer.1'", "'layer.0'"}},
    {"AnotherOrder",
     then(reduce({head, layer1}), finish),
     then(reduce({layer1, head}), finish),
     {"'layer.1'", "'head'"}},
    {"AReduceLeftOut", then(all, finish), then(reduce({head, layer0, embed}), finish), {"'layer.1'", "'layer.0'"}},
    {"AReduceTooMany", then(all, finish), then(reduce({head}, 0), all, finish), {"'layer.1'", "'head'"}},
    {"AnotherMicrobatch",
     then(reduce({head, layer1, layer0, embed}, 0), all, finish),
     then(all, finish),
     {"fsdp_finish_grads", "reduce_scatter of 'head'"},
     discardable},
    {"TheLastReduceLeftOut",
     then(all, finish),
     then(reduce({head, layer1, layer0}), finish),
     {"fsdp_finish_grads", "'embed'"},
     discardable},
    {"NoReduceAtAll", then(all, finish), finish, {"fsdp_finish_grads", "'head'"}, discardable},
    // A stream waits for a reduce that a rank never starts, because its caller waits in another call for this rank.
    {"AReduceAndValues",
     then(all, finish),
     then(reduce({head}), values(1)),
     {"reduce_scatter of 'layer.1'", "fsdp_all_reduce_values"}},
    {"TheFirstReduceAndValues", then(all, finish), values(1), {"reduce_scatter of 'head'", "fsdp_all_reduce_values"}},
    {"TheLastReduceAndValues",
     then(all, finish),
     then(reduce({head, layer1, layer0}), values(1)),
     {"fsdp_finish_grads", "reduce_scatter of 'embed'", "fsdp_all_reduce_values"}},
    {"AReduceAndRead",
     then(all, finish),
     then(reduce({head}), read_first),
     {"reduce_scatter of 'layer.1'", "fsdp_read_param"}},
    {"AReduceAndSeal",
     then(all, finish),
     then(reduce({head}), seal_alpha),
     {"reduce_scatter of 'layer.1'", "fsdp_seal_model"}},
    {"AReduceAndBeginUpdate",
     then(all, finish),
     then(reduce({head}), begin_update),
     {"'layer.1'", "fsdp_begin_update"},
     discardable},
    {"AReduceOfTheSecondStep",
     then(all, finish, step, all, finish),
     then(all, finish, step, reduce({head}), values(1)),
     {"reduce_scatter of 'layer.1'", "fsdp_all_reduce_values"}},
    {"ApplyAndValues", apply, values(1), {"fsdp_apply_grads", "reduce_scatter of 'head'", "fsdp_all_reduce_values"}},
    {"ApplyAndBeginUpdate", apply, begin_update, {"'head'", "fsdp_begin_update"}, discardable},
    {"ApplyAndAnotherOrder", apply, then(reduce({head, layer0, layer1, embed}), finish), {"'layer.1'", "'layer.0'"}},
    // The end of a step: its meeting says which rank made which call.
    {"FinishAndBeginUpdate", then(all, finish), begin_update, {"fsdp_finish_grads", "fsdp_begin_update"}, discardable},
    {"AnotherScale", then(all, finish), then(all, finish_twice_as_large), {"gave scale", "2"}},
    {"AnotherRate", then(open_window, step), then(open_window, step_faster), {"gave lr", "0.1", "0.2"}},
    {"StepAndPublish",
     then(open_window, step),
     then(open_window, publish),
     {"fsdp_step_adamw", "fsdp_publish_weights"}},
    {"StepAndNorm", then(open_window, step), then(open_window, norm), {"the end of a step", "the gradient norm"}},
    {"NormAndParamNorms",
     then(open_window, norm),
     then(open_window, param_norms),
     {"the gradient norm", "norms of gradients"}},
    {"ParamNormsAndWeightNorms",
     then(open_window, param_norms),
     then(open_window, weight_norms),
     {"norms of gradients", "norms of weights"}},
    {"ParamNormsAndZeros",
     then(open_window, param_norms),
     then(open_window, zeros),
     {"norms of gradients", "zeros of gradients"}},
    {"WeightNormsAndBeginUpdate", weight_norms, begin_update, {"norms of weights", "the end of a step"}},
    {"StepAndClose", then(open_window, step), then(open_window, close), {"fsdp_step_adamw", "fsdp_close_context"}},
    {"FinishAndSeal", then(all, finish), then(all, seal_alpha), {"fsdp_finish_grads", "fsdp_seal_model"}},
    {"FinishAndClose", begin_update, close, {"fsdp_begin_update", "fsdp_close_context"}},
    // Values and parameters.
    {"AnotherCountOfValues", values(1), values(2), {"reduces 1 ", "2 "}},
    {"AnotherOpOnValues", values(1), values(1, FSDP_VALUE_MAX), {"op 1", "op 3"}},
    {"ValuesAndClose", values(1), close, {"fsdp_all_reduce_values", "fsdp_close_context"}},
    {"ValuesAndSealWithOneOther", values(1), seal_with_one_other, {"fsdp_all_reduce_values", "fsdp_seal_model"}},
    {"LoadOfAnotherRoot",
     then(begin_update, load(0)),
     then(begin_update, load(1)),
     {"fsdp_load_param from rank 0", "from rank 1"}},
    {"LoadOfAnotherDtype",
     then(begin_update, load(0)),
     then(begin_update, load(0, FSDP_BFLOAT16)),
     {"float32", "bfloat16"}},
    {"LoadAndRead",
     then(begin_update, load(0)),
     then(begin_update, read_first),
     {"fsdp_load_param", "fsdp_read_param"}},
    {"ReadOfAnotherParameter", read_first, read_last, {"of embed.w", "of head.norm"}},
    // These cases differ in declarations, which the seal compares.
    {"AnotherGroupName", seal_alpha, seal("beta", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL), {"alpha", "beta"}},
    {"AnotherDtype", seal_alpha, seal("alpha", FSDP_BFLOAT16, FSDP_SCHEDULE_SEQUENTIAL), {"float32", "bfloat16"}},
    {"AnotherSchedule", seal_alpha, seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_INTERLEAVED), {"schedule"}},
    {"AGroupTooMany", seal_alpha, seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL, "beta"), {"group"}},
    {"SealAndRead", seal_alpha, read_first, {"fsdp_seal_model", "fsdp_read_param"}},
};

// Numbers that every rank passes and computes with separately.
inline const Case number_cases[] = {
    {"AnotherBeta1",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::beta1, 0.8)),
     {"gave beta1", "0.8", "0.9"}},
    {"AnotherBeta2",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::beta2, 0.95)),
     {"beta2", "0.95", "0.999"}},
    {"AnotherEpsilon",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::epsilon, 1e-6)),
     {"epsilon", "1e-06", "1e-08"}},
    {"AnotherDecay",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::weight_decay, 0.25)),
     {"weight_decay", "0.25", "0"}},
    {"AnotherStepNumber",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::step, 7)),
     {"step", "7", "1"}},
    {"NoFirstMoment",
     then(open_window, step),
     then(open_window, step_with(&fsdp_adamw_options::flags, FSDP_ADAMW_BETA1_ZERO)),
     {"beta1", "0.9", "0"}},
    {"AnotherMaxNorm",
     then(open_window, clip_to(0.5), step),
     then(open_window, clip_to(0.25), step),
     {"max_norm", "0.5", "0.25"}},
    {"ClipAndNorm",
     then(open_window, clip_to(0.5), step),
     then(open_window, norm, step),
     {"max_norm 0.5", "norm alone"}},
    {"ApplyWithAnotherMaxNorm", apply_with(0.5, false), apply_with(0.25, false), {"max_norm", "0.5", "0.25"}},
    {"ApplyWithoutMaxNorm", apply_with(0.5, false), apply_with(0, true), {"max_norm", "0.5", "0"}},
    {"ApplyWithoutTheNorm",
     apply_with(0, true),
     apply_with(0, false),
     {"asked fsdp_apply_grads for the norm", "did not"}},
    {"ApplyWithAnotherBeta2", apply, apply_with(0, false, 0.95), {"beta2", "0.95", "0.999"}},
    {"AnotherFactor",
     then(open_window, scale_by(0.5), step),
     then(open_window, scale_by(0.25), step),
     {"fsdp_scale_grads by 0.5", "fsdp_scale_grads by 0.25"}},
    {"AScalingLeftOut",
     then(open_window, scale_by(0.5), scale_by(3), publish),
     then(open_window, scale_by(0.5), publish),
     {"number 2", "fsdp_scale_grads by 3", "none"}},
    {"AnotherOrderOfScalings",
     then(open_window, scale_by(0.5), clip_to(2), step),
     then(open_window, clip_to(2), scale_by(0.5), step),
     {"rank 0", "fsdp_scale_grads", "fsdp_clip_grads"}},
    {"AnotherOfManyScalings",
     then(open_window, scale_by(2), scale_by(3), scale_by(4), scale_by(5), step),
     then(open_window, scale_by(2), scale_by(3), scale_by(4), scale_by(6), step),
     {"differ after the first 3", "made 4"}},
};

}  // namespace desync
