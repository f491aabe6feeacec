// SPDX-License-Identifier: Apache-2.0
// MXFP8. Both planes come from one reading of the weights: 4 + 2.0625 bytes of traffic per element. A block of threads
// has 32 x 128 elements. First each thread has a column of them, whose scale and codes are the COL plane's, and leaves
// them in shared memory; then it has a row of one block, for the ROW plane.
#include "device/cuda/float8_elements.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

FSDP_DEVICE uint32_t larger(uint32_t amax, float value) {
  const uint32_t magnitude = bits_of(value) & fp32_magnitude;
  return magnitude > amax ? magnitude : amax;
}

FSDP_DEVICE uint8_t block_code(float value, uint8_t scale) {
  return scale == E8M0::nan ? E4M3::nan : Float8Element<E4M3>::stored(multiplied(value, mxfp8_factor(scale)));
}

struct QuantizeTile {
  static constexpr unsigned side = mxfp8_block, threads = 128;
  struct TileNumbers {
    float tile[side][threads + 1];  // one more, so that the threads of a warp use different banks
  };
  using Shared = TileNumbers;
  Mxfp8Quantize work;
  uint64_t tiles_across;
  bool wide;  // the ROW plane is aligned to 16 bytes

  FSDP_DEVICE uint64_t row() const { return blockIdx.x / tiles_across * side; }
  FSDP_DEVICE uint64_t column() const { return blockIdx.x % tiles_across * threads; }

  FSDP_DEVICE void first(Shared &shared) const {
    const uint64_t c = column() + threadIdx.x;
    if (c >= work.columns) return;
    float values[side];
    for (unsigned r = 0; r < side; ++r) values[r] = via(work.from[(row() + r) * work.columns + c], work.via_bf16);
    uint32_t amax = 0;
    for (unsigned r = 0; r < side; ++r) {
      amax = larger(amax, values[r]);
      shared.tile[r][threadIdx.x] = values[r];
    }
    const uint8_t scale = mxfp8_scale(amax, work.rule);
    work.column_scales[row() / side * work.columns + c] = scale;
    for (unsigned r = 0; r < side; ++r) work.column[(row() + r) * work.columns + c] = block_code(values[r], scale);
  }

  FSDP_DEVICE void second(Shared &shared) const {
    const unsigned r = threadIdx.x % side, begin = threadIdx.x / side * side;
    if (column() + begin >= work.columns) return;
    const float *const values = &shared.tile[r][begin];
    uint32_t amax = 0;
    for (unsigned j = 0; j < side; ++j) amax = larger(amax, values[j]);
    const uint8_t scale = mxfp8_scale(amax, work.rule);
    const uint64_t element = (row() + r) * work.columns + column() + begin;
    work.row_scales[element / side] = scale;
    Pack<uint8_t, 16> codes[side / 16];
    for (unsigned j = 0; j < side; ++j) codes[j / 16].lane[j % 16] = block_code(values[j], scale);
    for (unsigned j = 0; j < side / 16; ++j) put(work.row + element + j * 16, codes[j]);
  }

  FSDP_DEVICE void put(uint8_t *to, const Pack<uint8_t, 16> &codes) const {
    if (wide) return store_pack<16>(to, codes);
    for (unsigned j = 0; j < 16; ++j) to[j] = codes.lane[j];
  }
};

// Factors of the element at an index.
struct RowScales {
  const uint8_t *scales;
  FSDP_DEVICE float at(uint64_t index) const { return E8M0::value(scales[index / mxfp8_block]); }
};

struct ColumnScales {
  const uint8_t *scales;
  uint64_t columns;
  FSDP_DEVICE float at(uint64_t index) const {
    return E8M0::value(scales[index / columns / mxfp8_block * columns + index % columns]);
  }
};

struct OneScale {
  const float *scale_inv;
  FSDP_DEVICE float at(uint64_t) const { return *scale_inv; }
};

struct BlockScales {
  const float *scale_inv;
  uint64_t columns;
  FSDP_DEVICE float at(uint64_t index) const {
    return scale_inv[index / columns / fp8_block * fp8_blocks(columns) + index % columns / fp8_block];
  }
};

template <class To, class Scales>
struct Dequantize {
  static constexpr unsigned batch = 4;
  void *to;
  const uint8_t *codes;
  Scales scales;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<uint8_t, n> stored[m];
    for (unsigned k = 0; k < m; ++k) stored[k] = load_pack<n>(codes + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t at = first + k * step;
      Pack<float, n> values;
      for (unsigned j = 0; j < n; ++j) values.lane[j] = multiplied(E4M3::value(stored[k].lane[j]), scales.at(at + j));
      store<To, n>(to, at, values);
    }
  }
};

template <class To, class Scales>
int dequantize_to(kernels::Stream stream, void *to, const uint8_t *codes, uint64_t count, const Scales &scales) {
  const unsigned at = misfit(to, sizeof(typename To::Stored));
  return for_each(Dequantize<To, Scales>{to, codes, scales}, divide(count, at, misfit(codes, 1) == at), stream);
}

template <class Scales>
int dequantize(kernels::Stream stream, void *to, fsdp_dtype to_dtype, const uint8_t *codes, uint64_t count,
               const Scales &scales) {
  if (to_dtype == FSDP_BFLOAT16) return dequantize_to<BF16>(stream, to, codes, count, scales);
  return dequantize_to<F32>(stream, to, codes, count, scales);
}

__global__ void swizzle(const __grid_constant__ Mxfp8Swizzle work) {
  const uint64_t index = uint64_t{blockIdx.x} * threads + threadIdx.x;
  if (index < work.bytes()) work.to[index] = swizzled_scale(work, index);
}

}  // namespace

namespace kernels {

int quantize_mxfp8(Stream stream, const Mxfp8Quantize &work) {
  const uint64_t across = (work.columns + QuantizeTile::threads - 1) / QuantizeTile::threads;
  const QuantizeTile tile{work, across, reinterpret_cast<uintptr_t>(work.row) % 16 == 0};
  const auto blocks = static_cast<unsigned>(work.rows / tile.side * across);
  return blocks ? FSDP_LAUNCH_PHASED(tile, blocks, tile.threads, stream) : 0;
}

int dequantize_mxfp8(Stream stream, void *to, fsdp_dtype to_dtype, const Mxfp8Dequantize &work) {
  const uint64_t count = work.rows * work.columns;
  if (work.form == Mxfp8Form::row) return dequantize(stream, to, to_dtype, work.codes, count, RowScales{work.scales});
  return dequantize(stream, to, to_dtype, work.codes, count, ColumnScales{work.scales, work.columns});
}

int dequantize_fp8(Stream stream, void *to, fsdp_dtype to_dtype, const Fp8Dequantize &work) {
  return dequantize(stream, to, to_dtype, work.codes, work.count, OneScale{work.scale_inv});
}

int dequantize_fp8_blocks(Stream stream, void *to, fsdp_dtype to_dtype, const Fp8BlockDequantize &work) {
  const BlockScales scales{work.scale_inv, work.columns};
  return dequantize(stream, to, to_dtype, work.codes, work.rows * work.columns, scales);
}

int swizzle_scales(Stream stream, const Mxfp8Swizzle &work) {
  const auto blocks = static_cast<unsigned>((work.bytes() + threads - 1) / threads);
  return blocks ? FSDP_LAUNCH(swizzle, blocks, threads, stream, work) : 0;
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
