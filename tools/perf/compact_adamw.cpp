// SPDX-License-Identifier: Apache-2.0
// The fused optimizer step on main weights and states that take fewer bits than fp32, against the memory traffic of a
// copy.
#include <algorithm>
#include <bit>
#include <cmath>

#include "device/state_codes.h"
#include "perf/bench.h"

namespace perf {
namespace {

using fsdp::device::AdamW;
using fsdp::device::CompactSpan;
using fsdp::device::MainForm;

struct Variant {
  const char *name;
  MainForm form;
  bool codes;
  uint64_t bytes;  // read and written for an element, without the scales of codes
};
// The gradient takes 4 bytes; weights 8 in fp32 or in two halves, and 4 in bf16; the states 16 in fp32, and 4 in codes.
constexpr Variant variants[] = {
    {"split16", MainForm::split16, false, 4 + 8 + 16},           {"none", MainForm::rounded, false, 4 + 4 + 16},
    {"8-bit, bf16 out", MainForm::float32, true, 4 + 8 + 4 + 2}, {"8-bit, split16", MainForm::split16, true, 4 + 8 + 4},
    {"8-bit, none", MainForm::rounded, true, 4 + 4 + 4},
};

class CompactKernel {
 public:
  CompactKernel(Bench &bench, uint64_t count, const Variant &variant)
      : bench_(bench), count_(count), variant_(variant) {
    const uint64_t state = variant.codes ? 1 : sizeof(float), blocks = variant.codes ? state_blocks(count) : 0;
    const uint64_t bytes[] = {count * 4, count * 2, count * 4, count * state, count * state, blocks * 4, blocks * 4};
    for (size_t i = 0; i < std::size(bytes); ++i)
      arrays_[i] = bench.member.device->allocate(std::max(bytes[i], uint64_t{4}), "adamw");
    span_.weight = at<void>(weight), span_.grad = at<float>(grad);
    span_.exp_avg = at<void>(exp_avg), span_.exp_avg_sq = at<void>(exp_avg_sq);
    if (variant.codes) span_.exp_avg_scales = at<float>(scales), span_.exp_avg_sq_scales = at<float>(sq_scales);
    if (variant.form == MainForm::split16) span_.rest = at<int16_t>(further);
    if (variant.form == MainForm::float32) span_.compute = at<void>(further), span_.compute_dtype = FSDP_BFLOAT16;
    span_.form = variant.form, span_.numbers = {0, count, 0}, span_.count = count;
    reset();
  }
  void operator()() { bench_.stream().compact_adamw(step(), {&span_, 1}); }
  uint64_t traffic() const {
    return count_ * variant_.bytes + (variant_.codes ? state_blocks(count_) * 4 * sizeof(float) : 0);
  }
  // The result is compared with the formula in double. States that are all equal are exact in codes, too.
  uint64_t check() {
    reset();
    (*this)();
    const double g = 0.25, m = 0.1 * g, v = 0.001 * g * g;
    const double expected = 1 - 1e-3 * 0.1 - 1e-3 * (m / 0.1) / (std::sqrt(v / 0.001) + 1e-8);
    const double near = variant_.form == MainForm::rounded ? 0x1p-8 : 1e-6;  // the distance of numbers of bf16
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count_; ++i) wrong += !(std::abs(weight_at(i) - expected) < near);
    return bench_.lab.sum(wrong);
  }

 private:
  enum Array { weight, further, grad, exp_avg, exp_avg_sq, scales, sq_scales, arrays };

  static uint64_t state_blocks(uint64_t count) { return fsdp::device::state_blocks(count); }
  template <class T>
  T *at(Array array) const {
    return reinterpret_cast<T *>(arrays_[array]->data());
  }
  double weight_at(uint64_t i) const {
    if (variant_.form == MainForm::float32) return at<float>(weight)[i];
    const int16_t rest = variant_.form == MainForm::split16 ? at<int16_t>(further)[i] : int16_t{0};
    return std::bit_cast<float>(fsdp::device::join_weight(at<uint16_t>(weight)[i], rest));
  }
  static AdamW step() {
    AdamW step{};
    step.lr = 1e-3F, step.epsilon = 1e-8F, step.weight_decay = 0.1F;
    step.first = fsdp::device::average_of(0.9), step.second = fsdp::device::average_of(0.999);
    step.correction1 = 0.1F, step.correction2 = 0.001F;
    step.number = 1, step.seed = 1;
    return step;
  }
  // Weights are 1, gradients 0.25, and the states 0.
  void reset() {
    for (const auto &array : arrays_) std::fill_n(array->data(), array->size_bytes(), std::byte{});
    std::fill_n(at<float>(grad), count_, 0.25F);
    if (variant_.form == MainForm::float32)
      std::fill_n(at<float>(weight), count_, 1.0F);
    else
      std::fill_n(at<uint16_t>(weight), count_, uint16_t{0x3f80});
    if (variant_.codes) std::fill_n(at<uint8_t>(exp_avg), count_, fsdp::device::signed_zero_code);
  }

  Bench &bench_;
  uint64_t count_;
  Variant variant_;
  std::unique_ptr<fsdp::device::Memory> arrays_[arrays];
  CompactSpan span_{};
};

void run_variant(Bench &bench, const Variant &variant) {
  for (const uint64_t bytes : bench.request.sizes()) {
    CompactKernel kernel(bench, bytes / sizeof(float), variant);
    const uint64_t wrong = bench.request.check ? kernel.check() : 0;
    CopyReference copy(bench, kernel.traffic() / 2 / 64 * 64);  // a copy of n bytes moves 2n
    const Measured measured = measure(
        bench, [&] { kernel(); }, [&] { copy(); });
    Line line = make_line(bench, "adamw", "kernel", variant.name, bytes, measured);
    line.reference = copy.name();
    line.checked = bench.request.check;
    line.wrong = wrong;
    line.more = {{"traffic_gbs", static_cast<double>(kernel.traffic()) / line.seconds * 1e-9}};
    bench.report.add(line);
  }
}

}  // namespace

void run_compact_adamw(Bench &bench) {
  for (const Variant &variant : variants) run_variant(bench, variant);
}

}  // namespace perf
