// SPDX-License-Identifier: Apache-2.0
// Whole main gradients, read and loaded in the update window.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "element.h"
#include "every_setup.h"

using namespace harness;

namespace {

constexpr auto grad_modes = {0u, FSDP_CONTEXT_DEBUG + 0u};

bool is_trained(const ParamDef &param) { return !(param.flags & FSDP_PARAM_FROZEN); }

void for_each_param(const Rank &rank, const std::function<void(size_t, size_t, const ParamDef &)> &use) {
  for (size_t g = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) use(g, p, rank.def(g).params[p]);
}

std::vector<float> read_grad(const Rank &rank, size_t g, size_t p) {
  std::vector<float> data(rank.def(g).params[p].count(), -7);
  FSDP(fsdp_read_grad(rank.groups[g], p, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
  return data;
}

std::vector<std::vector<float>> read_grads(const Rank &rank) {
  std::vector<std::vector<float>> all;
  for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
    all.push_back(is_trained(param) ? read_grad(rank, g, p) : std::vector<float>(param.count()));
  });
  return all;
}

float loaded(uint32_t ordinal, uint64_t element) {
  return static_cast<float>(static_cast<int>((element * 37 + ordinal * 11) % 257) - 128) / 64;
}

std::vector<float> values_to_load(const ParamDef &param, uint32_t ordinal) {
  std::vector<float> values(param.count());
  for (uint64_t i = 0; i < values.size(); ++i) values[i] = loaded(ordinal, i);
  return values;
}

void load_all(Rank &rank, int32_t root) {
  for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
    if (!is_trained(param)) return;
    const std::vector<float> values = values_to_load(param, rank.setup.ordinal(g, p));
    const bool gives = root == FSDP_EVERY_RANK || static_cast<uint32_t>(root) == rank.rank;
    FSDP(fsdp_load_grad(rank.groups[g], p, gives ? values.data() : nullptr, FSDP_FLOAT32, values.size(), root, 0));
  });
}

void mix_up(Scenario &setup) {
  setup.groups[0].params[0].shape = {300, 220};  // more than one chunk of the staging memory
  setup.groups[1].params[1].flags |= FSDP_PARAM_FROZEN;
  setup.groups[2].params[0].dtype = FSDP_BFLOAT16;
}

// The scaled sum of all ranks' contributions, on every rank or on the root.
TEST(WholeGrads, AreReadAsTheOptimizerSeesThem) {
  for_every_setup(5, grad_modes, [](Scenario setup) {
    mix_up(setup);
    setup.steps = 1;
    setup.scale = 0.625;
    const Outcome expected = reference(setup);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      finish_step(rank, 0);
      REQUIRE(same_bits(read_grads(rank), expected.grads));
      const auto root = static_cast<int32_t>(setup.ranks - 1);
      for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
        if (!is_trained(param)) return;
        const bool reads = static_cast<int32_t>(r) == root;
        std::vector<float> data(param.count());
        FSDP(fsdp_read_grad(rank.groups[g], p, reads ? data.data() : nullptr, FSDP_FLOAT32, data.size(), root, 0));
        if (reads) REQUIRE(same_bits({data}, {expected.grads[rank.setup.ordinal(g, p)]}));
      });
      // They have not changed for it.
      update(rank);
      REQUIRE(same_bits(rank.read_all(), expected.weights));
      FSDP(fsdp_close_context(context));
    });
  });
}

TEST(WholeGrads, AreConvertedToTheRequestedDtype) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = scenario_of(strategy, 2);
    setup.steps = 1;
    const auto expected = reference(setup).grads;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      finish_step(rank, 0);
      for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16})
        for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
          std::vector<uint16_t> bits(param.count());
          FSDP(fsdp_read_grad(rank.groups[g], p, bits.data(), dtype, bits.size(), FSDP_EVERY_RANK, 0));
          std::vector<float> wanted = expected[rank.setup.ordinal(g, p)];
          for (float &value : wanted) value = round_to(value, dtype);
          REQUIRE(same_bits({load_elements(bits.data(), dtype, bits.size())}, {wanted}));
          // And back.
          FSDP(fsdp_load_grad(rank.groups[g], p, bits.data(), dtype, bits.size(), FSDP_EVERY_RANK, 0));
          REQUIRE(same_bits({read_grad(rank, g, p)}, {wanted}));
          FSDP(fsdp_load_grad(rank.groups[g], p, expected[rank.setup.ordinal(g, p)].data(), FSDP_FLOAT32, bits.size(),
                              FSDP_EVERY_RANK, 0));
        });
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// A step that is given the same gradients in the usual way, without the library.
std::vector<std::vector<float>> weights_after(const Scenario &setup) {
  std::vector<std::vector<float>> weights;
  uint32_t ordinal = 0;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      std::vector<float> &values = weights.emplace_back(param.count());
      const auto lr = static_cast<float>(0.01 * (param.lr_scale != 0 ? param.lr_scale : 1));
      const float decay = param.flags & FSDP_PARAM_NO_DECAY ? 0 : lr * static_cast<float>(setup.weight_decay);
      for (uint64_t i = 0; i < values.size(); ++i) {
        const float weight = initial_weight(ordinal, i), g = loaded(ordinal, i);
        const float m = static_cast<float>(1 - 0.9) * g, v = static_cast<float>(1 - 0.999) * g * g;
        const float step =
            lr * (m / static_cast<float>(1 - 0.9)) / (std::sqrt(v / static_cast<float>(1 - 0.999)) + 1e-8f);
        values[i] = is_trained(param) ? weight - decay * weight - step : weight;
      }
      ++ordinal;
    }
  return weights;
}

// Loaded by all ranks, and by each rank as the root: shards show it, norms measure it, AdamW uses it, and replicas
// agree.
TEST(WholeGrads, LoadedOnesAreUsedByTheStep) {
  unsigned number = 0;
  for_every_setup(5, grad_modes, [&](Scenario setup) {
    mix_up(setup);
    const auto expected = weights_after(setup);
    const auto root = static_cast<int32_t>(number++ % (setup.ranks + 1)) - 1;  // FSDP_EVERY_RANK is -1
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      finish_step(rank, 0);
      load_all(rank, root);
      double squares = 0;
      uint64_t seen = 0;
      for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
        if (!is_trained(param)) return;
        const std::vector<float> wanted = values_to_load(param, rank.setup.ordinal(g, p));
        REQUIRE(same_bits({read_grad(rank, g, p)}, {wanted}));
        for (const float value : wanted) squares += double(value) * value;
        for (const fsdp_shard &shard : rank.shards()) {
          if (shard.group != rank.groups[g] || shard.param_index != p) continue;
          for (uint64_t i = 0; i < shard.element_count; ++i)
            REQUIRE(main_grad(shard)[i] == wanted[shard.element_offset + i]);
          seen += shard.element_count;
        }
      });
      REQUIRE(seen > 0);
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
      REQUIRE(std::abs(norm - std::sqrt(squares)) < 1e-10 * norm);
      update(rank);
      FSDP(fsdp_check_replicas(rank.model, 0, nullptr));
      const auto weights = rank.read_all();
      for (size_t p = 0; p < weights.size(); ++p)
        for (size_t i = 0; i < weights[p].size(); ++i) REQUIRE(std::abs(weights[p][i] - expected[p][i]) <= 2e-7f);
      FSDP(fsdp_close_context(context));
    });
  });
}

// A clip after it is of what was loaded, and a factor of finish_grads of what was there before.
TEST(WholeGrads, LoadedOnesAreClipped) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    std::vector<float> values(rank.def(0).params[0].count(), 0);
    for_each_param(rank, [&](size_t g, size_t p, const ParamDef &param) {
      values.assign(param.count(), g == 0 ? 2 : 0);
      FSDP(fsdp_load_grad(rank.groups[g], p, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    });
    double norm = 0;
    FSDP(fsdp_clip_grads(rank.model, nullptr, 1, nullptr, &norm));
    REQUIRE(std::abs(norm - 2 * std::sqrt(37.0 * 24)) < 1e-9);
    const auto factor = static_cast<float>(1 / norm);
    REQUIRE(read_grad(rank, 0, 0) == std::vector<float>(37 * 24, 2 * factor));
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(WholeGrads, ExistOnlyInTheWindowOfAStep) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  setup.groups[1].params[1].flags |= FSDP_PARAM_FROZEN;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    std::vector<float> data(37 * 24, 1);
    const auto expect = [&](const std::string &why) {
      require_error(fsdp_read_grad(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0),
                    FSDP_INVALID_STATE, {"fsdp_read_grad: ", why});
      require_error(fsdp_load_grad(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0),
                    FSDP_INVALID_STATE, {"fsdp_load_grad: ", why});
    };
    expect("there are no gradients in this update window");
    rank.load();
    expect("the update window is closed");
    FSDP(fsdp_begin_update(rank.model, nullptr));
    expect("there are no gradients in this update window");
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    finish_step(rank, 0);
    for (const fsdp_status status :
         {fsdp_read_grad(rank.groups[1], 1, data.data(), FSDP_FLOAT32, 24, FSDP_EVERY_RANK, 0),
          fsdp_load_grad(rank.groups[1], 1, data.data(), FSDP_FLOAT32, 24, FSDP_EVERY_RANK, 0)})
      require_error(status, FSDP_INVALID_STATE, {"parameter 'l0.bias' of group 'layer.0' is FROZEN"});
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    expect("the update window is closed");
    FSDP(fsdp_close_context(context));
  });
}

TEST(WholeGrads, RefuseTheArgumentsThatWeightsRefuse) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    const auto before = read_grads(rank);
    std::vector<float> data(37 * 24, 1);
    fsdp_group *const group = rank.groups[0];
    const auto read = [&](uint64_t index, void *to, fsdp_dtype dtype, uint64_t count, int32_t root, uint32_t flags) {
      return fsdp_read_grad(group, index, to, dtype, count, root, flags);
    };
    const auto load = [&](uint64_t index, void *to, fsdp_dtype dtype, uint64_t count, int32_t root, uint32_t flags) {
      return fsdp_load_grad(group, index, to, dtype, count, root, flags);
    };
    const uint64_t count = data.size();
    const auto check_both = [&](const auto &call) {
      require_error(call(7, data.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0u), FSDP_INVALID_ARGUMENT,
                    {"param_index 7 is outside [0, 1)"});
      require_error(call(0, data.data(), 77, count, FSDP_EVERY_RANK, 0u), FSDP_INVALID_ARGUMENT,
                    {"77 is not a dtype of the gradient of embed.w of group 'embed'"});
      require_error(call(0, data.data(), FSDP_FLOAT32, count - 1, FSDP_EVERY_RANK, 0u), FSDP_INVALID_ARGUMENT,
                    {"'embed.w'", "has 888 elements, element_count is 887"});
      require_error(call(0, data.data(), FSDP_FLOAT32, count, 5, 0u), FSDP_INVALID_ARGUMENT, {"root 5"});
      require_error(call(0, nullptr, FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0u), FSDP_INVALID_ARGUMENT,
                    {"data is NULL for parameter 'embed.w'"});
      require_error(call(0, data.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 1u), FSDP_INVALID_ARGUMENT, {"flags"});
    };
    check_both(read);
    check_both(load);
    REQUIRE(same_bits(read_grads(rank), before));
    // Ranks that name different parameters, or one a weight and one a gradient.
    const fsdp_status status = r ? load(0, data.data(), FSDP_FLOAT32, count, 0, 0u)
                                 : fsdp_load_param(group, 0, data.data(), FSDP_FLOAT32, count, 0, 0);
    require_error(status, FSDP_MISMATCH,
                  {"fsdp_load_param from rank 0 of embed.w", "fsdp_load_grad from rank 0 of the gradient of embed"});
  });
}

}  // namespace
