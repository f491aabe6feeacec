// SPDX-License-Identifier: Apache-2.0
// Reduces of gradients through the C ABI: the caller's time for each group, from fsdp_acquire_grad to the end of
// fsdp_reduce_grad. It includes any wait for a buffer that an earlier group still uses.
#include <algorithm>

#include "perf/abi_model.h"
#include "perf/bench.h"

namespace perf {
namespace {

class GradPass {
 public:
  static constexpr size_t group_count = 8;

  GradPass(Bench &bench, uint64_t bytes)
      : bench_(bench),
        model_(bench, bench.size(), options(),
               std::vector<GroupShape>(group_count, GroupShape{1, bytes / sizeof(float)})) {}

  // Computes for `seconds` before each reduce.
  void operator()(double seconds) {
    for (size_t g = group_count; g-- > 0;) {
      busy(seconds);
      reduce(g, 0, false);
    }
  }
  static void alone(double seconds) {
    for (size_t g = group_count; g-- > 0;) busy(seconds);
  }
  // Every rank's gradients are rank + 1, and the mean must be in every element of the shards.
  uint64_t check() {
    for (size_t g = group_count; g-- > 0;) reduce(g, FSDP_LAST, true);
    model_.check(fsdp_finish_grads(model_.model.get(), 1.0, 0, nullptr));
    uint64_t shards = 0, wrong = 0;
    model_.check(fsdp_get_shard_count(model_.model.get(), &shards));
    const auto expected = static_cast<float>((bench_.size() + 1) / 2.0);
    for (uint64_t s = 0; s < shards; ++s) {
      fsdp_shard shard = FSDP_SHARD_INIT;
      model_.check(fsdp_get_shard(model_.model.get(), s, &shard));
      const auto *grads = static_cast<const float *>(shard.main_grad);
      for (uint64_t i = 0; i < shard.element_count; ++i) wrong += grads[i] != expected;
    }
    model_.check(fsdp_discard_step(model_.model.get(), nullptr));
    return bench_.lab.sum(wrong);
  }
  void end() { model_.check(fsdp_discard_step(model_.model.get(), nullptr)); }

 private:
  static fsdp_model_options options() {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.optimizer = FSDP_OPTIMIZER_CALLER;
    return options;
  }
  static void busy(double seconds) {
    if (seconds == 0) return;
    for (const double end = now() + seconds; now() < end;) {
    }
  }
  void reduce(size_t g, uint32_t flags, bool fill) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    model_.check(fsdp_acquire_grad(model_.groups[g], 0, 0, nullptr, &grad, &accumulate));
    if (fill) std::fill_n(static_cast<float *>(grad.data), grad.element_count, static_cast<float>(bench_.rank() + 1));
    model_.check(fsdp_reduce_grad(model_.groups[g], flags, nullptr));
  }

  Bench &bench_;
  AbiModel model_;
};

void add_line(Bench &bench, GradPass &pass, const char *variant, uint64_t bytes, const Measured &measured,
              double reduce_seconds, const char *reference, uint64_t wrong) {
  pass.end();
  Line line = make_line(bench, "reduce", variant, "fp32", bytes, measured);
  line.reference = reference;
  line.checked = bench.request.check;
  line.wrong = wrong;
  line.more = {{"reduce_us", reduce_seconds * 1e6}};
  bench.report.add(line);
}

// One reduce after the other.
void run_back_to_back(Bench &bench, uint64_t bytes) {
  GradPass pass(bench, bytes);
  const uint64_t wrong = bench.request.check ? pass.check() : 0;
  CopyReference copy(bench, bytes);
  Measured measured = measure(
      bench, [&] { pass(0); }, [&] { copy(); });
  measured.seconds /= GradPass::group_count;
  measured.ratio *= GradPass::group_count;
  add_line(bench, pass, "back to back", bytes, measured, measured.seconds, copy.name(), wrong);
}

// The caller computes before each reduce, so the stream's thread is asleep. The time includes the computing; reduce_us
// is what the reduce adds, which noise can make negative.
void run_after_computing(Bench &bench, uint64_t bytes) {
  constexpr double compute = 100e-6;
  GradPass pass(bench, bytes);
  const uint64_t wrong = bench.request.check ? pass.check() : 0;
  Measured measured = measure(
      bench, [&] { pass(compute); }, [&] { pass.alone(compute); });
  measured.seconds /= GradPass::group_count;
  measured.reference /= GradPass::group_count;
  add_line(bench, pass, "after computing", bytes, measured, measured.seconds - measured.reference, "computing alone",
           wrong);
}

}  // namespace

void run_reduce(Bench &bench) {
  for (const uint64_t bytes : bench.request.shared_sizes()) {
    run_back_to_back(bench, bytes);
    run_after_computing(bench, bytes);
  }
}

}  // namespace perf
