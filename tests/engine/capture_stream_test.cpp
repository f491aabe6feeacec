// SPDX-License-Identifier: Apache-2.0
// While a model is captured, streams of another capture, and streams in no capture, are refused by name before anything
// is recorded.
#include <gtest/gtest.h>

#include "capture_calls.h"

using namespace harness;

namespace {

// These calls are made between steps, or in the update window.
std::vector<NamedCall> calls_between_steps() {
  return {
      {"fsdp_prefetch", [](Rank &rank, cudaStream_t s) { return fsdp_prefetch(rank.groups[0], FSDP_FORWARD, 0, s); }},
      {"fsdp_unshard", [](Rank &rank, cudaStream_t s) { return fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, s); }},
      {"fsdp_acquire_grad", acquire_grad},
      {"fsdp_put_grad",
       [](Rank &rank, cudaStream_t s) { return fsdp_put_grad(rank.groups[0], 0, nullptr, FSDP_FLOAT32, 0, 0, s); }},
      {"fsdp_apply_grads", [](Rank &rank, cudaStream_t s) { return apply(rank, s, nullptr); }},
  };
}

std::vector<NamedCall> calls_of_the_window() {
  return {
      {"fsdp_scale_grads", [](Rank &rank, cudaStream_t s) { return fsdp_scale_grads(rank.model, 2, s); }},
      {"fsdp_publish_weights", [](Rank &rank, cudaStream_t s) { return fsdp_publish_weights(rank.model, s); }},
      {"fsdp_step_adamw", [](Rank &rank, cudaStream_t s) { return fsdp_step_adamw(rank.model, 0.1, nullptr, s); }},
  };
}

const std::string not_in_capture = "not in the capture that fsdp_begin_capture was given";
const std::string without_model = "is being captured into a graph, and the model is not";

// The step begins with calls on the captured stream, up to the one that is made on the other.
void expect_refused(Rank &rank, cudaStream_t stream, cudaStream_t other, const NamedCall &call,
                    const std::function<void()> &before) {
  begin_capture(rank, stream);
  before();
  require_error(call.call(rank, other), FSDP_INVALID_STATE, {call.name, not_in_capture});
  end_spoilt_capture(rank, stream, {call.name, not_in_capture});
}

TEST(CaptureStream, AStreamThatIsNotInTheCaptureIsRefused) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream other;
    for (const NamedCall &call : calls_between_steps()) expect_refused(rank, stream, other, call, [] {});
    expect_refused(
        rank, stream, other,
        {"fsdp_reshard", [](Rank &r, cudaStream_t s) { return fsdp_reshard(r.groups[0], FSDP_FORWARD, 0, s); }},
        [&] { FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream)); });
    expect_refused(rank, stream, other,
                   {"fsdp_reduce_grad", [](Rank &r, cudaStream_t s) { return fsdp_reduce_grad(r.groups[0], 0, s); }},
                   [&] { FSDP(fsdp_put_grad(rank.groups[0], 0, nullptr, FSDP_FLOAT32, 0, 0, stream)); });
    expect_refused(rank, stream, other,
                   {"fsdp_finish_grads", [](Rank &r, cudaStream_t s) { return fsdp_finish_grads(r.model, 1, 0, s); }},
                   [&] { pass(rank, stream, true); });
    for (const NamedCall &call : calls_of_the_window())
      expect_refused(rank, stream, other, call, [&] {
        pass(rank, stream, true);
        FSDP(fsdp_finish_grads(rank.model, 1, 0, stream));
      });
    for (int i = 0; i < steps; ++i) step(rank, stream, lr_of(i));  // as if nothing had been
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// The program captures something of its own, and gives that stream to a model that is not captured.
void expect_refused_eagerly(Rank &rank, cudaStream_t captured, const NamedCall &call) {
  CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeThreadLocal));
  require_error(call.call(rank, captured), FSDP_INVALID_STATE, {call.name, without_model});
  EXPECT_EQ(end_cuda_capture(captured), 0u) << call.name << " has recorded something";
}

TEST(CaptureStream, ACapturedStreamOfAModelThatIsNotIsRefused) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  const Weights expected = train_eagerly(setup, 1);
  const std::vector<NamedCall> blocking = {{"fsdp_get_grad_norm", get_norm},
                                           {"fsdp_get_param_grad_norms", get_param_norms},
                                           {"fsdp_get_param_weight_norms", get_weight_norms},
                                           {"fsdp_count_zero_grads", count_zeros},
                                           {"fsdp_clip_grads", clip},
                                           {"fsdp_check_grads", check_finite}};
  const Weights weights = run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream captured;
    for (const NamedCall &call : calls_between_steps()) expect_refused_eagerly(rank, captured, call);
    expect_refused_eagerly(
        rank, captured, {"fsdp_begin_update", [](Rank &r, cudaStream_t s) { return fsdp_begin_update(r.model, s); }});
    expect_refused_eagerly(
        rank, captured, {"fsdp_discard_step", [](Rank &r, cudaStream_t s) { return fsdp_discard_step(r.model, s); }});
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream));
    expect_refused_eagerly(rank, captured, {"fsdp_reshard", [](Rank &r, cudaStream_t s) {
                                              return fsdp_reshard(r.groups[0], FSDP_FORWARD, 0, s);
                                            }});
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream));
    for (int i = 0; i < steps; ++i) {
      pass(rank, stream, true);
      expect_refused_eagerly(rank, captured, {"fsdp_finish_grads", [](Rank &r, cudaStream_t s) {
                                                return fsdp_finish_grads(r.model, 1, 0, s);
                                              }});
      FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream));
      for (const NamedCall &call : calls_of_the_window()) expect_refused_eagerly(rank, captured, call);
      for (const NamedCall &call : blocking) expect_refused_eagerly(rank, captured, call);
      fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
      options.weight_decay = 0.1;
      FSDP(fsdp_step_adamw(rank.model, lr_of(i), &options, stream));
    }
  });
  EXPECT_TRUE(same_bits(weights, expected));
}

// The library remembers which stream wrote a gradient; by the time of the reduce that stream may be in a capture of the
// program's.
TEST(CaptureStream, AWriterThatIsCapturedMeanwhileIsRefused) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t stream) {
    const Stream writer;
    FSDP(fsdp_put_grad(rank.groups[0], 0, nullptr, FSDP_FLOAT32, 0, 0, writer));
    CUDA(cudaStreamBeginCapture(writer, cudaStreamCaptureModeThreadLocal));
    require_error(fsdp_reduce_grad(rank.groups[0], 0, stream), FSDP_INVALID_STATE,
                  {"fsdp_reduce_grad", "'embed'", "is being captured"});
    require_error(acquire_grad(rank, stream), FSDP_INVALID_STATE,
                  {"fsdp_acquire_grad", "'embed'", "is being captured"});
    EXPECT_EQ(end_cuda_capture(writer), 0u);
    FSDP(fsdp_reduce_grad(rank.groups[0], 0, stream));
    FSDP(fsdp_discard_step(rank.model, stream));
  });
}

// The legacy stream waits for a blocking one, so CUDA allows nothing on it while that is captured.
TEST(CaptureStream, TheLegacyStreamIsRefusedWhileABlockingStreamIsCaptured) {
  const Scenario setup = graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  run(setup, [&](Rank &rank, cudaStream_t) {
    const Stream blocking(cudaStreamDefault);
    CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal));
    for (const NamedCall &call : calls_between_steps())
      require_error(call.call(rank, nullptr), FSDP_INVALID_STATE, {call.name, "cudaErrorStreamCaptureImplicit"});
    require_error(read_param(rank, nullptr), FSDP_INVALID_STATE, {"fsdp_read_param", "cudaErrorStreamCaptureImplicit"});
    EXPECT_EQ(end_cuda_capture(blocking), 0u);
  });
}

// CUDA allows no query of the NULL stream while a stream that is ordered with it is being captured.
TEST(CaptureStream, AWriterOnTheNullStreamMayPrecedeTheCaptureOfABlockingStream) {
  run(graph_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS), [&](Rank &rank, cudaStream_t stream) {
    const Stream blocking(cudaStreamDefault);
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, blocking));
    FSDP(fsdp_put_grad(rank.groups[3], 0, nullptr, FSDP_FLOAT32, 0, 0, nullptr));
    Graph graph(rank, blocking, [&] {
      enqueue_grads(rank, 3, blocking);
      FSDP(fsdp_reshard(rank.groups[3], FSDP_BACKWARD, 0, blocking));
      FSDP(fsdp_reduce_grad(rank.groups[3], 0, blocking));
    });
    graph.replay(0);
    begin_capture(rank, blocking);
    require_error(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, nullptr), FSDP_INVALID_STATE, {not_in_capture});
    end_spoilt_capture(rank, blocking, {"fsdp_unshard", not_in_capture});
    FSDP(fsdp_discard_step(rank.model, stream));
  });
}

}  // namespace
