// SPDX-License-Identifier: Apache-2.0
// Reports about quantized parameters: weights that are not finite, granules that were enlarged, bytes by plane.
#include <cmath>
#include <mutex>

#include "device.h"
#include "misuse.h"

using namespace harness;

namespace {

struct Log {
  std::mutex mutex;
  std::vector<std::pair<fsdp_log_level, std::string>> lines;
  static void hook(void *data, fsdp_log_level level, const char *line) {
    auto *const log = static_cast<Log *>(data);
    const std::lock_guard lock(log->mutex);
    log->lines.emplace_back(level, line);
  }
  std::vector<std::string> take(fsdp_log_level level, const std::string &word) {
    const std::lock_guard lock(mutex);
    std::vector<std::string> found;
    for (const auto &[of, line] : lines)
      if (of == level && line.find(word) != std::string::npos) found.push_back(line);
    std::sort(found.begin(), found.end());
    lines.clear();
    return found;
  }
};

ParamDef quantized_param(const char *name, std::vector<uint64_t> shape, fsdp_quantization quantization) {
  ParamDef param{name, std::move(shape)};
  param.quantization = quantization;
  return param;
}

Scenario three_kinds(uint32_t ranks, Log &log) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_COPIED);
  setup.groups = {{"g",
                   {quantized_param("mx", {64, 96}, FSDP_QUANTIZE_MXFP8),
                    quantized_param("fp8", {40, 8}, FSDP_QUANTIZE_FP8),
                    quantized_param("block", {256, 200}, FSDP_QUANTIZE_FP8_BLOCK),
                    {"plain", {8, 8}}}}};
  setup.context.log = Log::hook;
  setup.context.log_data = &log;
  setup.context.log_level = FSDP_LOG_INFO;
  return setup;
}

void load(Rank &rank, uint64_t param, uint64_t count, const std::vector<std::pair<size_t, float>> &odd) {
  std::vector<float> values(count, 0.5F);
  for (const auto &[at, value] : odd) values[at] = value;
  FSDP(fsdp_load_param(rank.groups[0], param, values.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
}

enum class Values { finite, not_finite };

void load_all(Rank &rank, Values values) {
  const bool spoilt = values == Values::not_finite;
  using Odd = std::vector<std::pair<size_t, float>>;
  load(rank, 0, 64 * 96, spoilt ? Odd{{5 * 96 + 40, NAN}, {6 * 96, -INFINITY}, {6 * 96 + 1, NAN}} : Odd{});
  load(rank, 1, 320, spoilt ? Odd{{319, -INFINITY}} : Odd{});
  load(rank, 2, 256 * 200,
       spoilt ? Odd{{130 * 200 + 199, NAN}, {131 * 200, INFINITY}, {131 * 200 + 1, INFINITY}} : Odd{});
  load(rank, 3, 64, spoilt ? Odd{{0, NAN}} : Odd{});
}

// On a device the warning comes when the window opens.
void publish(Rank &rank, fsdp_context *context) {
  FSDP(fsdp_publish_weights(rank.model, stream()));
  FSDP(fsdp_wait_stream(context, stream(), 0));
  FSDP(fsdp_begin_update(rank.model, stream()));
}

// Rank 0 has the first rows, rank 1 the others. No rank warns of parameters that are not sharded or not quantized.
TEST(PlaneReport, WeightsThatAreNotFiniteAreNamedOncePerVersion) {
  Log log;
  const Scenario setup = three_kinds(2, log);
  const auto warnings = [&] { return log.take(FSDP_LOG_WARNING, "Inf or NaN"); };
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    load_all(rank, Values::not_finite);
    publish(rank, context);
    publish(rank, context);
    load_all(rank, Values::finite);
    publish(rank, context);
  });
  std::vector<std::string> expected;
  for (const char *version : {"1", "2"}) {
    const std::string of = std::string("version ") + version + ": parameter '";
    expected.push_back("rank 0: " + of +
                       "mx' of group 'g': main weights are Inf or NaN, so 2 of 96 ROW scales are NaN");
    expected.push_back("rank 1: " + of + "block' of group 'g': 3 main weights are Inf or NaN");
    expected.push_back("rank 1: " + of +
                       "fp8' of group 'g': main weights are Inf or NaN, so no scale can be computed and 1 is used");
  }
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(warnings(), expected);
}

TEST(PlaneReport, OnTheHostThePublishCallLogsTheWarning) {
  if (on_gpu()) GTEST_SKIP() << "on a GPU a later call logs the warning";
  Log log;
  const Scenario setup = three_kinds(1, log);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    load_all(rank, Values::not_finite);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    EXPECT_EQ(log.take(FSDP_LOG_WARNING, "version 1").size(), 3u);
  });
}

// The fp32 weights are finite, but they overflow when they are cast to bf16.
TEST(PlaneReport, WeightsTooLargeForBf16AreTold) {
  Log log;
  Scenario setup = three_kinds(1, log);
  setup.model.quantize_from = FSDP_BFLOAT16;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    load(rank, 0, 64 * 96, {{5 * 96 + 40, 3.4e38F}});
    load(rank, 1, 320, {{319, 3.4e38F}});
    publish(rank, context);
  });
  EXPECT_EQ(log.take(FSDP_LOG_WARNING, "main weights, as bf16, are Inf or NaN").size(), 2u);
}

TEST(PlaneReport, RaisedGranulesAreTold) {
  Log log;
  Scenario setup = three_kinds(1, log);
  setup.groups[0].params.push_back(quantized_param("stack", {2, 32, 32}, FSDP_QUANTIZE_MXFP8));
  setup.groups[0].params.push_back(quantized_param("asked", {64, 32}, FSDP_QUANTIZE_MXFP8));
  setup.groups[0].params.back().granule = FSDP_GRANULE_BLOCK;
  setup.groups[0].params.back().granule_rows = 32;
  run_threads(setup, [&](uint32_t, fsdp_context *context) { Rank rank(context, setup); });
  EXPECT_EQ(log.take(FSDP_LOG_INFO, "granule"),
            (std::vector<std::string>{
                "parameter 'block' of group 'g': its granule is 128 rows, not 1: fp8_block keeps them together",
                "parameter 'mx' of group 'g': its granule is 32 rows, not 1: mxfp8 keeps them together"}));
}

// 64 x 96 of MXFP8 is 6,336 bytes of a form, and 32 x 32 fp32 beside it 4,096.
TEST(PlaneReport, BytesAreCountedByPlane) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.groups = {{"g", {quantized_param("w", {64, 96}, FSDP_QUANTIZE_MXFP8), {"plain", {32, 32}}}}};
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.steps = 1;
  const auto expect = [&](uint64_t row, uint64_t column, uint64_t all) {
    const fsdp_stats stats = train_threads(setup)[1].stats;
    EXPECT_EQ(stats.gathered_row_bytes, row);
    EXPECT_EQ(stats.gathered_column_bytes, column);
    EXPECT_EQ(stats.gathered_bytes, all);
  };
  expect(6336, 6336, 2 * (6336 + 4096));
  setup.model.plane_policy = FSDP_PLANES_BOTH;
  expect(2 * 6336, 2 * 6336, 2 * (2 * 6336 + 4096));
  setup.model.plane_policy = 0;
  // Two pieces of one launch are counted together.
  setup.groups[0].params.push_back(quantized_param("v", {64, 96}, FSDP_QUANTIZE_MXFP8));
  setup.groups[0].params.back().piece = 1;
  expect(2 * 6336, 2 * 6336, 2 * (2 * 6336 + 4096));
  setup.groups[0].params.pop_back();
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8_BLOCK;
  constexpr uint64_t padded = 2 * (128 * 96 + 4);  // a granule of 128 rows, and its scale, on each rank
  expect(2 * padded, 0, 2 * (padded + 4096));
}

}  // namespace
