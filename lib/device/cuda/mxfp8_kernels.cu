// SPDX-License-Identifier: Apache-2.0
// MXFP8. One read of the weights makes both planes: 4 + 2.0625 bytes of traffic per element. A block of threads has 32
// x 128 elements, and a thread has 8 x 4 of them in registers: a warp reads and writes whole rows of 128. First each
// thread finds the largest magnitudes of its columns and rows, then the scales of one column and of one row, and then
// the codes of both planes.
#include "device/cuda/float8_elements.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

struct Mxfp8Span {
  Mxfp8Quantize work;
  uint64_t *found;  // NULL: ROW scales that stand for Inf or NaN are not counted
  uint32_t across;  // number of blocks of threads in a row of blocks
  bool wide;        // all arrays are aligned to four elements
};

struct QuantizeTiles {
  static constexpr unsigned side = mxfp8_block, threads = 128, lanes = 32, warps = threads / lanes;
  static constexpr unsigned rows = side / warps, most = 44;
  struct TileMagnitudes {
    float of_columns[warps][threads];    // largest magnitudes of the rows of each warp
    float of_rows[side][lanes + pack];   // of 4 numbers; the last entries let the threads of a warp use different banks
    float column_factors[threads], row_factors[threads / side][side];
    bool found;  // true if a ROW scale must be counted
  };
  using Shared = TileMagnitudes;
  struct TileNumbers {
    Pack<float, pack> values[rows];
    unsigned span;
    uint64_t row, column;  // place of the first element of the block
  };
  using Kept = TileNumbers;
  Batch<Mxfp8Span, most> batch;

  FSDP_DEVICE static unsigned lane() { return threadIdx.x % lanes; }
  FSDP_DEVICE static unsigned warp() { return threadIdx.x / lanes; }
  FSDP_DEVICE static bool is_inside(const Mxfp8Span &span, const Kept &kept, unsigned column) {
    return kept.column + column < span.work.columns;
  }
  // The number of this thread's first element.
  FSDP_DEVICE static uint64_t element(const Mxfp8Span &span, const Kept &kept) {
    return (kept.row + warp() * rows) * span.work.columns + kept.column + lane() * pack;
  }

  FSDP_DEVICE void first(Shared &shared, Kept &kept) const {
    kept.span = batch.span_of(blockIdx.x);
    const Mxfp8Span &span = batch.spans[kept.span];
    const uint32_t block = blockIdx.x - batch.first_block[kept.span];
    kept.row = uint64_t{block / span.across} * side, kept.column = block % span.across * threads;
    if (threadIdx.x == 0) shared.found = false;
    if (!is_inside(span, kept, lane() * pack)) return;
    load(span, kept);
    if (span.work.via_bf16) {
      FSDP_UNROLL
      for (Pack<float, pack> &values : kept.values) round_to_bf16<false>(values);
    }
    Pack<float, pack> of_columns{};
    FSDP_UNROLL
    for (unsigned k = 0; k < rows; ++k) {
      shared.of_rows[warp() * rows + k][lane()] = largest_magnitude(kept.values[k]);
      FSDP_UNROLL
      for (unsigned j = 0; j < pack; ++j)
        of_columns.lane[j] = larger_magnitude(of_columns.lane[j], kept.values[k].lane[j]);
    }
    *reinterpret_cast<Pack<float, pack> *>(&shared.of_columns[warp()][lane() * pack]) = of_columns;
  }

  FSDP_DEVICE static void load(const Mxfp8Span &span, Kept &kept) {
    const float *from = span.work.from + element(span, kept);
    FSDP_UNROLL
    for (unsigned k = 0; k < rows; ++k, from += span.work.columns) {
      if (span.wide) {
        kept.values[k] = load_pack<pack>(from);
      } else {
        FSDP_UNROLL
        for (unsigned j = 0; j < pack; ++j) kept.values[k].lane[j] = from[j];
      }
    }
  }

  FSDP_DEVICE void second(Shared &shared, const Kept &kept) const {
    const Mxfp8Span &span = batch.spans[kept.span];
    const Mxfp8Quantize &work = span.work;
    const unsigned c = threadIdx.x, r = threadIdx.x % side, part = threadIdx.x / side;
    if (is_inside(span, kept, c)) {
      float amax = shared.of_columns[0][c];
      FSDP_UNROLL
      for (unsigned w = 1; w < warps; ++w) amax = larger_magnitude(amax, shared.of_columns[w][c]);
      const uint8_t scale = mxfp8_scale(bits_of(amax) & fp32_magnitude, work.rule);
      work.column_scales[kept.row / side * work.columns + kept.column + c] = scale;
      shared.column_factors[c] = mxfp8_factor(scale);
    }
    if (is_inside(span, kept, part * side)) {
      const float *const magnitudes = &shared.of_rows[r][part * side / pack];
      const float amax = larger_magnitude(largest_magnitude(load_pack<pack>(magnitudes)),
                                          largest_magnitude(load_pack<pack>(magnitudes + pack)));
      const uint8_t scale = mxfp8_scale(bits_of(amax) & fp32_magnitude, work.rule);
      work.row_scales[((kept.row + r) * work.columns + kept.column) / side + part] = scale;
      shared.row_factors[part][r] = mxfp8_factor(scale);
      if (scale >= E8M0::largest) shared.found = true;
    }
  }

  FSDP_DEVICE void third(Shared &shared, const Kept &kept) const {
    const Mxfp8Span &span = batch.spans[kept.span];
    if (shared.found && span.found && threadIdx.x == 0) add_atomically(span.found, count_found(span, shared, kept));
    if (!is_inside(span, kept, lane() * pack)) return;
    const uint64_t at = element(span, kept);
    uint8_t *row = span.work.row + at, *column = span.work.column + at;
    const FourFactors columns{load_pack<pack>(&shared.column_factors[lane() * pack])};
    const float *const row_factors = &shared.row_factors[lane() * pack / side][warp() * rows];
    FSDP_UNROLL
    for (unsigned k = 0; k < rows; ++k, row += span.work.columns, column += span.work.columns) {
      const float factor = row_factors[k];
      put(column, columns.codes(kept.values[k]), span.wide);
      put(row, FourFactors{{factor, factor, factor, factor}}.codes(kept.values[k]), span.wide);
    }
  }

  FSDP_DEVICE static uint64_t count_found(const Mxfp8Span &span, const Shared &shared, const Kept &kept) {
    uint64_t found = 0;
    FSDP_ROLLED
    for (unsigned i = 0; i < threads; ++i) {
      const float factor = shared.row_factors[i / side][i % side];
      if (is_inside(span, kept, i / side * side)) found += !(factor > mxfp8_factor(E8M0::largest));
    }
    return found;
  }

  FSDP_DEVICE static void put(uint8_t *to, uint32_t codes, bool wide) {
    const Pack<uint8_t, pack> bytes = bytes_of(codes);
    if (wide) return store_pack<pack>(to, bytes);
    FSDP_UNROLL
    for (unsigned j = 0; j < pack; ++j) to[j] = bytes.lane[j];
  }
};
static_assert(sizeof(QuantizeTiles) <= max_argument_bytes);

uint64_t tiles_of(const Mxfp8Span &span) { return span.work.rows / QuantizeTiles::side * span.across; }

Mxfp8Span span_of(const Mxfp8Quantize &work, uint64_t *found) {
  const bool wide = reinterpret_cast<uintptr_t>(work.from) % 16 == 0 && misfit(work.row, 1) == 0 &&
                    misfit(work.column, 1) == 0;
  return {work, found, static_cast<uint32_t>((work.columns + QuantizeTiles::threads - 1) / QuantizeTiles::threads),
          wide};
}

// Factors of adjacent elements. at(index) is a place whose next() returns the factor of the element at the index, and
// then those of the following elements. Each place needs one division of indices.
struct RowScales {
  static constexpr unsigned batch = 4;
  const uint8_t *scales;

  struct RowFactors {
    const uint8_t *scales;
    uint64_t index;
    FSDP_DEVICE float next() { return E8M0::value(scales[index++ / mxfp8_block]); }
  };
  FSDP_DEVICE RowFactors at(uint64_t index) const { return {scales, index}; }
};

struct OneScale {
  static constexpr unsigned batch = 4;
  const float *scale_inv;
  FSDP_DEVICE OneScale at(uint64_t) const { return *this; }
  FSDP_DEVICE float next() const { return *scale_inv; }
};

// Elements of a matrix that a thread has under way. With more than two divisions at a time the compiler would keep
// numbers in memory.
constexpr unsigned matrix_batch = 2;

struct MatrixPlace {
  uint64_t columns, row, column;

  FSDP_DEVICE MatrixPlace(uint64_t columns, uint64_t index)
      : columns(columns), row(index / columns), column(index - row * columns) {}
  FSDP_DEVICE void step() {
    if (++column == columns) column = 0, ++row;
  }
};

struct ColumnScales {
  static constexpr unsigned batch = matrix_batch;
  const uint8_t *scales;
  uint64_t columns;

  struct ColumnFactors : MatrixPlace {
    const uint8_t *scales;
    FSDP_DEVICE ColumnFactors(const ColumnScales &all, uint64_t index)
        : MatrixPlace(all.columns, index), scales(all.scales) {}
    FSDP_DEVICE float next() {
      const float factor = E8M0::value(scales[row / mxfp8_block * columns + column]);
      step();
      return factor;
    }
  };
  FSDP_DEVICE ColumnFactors at(uint64_t index) const { return {*this, index}; }
};

struct BlockScales {
  static constexpr unsigned batch = matrix_batch;
  const float *scale_inv;
  uint64_t columns;

  struct BlockFactors : MatrixPlace {
    const float *scale_inv;
    FSDP_DEVICE BlockFactors(const BlockScales &all, uint64_t index)
        : MatrixPlace(all.columns, index), scale_inv(all.scale_inv) {}
    FSDP_DEVICE float next() {
      const float factor = scale_inv[row / fp8_block * fp8_blocks(columns) + column / fp8_block];
      step();
      return factor;
    }
  };
  FSDP_DEVICE BlockFactors at(uint64_t index) const { return {*this, index}; }
};

template <class To, class Scales>
struct Dequantize {
  static constexpr unsigned batch = Scales::batch;
  void *to;
  const uint8_t *codes;
  Scales scales;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<uint8_t, n> stored[m];
    for (unsigned k = 0; k < m; ++k) stored[k] = load_pack<n>(codes + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t at = first + k * step;
      auto place = scales.at(at);
      Pack<float, n> values;
      for (unsigned j = 0; j < n; ++j) values.lane[j] = multiplied(E4M3::value(stored[k].lane[j]), place.next());
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

int quantize_mxfp8(Stream stream, std::span<const Mxfp8Quantize> works, uint64_t *found) {
  QuantizeTiles tiles;
  const auto make_span = [&](const Mxfp8Quantize &work, size_t i) {
    return span_of(work, found ? found + i : nullptr);
  };
  return launch_each(tiles.batch, works, make_span, tiles_of, [&](unsigned blocks) {
    return FSDP_LAUNCH_PHASED(tiles, blocks, tiles.threads, stream);
  });
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
