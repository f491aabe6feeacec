// SPDX-License-Identifier: Apache-2.0
// FP8 with fp32 scales: amaxes (4 bytes of traffic per element), scales, codes (4 + 1), and blocks of 128 x 128, which
// a block of threads reads twice: from memory, and from the caches.
#include "device/cuda/float8_elements.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

struct Amaxes {
  uint32_t lane[threads];

  FSDP_DEVICE uint32_t largest() const {
    uint32_t amax = 0;
    for (unsigned i = 0; i < threads; ++i) amax = lane[i] > amax ? lane[i] : amax;
    return amax;
  }
};

FSDP_DEVICE uint32_t magnitude_of(float value, bool via_bf16) { return bits_of(via(value, via_bf16)) & fp32_magnitude; }

struct FindAmax {
  static constexpr unsigned threads = cuda::threads;
  using Shared = Amaxes;
  uint32_t *result;
  const float *values;
  uint64_t count, blocks;
  bool via_bf16;

  FSDP_DEVICE void first(Shared &shared) const {
    uint32_t amax = 0;
    const uint64_t step = blocks * threads;
    for (uint64_t i = uint64_t{blockIdx.x} * threads + threadIdx.x; i < count; i += step) {
      const uint32_t magnitude = magnitude_of(values[i], via_bf16);
      amax = magnitude > amax ? magnitude : amax;
    }
    shared.lane[threadIdx.x] = amax;
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x != 0) return;
    const uint32_t amax = shared.largest();
    raise_atomically(result, amax < fp32_infinity ? amax : fp32_infinity);
  }
};

__global__ void no_amax(uint32_t *result) { *result = 0; }

__global__ void make_scales(Fp8Scales work) {
  const uint64_t i = uint64_t{blockIdx.x} * threads + threadIdx.x;
  if (i >= work.count) return;
  const float scale = fp8_scale(largest_amax(work, i), work.power_of_two);
  work.scales[i] = scale;
  work.scale_inv[i] = divided(1, scale);
}

struct QuantizeFp8 {
  static constexpr unsigned batch = 4;
  Fp8Quantize work;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    const float scale = *work.scale;
    Pack<float, n> values[m];
    for (unsigned k = 0; k < m; ++k) values[k] = load_pack<n>(work.from + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      Pack<uint8_t, n> codes;
      for (unsigned j = 0; j < n; ++j) codes.lane[j] = scaled_code(via(values[k].lane[j], work.via_bf16), scale);
      store_pack<n>(work.codes + first + k * step, codes);
    }
  }
};

// A thread has every second row of one column.
struct QuantizeBlock {
  static constexpr unsigned threads = cuda::threads, side = fp8_block;
  using Shared = Amaxes;
  Fp8BlockQuantize work;
  uint64_t across;

  FSDP_DEVICE uint64_t column() const { return blockIdx.x % across * side + threadIdx.x % side; }

  template <class Visit>
  FSDP_DEVICE void each(const Visit &visit) const {
    if (column() >= work.columns) return;
    const uint64_t begin = blockIdx.x / across * side, end = begin + side;
    for (uint64_t r = begin + threadIdx.x / side; r < end && r < work.rows; r += threads / side)
      visit(r * work.columns + column());
  }

  FSDP_DEVICE void first(Shared &shared) const {
    uint32_t amax = 0;
    each([&](uint64_t i) {
      const uint32_t magnitude = magnitude_of(work.from[i], work.via_bf16);
      amax = magnitude > amax ? magnitude : amax;
    });
    shared.lane[threadIdx.x] = amax;
  }
  FSDP_DEVICE void second(Shared &shared) const {
    const float scale = fp8_scale(float_of(shared.largest()), work.power_of_two);
    if (threadIdx.x == 0) work.scale_inv[blockIdx.x] = divided(1, scale);
    each([&](uint64_t i) { work.codes[i] = scaled_code(via(work.from[i], work.via_bf16), scale); });
  }
};

constexpr uint64_t max_amax_blocks = 1024;  // a few for each of a GPU's processors

unsigned blocks_for(uint64_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

}  // namespace

namespace kernels {

int find_amax(Stream stream, float *result, const float *values, uint64_t count, bool via_bf16) {
  auto *const bits = reinterpret_cast<uint32_t *>(result);
  if (const int error = FSDP_LAUNCH(no_amax, 1, 1, stream, bits)) return error;
  const uint64_t wanted = blocks_for(count), blocks = wanted < max_amax_blocks ? wanted : max_amax_blocks;
  const FindAmax work{bits, values, count, blocks, via_bf16};
  return blocks ? FSDP_LAUNCH_PHASED(work, static_cast<unsigned>(blocks), work.threads, stream) : 0;
}

int find_fp8_scales(Stream stream, const Fp8Scales &work) {
  return work.count ? FSDP_LAUNCH(make_scales, blocks_for(work.count), threads, stream, work) : 0;
}

int quantize_fp8(Stream stream, const Fp8Quantize &work) {
  const unsigned at = misfit(work.from, sizeof(float));
  return for_each(QuantizeFp8{work}, divide(work.count, at, misfit(work.codes, 1) == at), stream);
}

int quantize_fp8_blocks(Stream stream, const Fp8BlockQuantize &work) {
  const QuantizeBlock block{work, fp8_blocks(work.columns)};
  const auto blocks = static_cast<unsigned>(fp8_blocks(work.rows) * block.across);
  return blocks ? FSDP_LAUNCH_PHASED(block, blocks, block.threads, stream) : 0;
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
