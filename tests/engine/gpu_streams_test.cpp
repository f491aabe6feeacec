// SPDX-License-Identifier: Apache-2.0
// The caller's streams over simulated GPUs: streams wait for each other only if the library has a reason to order them.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "device.h"
#include "graph.h"

using namespace harness;

namespace {

constexpr size_t groups = 6;

Scenario streams_scenario(uint32_t ranks) {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
  setup.groups.clear();
  for (size_t g = 0; g < groups; ++g) {
    const std::string name = "layer." + std::to_string(g);
    setup.groups.push_back({name, {{name + ".w", {64, 32}}, {name + ".v", {64}}}});
  }
  setup.set_dtype(FSDP_BFLOAT16);
  setup.model.grad_dtype = FSDP_FLOAT32;
  setup.model.max_pending_groups = groups;
  setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

void write(Rank &rank, size_t g, size_t p, cudaStream_t stream, float value, std::atomic<int> &written) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream, &grad, &accumulate));
  CUDA(simulated::enqueue(stream, [=, &written, to = static_cast<float *>(grad.data), count = grad.element_count] {
    for (uint64_t i = 0; i < count; ++i) to[i] = (accumulate ? to[i] : 0.0f) + value;
    ++written;
  }));
}

// Waits until `wanted` kernels have run, or for `seconds`.
bool await(const std::atomic<int> &count, int wanted, double seconds) {
  const double start = now();
  while (count < wanted && now() - start < seconds) pause_ms(1);
  return count >= wanted;
}

void expect_sums(Rank &rank, float first, float second) {
  uint64_t count = 0;
  FSDP(fsdp_get_shard_count(rank.model, &count));
  EXPECT_GT(count, 0u);
  for (uint64_t i = 0; i < count; ++i) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    FSDP(fsdp_get_shard(rank.model, i, &shard));
    std::vector<float> seen(shard.element_count);
    std::memcpy(seen.data(), shard.main_grad, seen.size() * sizeof(float));  // simulated memory is the host's
    for (const float sum : seen) ASSERT_EQ(sum, shard.param_index == 0 ? first : second) << shard.name;
  }
}

// The gradients of every group come from two streams, of which the first is held up: the reduces alone wait for it.
void expect_apart(Scenario setup, bool slow_first) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Stream slow, quick;
    std::atomic<bool> go{false};
    std::atomic<int> slow_ones{0}, quick_ones{0};
    for (int step = 0; step < 2; ++step) {
      go = false;
      CUDA(simulated::enqueue(slow, [&] {
        while (!go) pause_ms(1);
      }));
      for (size_t g = groups; g-- > 0;) {
        if (slow_first) write(rank, g, 0, slow, 3, slow_ones);
        write(rank, g, 1, quick, 5, quick_ones);
        if (!slow_first) write(rank, g, 0, slow, 3, slow_ones);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, quick));
      }
      EXPECT_TRUE(await(quick_ones, (step + 1) * int{groups}, 5)) << "step " << step << ", slow first " << slow_first;
      EXPECT_EQ(slow_ones, step * int{groups});
      go = true;
      FSDP(fsdp_finish_grads(rank.model, 1, 0, quick));
      CUDA(cudaStreamSynchronize(quick));
      expect_sums(rank, 3, 5);
      FSDP(fsdp_step_adamw(rank.model, 0.125, nullptr, quick));
    }
    CUDA(cudaStreamSynchronize(slow));
    CUDA(cudaStreamSynchronize(quick));
    FSDP(fsdp_close_context(context));
  });
}

TEST(GpuStreams, WritersDoNotWaitForEachOther) {
  for (const bool slow_first : {true, false}) expect_apart(streams_scenario(2), slow_first);
}

// There are more streams than events, so some share an event. All that they wrote is reduced nevertheless.
TEST(GpuStreams, ManyWritersAreAllWaitedFor) {
  Scenario setup = streams_scenario(1);
  setup.model.max_pending_groups = 2;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<Stream> streams(7);
    std::atomic<int> written{0};
    for (size_t g = groups; g-- > 0;) {
      for (size_t s = 0; s < streams.size(); ++s) {
        nap(streams[s], 3);
        write(rank, g, s % 2, streams[s], static_cast<float>(1 << s), written);
      }
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, streams[g]));
    }
    FSDP(fsdp_finish_grads(rank.model, 1, 0, streams[0]));
    CUDA(cudaStreamSynchronize(streams[0]));
    expect_sums(rank, 1 + 4 + 16 + 64, 2 + 8 + 32);
    for (const Stream &stream : streams) CUDA(cudaStreamSynchronize(stream));
    FSDP(fsdp_close_context(context));
  });
}

// Returns what kernels read from the weights of each group. Each kernel runs after a nap on one of these streams.
std::vector<std::vector<std::byte>> look(Rank &rank, const std::vector<Stream> &streams, int nap_ms) {
  std::vector<std::vector<std::byte>> found(groups);
  for (size_t g = 0; g < groups; ++g) {
    const cudaStream_t stream = streams[g % streams.size()];
    FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, stream));
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_param(rank.groups[g], 0, FSDP_FORWARD, &view));
    if (nap_ms) nap(stream, nap_ms);
    found[g].resize(view.element_count * view.element_size);
    CUDA(simulated::enqueue(stream, [from = view.data, &to = found[g]] { std::memcpy(to.data(), from, to.size()); }));
    FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, stream));
  }
  for (const Stream &stream : streams) CUDA(cudaStreamSynchronize(stream));
  return found;
}

// The next gather into a buffer comes after all that read it, however slow they are on streams of their own.
TEST(GpuStreams, AGatherWaitsForReaders) {
  const Scenario setup = streams_scenario(2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<Stream> one(1), two(2), many(5);
    const auto expected = look(rank, one, 0);
    for (size_t g = 1; g < groups; ++g) EXPECT_NE(expected[g], expected[0]) << g;
    for (const auto *streams : {&one, &two, &many})
      EXPECT_EQ(look(rank, *streams, 20), expected) << streams->size() << " streams";
    FSDP(fsdp_discard_step(rank.model, one[0]));
    FSDP(fsdp_close_context(context));
  });
}

Scenario swizzled_scenario() {
  Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"only", {quantized({"w", {64, 96}}, FSDP_QUANTIZE_MXFP8)}}};
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  return setup;
}

// Publishes weights so that each row has a scale of its own.
void publish_rows(Rank &rank) {
  std::vector<float> values(64 * 96);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::ldexp(1.0F, static_cast<int>(i / 96 % 50));
  FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

void swizzle(Rank &rank, const Placed &to, fsdp_stream on) {
  uint64_t bytes = 512;
  FSDP(fsdp_swizzle_scales(rank.groups[0], 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, const_cast<void *>(to.data()), &bytes,
                           on));
}

void expect_rows(const Placed &seen) {
  // Each of 64 rows has 3 scales. Rows in the same half are 16 bytes apart.
  std::vector<uint8_t> wanted(512, 0);
  for (size_t row = 0; row < 64; ++row)
    for (size_t c = 0; c < 3; ++c) wanted[row % 32 * 16 + row / 32 * 4 + c] = static_cast<uint8_t>(row % 50 + 119);
  EXPECT_EQ(std::memcmp(seen.data(), wanted.data(), 512), 0);
}

// The swizzle runs on another stream, while the gather is held up.
TEST(GpuStreams, ScalesAreSwizzledOnceTheyAreGathered) {
  Scenario setup = swizzled_scenario();
  setup.context.debug_delay_us = 30'000;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    publish_rows(rank);
    const Stream reader;
    const Placed seen(std::vector<float>(128, -1.0F));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    swizzle(rank, seen, reader);
    CUDA(cudaStreamSynchronize(reader));
    expect_rows(seen);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
  });
}

// ... and before others take their place: the reader is late by more than a gather.
TEST(GpuStreams, SwizzledScalesAreThoseThatAreHeld) {
  const Scenario setup = swizzled_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    publish_rows(rank);
    const Stream reader;
    const Placed seen(std::vector<float>(128, -1.0F));
    fsdp_tensor row = FSDP_TENSOR_INIT, column = FSDP_TENSOR_INIT;
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_get_plane(rank.groups[0], 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, &row));
    std::atomic<bool> go{false};
    CUDA(simulated::enqueue(reader, [&] {
      while (!go) pause_ms(1);
    }));
    swizzle(rank, seen, reader);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_BACKWARD, 0, stream()));
    FSDP(fsdp_get_plane(rank.groups[0], 0, FSDP_BACKWARD, FSDP_PLANE_COLUMN_SCALE, &column));
    EXPECT_EQ(row.data, column.data) << "into the same buffer";
    pause_ms(300);
    go = true;
    CUDA(cudaStreamSynchronize(reader));
    expect_rows(seen);
    CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream())));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_BACKWARD, 0, stream()));
  });
}

struct Lines {
  std::mutex mutex;
  std::vector<std::string> found;
  static void hook(void *data, fsdp_log_level level, const char *line) {
    auto *const lines = static_cast<Lines *>(data);
    const std::lock_guard lock(lines->mutex);
    if (level == FSDP_LOG_WARNING) lines->found.emplace_back(line);
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex);
    return std::exchange(found, {});
  }
};

void call_after_publish(Rank &rank, fsdp_context *context, const std::string &which, cudaStream_t caller) {
  if (which == "stats") rank.stats();
  if (which == "wait_stream") FSDP(fsdp_wait_stream(context, caller, 0));
  if (which == "unshard") FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, caller));
  if (which == "destroy") fsdp_destroy_model(rank.model);
  if (which == "close" || which == "destroy") FSDP(fsdp_close_context(context));
}

// The weights are published on a stream that is held up: no call waits for it, and the first call that finds it done
// logs the warning.
TEST(GpuStreams, WeightsThatAreNotFiniteAreToldByAnyCallThatFindsThemPublished) {
  for (const std::string which : {"stats", "wait_stream", "unshard", "close", "destroy"}) {
    Lines lines;
    Scenario setup = streams_scenario(1);
    setup.groups = {{"g", {quantized({"w", {64, 96}}, FSDP_QUANTIZE_MXFP8)}}};
    setup.context.log = Lines::hook;
    setup.context.log_data = &lines;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      std::vector<float> values(64 * 96, 1.0f);
      values[40] = NAN;
      FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      const Stream caller;
      std::atomic<bool> go{false};
      CUDA(simulated::enqueue(caller, [&] {
        while (!go) pause_ms(1);
      }));
      FSDP(fsdp_publish_weights(rank.model, caller));
      EXPECT_EQ(rank.stats().version, 1u);
      EXPECT_EQ(lines.take(), std::vector<std::string>()) << which;
      go = true;
      CUDA(cudaStreamSynchronize(caller));
      call_after_publish(rank, context, which, caller);
      EXPECT_EQ(lines.take(), (std::vector<std::string>{"rank 0: version 1: parameter 'w' of group 'g': main weights "
                                                        "are Inf or NaN, so 1 of 192 ROW scales are NaN"}))
          << which;
    });
    EXPECT_EQ(lines.take(), std::vector<std::string>()) << which << ": once";
  }
}

// The work on each chunk of a shard is late, and the streams of two chunks are not ordered by the caller.
TEST(GpuStreams, ChunksAreWrittenAfterTheWorkOnThem) {
  Scenario setup = streams_scenario(1);
  setup.groups = {{"all", {{"w", {151, 300}, FSDP_BFLOAT16}}}};
  setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
  setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  setup.model.main_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  setup.model.turn_bytes = 65536;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Stream streams[2];
    std::vector<float> expected = rank.read(0, 0);
    for (float &weight : expected) weight += 3;
    FSDP(fsdp_begin_update(rank.model, streams[0]));
    fsdp_shard chunk = FSDP_SHARD_INIT;
    uint64_t chunks = 0;
    while (FSDP(fsdp_next_shard_chunk(rank.model, streams[chunks % 2], &chunk)), chunk.element_count) {
      const cudaStream_t stream = streams[chunks++ % 2];
      for (int i = 0; i < 3; ++i) {
        nap(stream, 5);
        CUDA(simulated::enqueue(stream, [weights = main_weight(chunk), count = chunk.element_count] {
          for (uint64_t e = 0; e < count; ++e) weights[e] += 1;
        }));
      }
    }
    EXPECT_EQ(chunks, 3u);
    FSDP(fsdp_publish_weights(rank.model, streams[0]));
    EXPECT_EQ(rank.read(0, 0), expected);
    for (const Stream &stream : streams) CUDA(cudaStreamSynchronize(stream));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
