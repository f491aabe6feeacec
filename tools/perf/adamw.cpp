// SPDX-License-Identifier: Apache-2.0
// The fused optimizer step: the kernel against the memory traffic of a copy, and what each additional small tensor
// costs in a whole fsdp_step_adamw.
#include <algorithm>
#include <bit>
#include <cmath>

#include "perf/abi_model.h"
#include "perf/bench.h"

namespace perf {
namespace {

using fsdp::device::AdamW;
using fsdp::device::AdamWSpan;

// weight, gradient and both moments are read, all but the gradient written; then the compute weights.
uint64_t traffic(uint64_t count, fsdp_dtype compute) {
  return count * (7 * sizeof(float) + (compute == FSDP_BFLOAT16 ? 2 : 0));
}

class AdamWKernel {
 public:
  AdamWKernel(Bench &bench, uint64_t count, fsdp_dtype compute) : bench_(bench), count_(count) {
    for (auto &array : arrays_) array = bench.member.device->allocate(count * sizeof(float), "adamw");
    span_ = {values(0), values(1), values(2), values(3), compute == FSDP_BFLOAT16 ? arrays_[4]->data() : nullptr,
             compute,   count};
    reset();
  }
  void operator()() { bench_.stream().adamw(step(), {&span_, 1}); }
  // Against the formula in double.
  uint64_t check() {
    reset();
    (*this)();
    uint64_t wrong = 0;
    const double grad = 0.25, m = 0.1 * grad, v = 0.001 * grad * grad;
    const double expected = 1 - 1e-3 * 0.1 - 1e-3 * (m / 0.1) / (std::sqrt(v / 0.001) + 1e-8);
    const auto published = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(expected)) >> 16);
    const auto *compute = reinterpret_cast<const uint16_t *>(span_.compute);
    for (uint64_t i = 0; i < count_; ++i) {
      const bool good = std::abs(values(0)[i] - expected) < 1e-6 && std::abs(values(2)[i] - m) < 1e-4 * m &&
                        std::abs(values(3)[i] - v) < 1e-4 * v;
      // Rounded to nearest: the upper half of the bits, or one more.
      wrong += !good || (compute && compute[i] != published && compute[i] != published + 1);
    }
    return bench_.lab.sum(wrong);
  }

 private:
  AdamW step() const {
    AdamW step{};
    step.lr = 1e-3F, step.epsilon = 1e-8F, step.weight_decay = 0.1F;
    step.first = fsdp::device::average_of(0.9), step.second = fsdp::device::average_of(0.999);
    step.correction1 = 0.1F, step.correction2 = 0.001F;
    return step;
  }
  float *values(int i) const { return reinterpret_cast<float *>(arrays_[i]->data()); }
  void reset() {
    std::fill_n(values(0), count_, 1.0F);
    std::fill_n(values(1), count_, 0.25F);
    std::fill_n(values(2), count_, 0.0F);
    std::fill_n(values(3), count_, 0.0F);
  }

  Bench &bench_;
  uint64_t count_;
  std::unique_ptr<fsdp::device::Memory> arrays_[5];
  AdamWSpan span_{};
};

void run_kernel(Bench &bench, fsdp_dtype compute) {
  for (const uint64_t bytes : bench.request.sizes()) {
    const uint64_t count = bytes / sizeof(float);
    AdamWKernel kernel(bench, count, compute);
    const uint64_t wrong = bench.request.check ? kernel.check() : 0;
    // A copy of n bytes moves 2n.
    const uint64_t copied = traffic(count, compute) / 2 / 64 * 64;
    CopyReference copy(bench, copied);
    Line line = make_line(bench, "adamw", "kernel", compute == FSDP_BFLOAT16 ? "fp32, bf16 out" : "fp32", bytes,
                          measure(
                              bench, [&] { kernel(); }, [&] { copy(); }));
    line.reference = copy.name();
    line.checked = bench.request.check;
    line.wrong = wrong;
    line.more = {{"traffic_gbs", static_cast<double>(traffic(count, compute)) / line.seconds * 1e-9}};
    bench.report.add(line);
  }
}

// The optimizer step of a model whose tensors all have the same size.
class AdamWStep {
 public:
  AdamWStep(Bench &bench, uint64_t tensors, uint64_t elements)
      : model_(bench, 1, FSDP_MODEL_OPTIONS_INIT, {{tensors, elements}}), elements_(elements) {}
  // The second of two steps, because the first one finds other data in the caches.
  double seconds() {
    step();
    return step();
  }

 private:
  double step() {
    fsdp_group *group = model_.groups[0];
    for (uint64_t t = 0; t < model_.shapes[0].param_count; ++t)
      model_.check(fsdp_put_grad(group, t, nullptr, FSDP_FLOAT32, elements_, 0, nullptr));
    model_.check(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
    model_.check(fsdp_finish_grads(model_.model.get(), 1.0, 0, nullptr));
    const double start = now();
    model_.check(fsdp_step_adamw(model_.model.get(), 1e-3, nullptr, nullptr));
    return now() - start;
  }

  AbiModel model_;
  uint64_t elements_;
};

// Measures the same number of elements in one tensor and in many tensors, alternately.
void run_small_tensors(Bench &bench) {
  constexpr uint64_t tensors = 10'000, elements = 64;
  AdamWStep one(bench, 1, tensors * elements), many(bench, tensors, elements);
  std::vector<double> one_seconds, many_seconds, more_for_each;
  for (uint32_t i = 0; i < bench.request.pairs + bench.request.warmup; ++i) {
    const double of_one = one.seconds(), of_many = many.seconds();
    if (i < bench.request.warmup) continue;
    one_seconds.push_back(of_one);
    many_seconds.push_back(of_many);
    more_for_each.push_back((of_many - of_one) / tensors);
  }
  Measured measured;
  measured.seconds = bench.lab.longest(median(many_seconds));
  measured.reference = bench.lab.longest(median(one_seconds));
  measured.ratio = measured.reference / measured.seconds;
  measured.pairs = bench.request.pairs;
  Line line = make_line(bench, "adamw", "10,000 small tensors", "fp32", tensors * elements * sizeof(float), measured);
  line.reference = "one tensor of as many elements";
  line.more = {{"ns_per_tensor", bench.lab.longest(median(more_for_each)) * 1e9}};
  bench.report.add(line);
}

}  // namespace

void run_adamw(Bench &bench) {
  run_kernel(bench, FSDP_FLOAT32);
  run_kernel(bench, FSDP_BFLOAT16);
  run_compact_adamw(bench);
  run_small_tensors(bench);
}

}  // namespace perf
