// SPDX-License-Identifier: Apache-2.0
// Weights to 8-bit planes, against the memory traffic of a copy.
#include <algorithm>
#include <cmath>
#include <random>

#include "device/host/kernels.h"
#include "perf/bench.h"

namespace perf {
namespace {

using namespace fsdp::device;

enum class Way { mxfp8, mxfp8_via_bf16, fp8, fp8_block };
constexpr struct {
  Way way;
  const char *name, *dtype;
  double bytes;  // of traffic per element: the fp32 that is read, codes and scales
} ways[] = {{Way::mxfp8, "mxfp8", "both planes", 4 + 2 * (1 + 1.0 / 32)},
            {Way::mxfp8_via_bf16, "mxfp8", "both, via bf16", 4 + 2 * (1 + 1.0 / 32)},
            {Way::fp8, "fp8", "amax and codes", 4 + 4 + 1},
            {Way::fp8_block, "fp8_block", "128 x 128", 4 + 1}};

class Planes {
 public:
  Planes(Bench &bench, uint64_t bytes)
      : columns_(std::min<uint64_t>(4096, std::max<uint64_t>(bytes / 4 / 128 / 32, 1) * 32)),
        rows_(std::max<uint64_t>(bytes / 4 / columns_ / 128, 1) * 128) {
    const auto allocate = [&](uint64_t size) { return bench.member.device->allocate(size, "quantize"); };
    from_ = allocate(count() * sizeof(float));
    for (auto &plane : planes_) plane = allocate(count());
    for (auto &scales : scales_) scales = allocate(count() / 32 * sizeof(float));
    std::mt19937 random(1);
    std::normal_distribution<float> values(0, 0.02F);
    constexpr uint64_t period = 65521;  // prime; drawing takes time
    for (uint64_t i = 0; i < count(); ++i) numbers()[i] = i < period ? values(random) : numbers()[i - period];
  }
  uint64_t count() const { return rows_ * columns_; }

  void quantize(Way way) {
    const bool via_bf16 = way == Way::mxfp8_via_bf16;
    if (way == Way::fp8) {
      const float amax = kernels::find_amax(numbers(), count(), false);
      kernels::find_fp8_scales({&amax, 1, 1, false, floats(0), floats(1)});
      kernels::quantize_fp8({numbers(), count(), false, floats(0), codes(0)});
    } else if (way == Way::fp8_block) {
      kernels::quantize_fp8_blocks({numbers(), rows_, columns_, false, false, codes(0), floats(0)});
    } else {
      kernels::quantize_mxfp8(
          {numbers(), rows_, columns_, ScaleRule::round_up, via_bf16, codes(0), bytes(0), codes(1), bytes(1)});
    }
  }

  // Numbers that are further from their codes than half of E4M3's last place, at any size of them.
  uint64_t wrong(Way way) {
    quantize(way);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count(); ++i) {
      const float number = numbers()[i], scale = scale_of(way, i);
      const bool bad = std::abs(E4M3::value(codes(0)[i]) * scale - number) >
                       std::max(std::abs(number) * 0x1.02p-4F, scale * 0x1p-10F);
      wrong += bad;
    }
    return wrong;
  }

 private:
  float scale_of(Way way, uint64_t i) const {
    if (way == Way::fp8) return floats(1)[0];
    if (way == Way::fp8_block) return floats(0)[i / columns_ / 128 * fp8_blocks(columns_) + i % columns_ / 128];
    return E8M0::value(bytes(0)[i / 32]);
  }
  float *numbers() const { return reinterpret_cast<float *>(from_->data()); }
  uint8_t *codes(int i) const { return reinterpret_cast<uint8_t *>(planes_[i]->data()); }
  uint8_t *bytes(int i) const { return reinterpret_cast<uint8_t *>(scales_[i]->data()); }
  float *floats(int i) const { return reinterpret_cast<float *>(scales_[i]->data()); }

  uint64_t columns_, rows_;
  std::unique_ptr<Memory> from_, planes_[2], scales_[2];
};

}  // namespace

void run_quantize(Bench &bench) {
  for (const uint64_t bytes : bench.request.sizes(128 * 32 * sizeof(float))) {
    Planes planes(bench, bytes);
    for (const auto &way : ways) {
      const uint64_t wrong = bench.request.check ? bench.lab.sum(planes.wrong(way.way)) : 0;
      const double traffic = static_cast<double>(planes.count()) * way.bytes;
      // A copy of n bytes moves 2n.
      CopyReference copy(bench, static_cast<uint64_t>(traffic / 2) / 64 * 64);
      Line line = make_line(bench, "quantize", way.name, way.dtype, planes.count() * sizeof(float),
                            measure(
                                bench, [&] { planes.quantize(way.way); }, [&] { copy(); }));
      line.reference = copy.name();
      line.checked = bench.request.check;
      line.wrong = wrong;
      line.more = {{"traffic_gbs", traffic / line.seconds * 1e-9}};
      bench.report.add(line);
    }
  }
}

}  // namespace perf
