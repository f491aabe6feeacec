// SPDX-License-Identifier: Apache-2.0
// FP8 with fp32 scales. The kernels find amaxes (4 bytes of traffic per element), scales, codes (4 + 1), and blocks of
// 128 x 128 (4 + 1), whose numbers stay in registers until the scale is known.
#include "device/cuda/float8_elements.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

// The magnitudes that the threads of a block have found, and the largest of each 16 threads.
template <unsigned threads>
struct Magnitudes {
  static constexpr unsigned share = 16, parts = threads / share;
  alignas(16) float of_thread[threads];
  alignas(16) float of_part[parts];

  // Called in the second phase.
  FSDP_DEVICE void reduce() {
    if (threadIdx.x < parts) of_part[threadIdx.x] = largest<share>(of_thread + threadIdx.x * share);
  }
  FSDP_DEVICE float result() const { return largest<parts>(of_part); }

 private:
  template <unsigned count>
  FSDP_DEVICE static float largest(const float *magnitudes) {
    float amax = 0;
    FSDP_UNROLL
    for (unsigned i = 0; i < count; i += pack)
      amax = larger_magnitude(amax, largest_magnitude(load_pack<pack>(magnitudes + i)));
    return amax;
  }
};

// Rounding keeps the order of numbers, so the rounded largest number is the largest of the rounded numbers.
FSDP_DEVICE float rounded_amax(float amax, bool via_bf16) {
  return float_of(bits_of(via(amax, via_bf16)) & fp32_magnitude);
}

constexpr uint64_t max_amax_blocks = 1024;  // for a span: a few for each of a GPU's processors

struct AmaxInto {
  const float *values;
  float *amax;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<float, n> loaded[m];
    for (unsigned k = 0; k < m; ++k) loaded[k] = load_pack<n>(values + first + k * step);
    for (unsigned k = 0; k < m; ++k)
      for (unsigned j = 0; j < n; ++j) *amax = larger_magnitude(*amax, loaded[k].lane[j]);
  }
};

struct FindAmaxes {
  static constexpr unsigned threads = cuda::threads, per_thread = 4, most = 96;
  using Shared = Magnitudes<threads>;
  Batch<AmaxSpan, most> batch;

  FSDP_BOTH static Division division(const AmaxSpan &span) {
    return divide(span.count, misfit(span.values, sizeof(float)), true);
  }
  FSDP_BOTH static uint64_t blocks(const Division &division) {
    const uint64_t wanted = blocks_of<per_thread>(division);
    return wanted < max_amax_blocks ? wanted : max_amax_blocks;
  }

  FSDP_DEVICE void first(Shared &shared) const {
    const unsigned which = batch.span_of(blockIdx.x);
    const AmaxSpan &span = batch.spans[which];
    const Division divided = division(span);
    const uint64_t parts = blocks_of<per_thread>(divided), step = blocks(divided);
    const uint64_t whole = divided.wide ? divided.packs / (threads * per_thread) : 0;
    uint64_t part = blockIdx.x - batch.first_block[which];
    float amax = 0;
    const AmaxInto work{span.values, &amax};
    if (part == 0 && whole && threadIdx.x < divided.edges()) work.run<1, 1>(divided.edge(threadIdx.x), 0);
    FSDP_ROLLED
    for (; part < whole; part += step)
      work.run<pack, per_thread>(divided.head + (part * threads * per_thread + threadIdx.x) * pack, threads * pack);
    FSDP_ROLLED
    for (; part < parts; part += step) run_block<per_thread>(work, divided, part, threadIdx.x);
    shared.of_thread[threadIdx.x] = amax;
  }
  FSDP_DEVICE void second(Shared &shared) const { shared.reduce(); }
  FSDP_DEVICE void third(Shared &shared) const {
    if (threadIdx.x != 0) return;
    const AmaxSpan &span = batch.spans[batch.span_of(blockIdx.x)];
    const uint32_t amax = bits_of(rounded_amax(shared.result(), span.via_bf16));
    raise_atomically(reinterpret_cast<uint32_t *>(span.amax), amax < fp32_infinity ? amax : fp32_infinity);
  }
};
static_assert(sizeof(FindAmaxes) <= max_argument_bytes && FindAmaxes::most <= threads);

__global__ void clear_amaxes(const __grid_constant__ FindAmaxes work) {
  if (threadIdx.x < work.batch.count) *work.batch.spans[threadIdx.x].amax = 0;
}

__global__ void make_scales(Fp8Scales work) {
  const uint64_t i = uint64_t{blockIdx.x} * threads + threadIdx.x;
  if (i >= work.count) return;
  const float scale = fp8_scale(largest_amax(work, i), work.power_of_two);
  work.scales[i] = scale;
  work.scale_inv[i] = divided(1, scale);
}

struct QuantizeFp8 {
  Fp8Quantize work;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    const float scale = *work.scale;
    Pack<float, n> values[m];
    for (unsigned k = 0; k < m; ++k) values[k] = load_pack<n>(work.from + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      if constexpr (n == pack) {
        if (work.via_bf16) round_to_bf16<true>(values[k]);
        store_pack<n>(work.codes + first + k * step, bytes_of(scaled_codes(values[k], scale)));
      } else {
        work.codes[first + k * step] = scaled_code(via(values[k].lane[0], work.via_bf16), scale);
      }
    }
  }
};

struct QuantizeAllFp8 {
  static constexpr unsigned per_thread = 4, most = 80;
  Batch<Fp8Quantize, most> batch;

  FSDP_BOTH static Division division(const Fp8Quantize &work) {
    const unsigned at = misfit(work.from, sizeof(float));
    return divide(work.count, at, misfit(work.codes, 1) == at);
  }
};
static_assert(sizeof(QuantizeAllFp8) <= max_argument_bytes);

__global__ void __launch_bounds__(threads) quantize_parts(const __grid_constant__ QuantizeAllFp8 all) {
  const unsigned which = all.batch.span_of(blockIdx.x);
  const Fp8Quantize &work = all.batch.spans[which];
  run_block<QuantizeAllFp8::per_thread>(QuantizeFp8{work}, QuantizeAllFp8::division(work),
                                        blockIdx.x - all.batch.first_block[which], threadIdx.x);
}

struct Fp8BlockSpan {
  Fp8BlockQuantize work;
  uint64_t *found;  // NULL: numbers that are not finite are not counted
  uint32_t across;  // number of blocks in a row of blocks
  bool wide;        // columns and arrays are aligned to four elements
};

// A warp has every 16th row of a block of 128 x 128. A thread has four numbers of each row: adjacent ones if these are
// aligned, else every 32nd.
struct QuantizeBlocks {
  static constexpr unsigned threads = 512, side = fp8_block, lanes = 32, warps = threads / lanes;
  static constexpr unsigned rows = side / warps, most = 44;
  struct BlockMagnitudes {
    Magnitudes<threads> amaxes;
    uint32_t found[threads];  // set if the thread's amax is not finite
  };
  using Shared = BlockMagnitudes;
  struct BlockNumbers {
    Pack<float, pack> values[rows];
    unsigned span;
    uint64_t row, column;  // of this thread's first number
  };
  using Kept = BlockNumbers;
  Batch<Fp8BlockSpan, most> batch;

  // Visits the packs of this thread: visit(k, number of the first element, number of elements in the matrix).
  template <bool wide, class Visit>
  FSDP_DEVICE static void each(const Fp8BlockQuantize &work, const Kept &kept, const Visit &visit) {
    const uint64_t columns = work.columns, step = warps * columns;
    uint32_t rows_left = kept.row < work.rows ? smaller(work.rows - kept.row, side) : 0, count = pack;
    const uint32_t columns_left = kept.column < columns ? smaller(columns - kept.column, side) : 0;
    if constexpr (wide)
      rows_left = columns_left ? rows_left : 0;
    else
      count = (columns_left + lanes - 1) / lanes;
    uint64_t at = kept.row * columns + kept.column;
    FSDP_UNROLL
    for (unsigned k = 0; k < rows; ++k, at += step) visit(k, at, k * warps < rows_left ? count : 0);
  }
  FSDP_DEVICE static uint32_t smaller(uint64_t a, uint32_t b) { return a < b ? static_cast<uint32_t>(a) : b; }

  FSDP_DEVICE void first(Shared &shared, Kept &kept) const {
    kept.span = batch.span_of(blockIdx.x);
    const Fp8BlockSpan &span = batch.spans[kept.span];
    const uint32_t block = blockIdx.x - batch.first_block[kept.span];
    kept.row = uint64_t{block / span.across} * side + threadIdx.x / lanes;
    kept.column = uint64_t{block % span.across} * side + threadIdx.x % lanes * (span.wide ? pack : 1);
    load(span, kept);
    float amax = 0;
    FSDP_UNROLL
    for (const Pack<float, pack> &values : kept.values) amax = larger_magnitude(amax, largest_magnitude(values));
    if (!is_finite(amax)) shared.found[threadIdx.x] = count_nonfinite(kept);
    if (span.work.via_bf16) {
      FSDP_UNROLL
      for (Pack<float, pack> &values : kept.values) round_to_bf16<true>(values);
    }
    shared.amaxes.of_thread[threadIdx.x] = amax;
  }

  FSDP_DEVICE static void load(const Fp8BlockSpan &span, Kept &kept) {
    const float *const from = span.work.from;
    FSDP_UNROLL
    for (Pack<float, pack> &values : kept.values) values = {};
    if (span.wide) {
      each<true>(span.work, kept, [&](unsigned k, uint64_t at, unsigned count) {
        if (count) kept.values[k] = load_pack<pack>(from + at);
      });
    } else {
      each<false>(span.work, kept, [&](unsigned k, uint64_t at, unsigned count) {
        FSDP_UNROLL
        for (unsigned j = 0; j < pack; ++j)
          if (j < count) kept.values[k].lane[j] = from[at + j * lanes];
      });
    }
  }

  FSDP_DEVICE static uint32_t count_nonfinite(const Kept &kept) {
    uint32_t found = 0;
    FSDP_UNROLL
    for (const Pack<float, pack> &values : kept.values)
      FSDP_UNROLL
      for (unsigned j = 0; j < pack; ++j) found += !is_finite(values.lane[j]);
    return found;
  }

  FSDP_DEVICE void second(Shared &shared, const Kept &) const { shared.amaxes.reduce(); }

  FSDP_DEVICE void third(Shared &shared, const Kept &kept) const {
    const Fp8BlockSpan &span = batch.spans[kept.span];
    const float amax = shared.amaxes.result();
    const float scale = fp8_scale(rounded_amax(amax, span.work.via_bf16), span.work.power_of_two);
    if (threadIdx.x == 0) {
      span.work.scale_inv[blockIdx.x - batch.first_block[kept.span]] = divided(1, scale);
      if (span.found && !is_finite(amax)) add_atomically(span.found, all_found(shared));
    }
    store_codes(span, kept, scale);
  }

  FSDP_DEVICE static void store_codes(const Fp8BlockSpan &span, const Kept &kept, float scale) {
    uint8_t *const to = span.work.codes;
    if (span.wide)
      return each<true>(span.work, kept, [&](unsigned k, uint64_t at, unsigned count) {
        if (count) store_pack<pack>(to + at, bytes_of(scaled_codes(kept.values[k], scale)));
      });
    each<false>(span.work, kept, [&](unsigned k, uint64_t at, unsigned count) {
      const Pack<uint8_t, pack> codes = bytes_of(scaled_codes(kept.values[k], scale));
      FSDP_UNROLL
      for (unsigned j = 0; j < pack; ++j)
        if (j < count) to[at + j * lanes] = codes.lane[j];
    });
  }

  FSDP_DEVICE static uint64_t all_found(const Shared &shared) {
    uint64_t found = 0;
    FSDP_ROLLED
    for (unsigned i = 0; i < threads; ++i)
      if (!is_finite(shared.amaxes.of_thread[i])) found += shared.found[i];
    return found;
  }
};
static_assert(sizeof(QuantizeBlocks) <= max_argument_bytes);

uint64_t blocks_of_matrix(const Fp8BlockSpan &span) { return fp8_blocks(span.work.rows) * span.across; }

unsigned blocks_for(uint64_t count) { return static_cast<unsigned>((count + threads - 1) / threads); }

}  // namespace

namespace kernels {

int find_amaxes(Stream stream, std::span<const AmaxSpan> spans) {
  FindAmaxes work;
  const auto one_each = [](const AmaxSpan &) { return uint64_t{1}; };
  if (const int error = launch_all(work.batch, spans, one_each, [&](unsigned) {
        return FSDP_LAUNCH(clear_amaxes, 1, threads, stream, work);
      }))
    return error;
  const auto blocks = [](const AmaxSpan &span) { return FindAmaxes::blocks(FindAmaxes::division(span)); };
  return launch_all(work.batch, spans, blocks, [&](unsigned count) {
    return FSDP_LAUNCH_PHASED(work, count, work.threads, stream);
  });
}

int find_fp8_scales(Stream stream, const Fp8Scales &work) {
  return work.count ? FSDP_LAUNCH(make_scales, blocks_for(work.count), threads, stream, work) : 0;
}

int quantize_fp8(Stream stream, std::span<const Fp8Quantize> works) {
  QuantizeAllFp8 all;
  const auto blocks = [](const Fp8Quantize &work) {
    return blocks_of<QuantizeAllFp8::per_thread>(QuantizeAllFp8::division(work));
  };
  return launch_all(all.batch, works, blocks,
                    [&](unsigned count) { return FSDP_LAUNCH(quantize_parts, count, threads, stream, all); });
}

int quantize_fp8_blocks(Stream stream, std::span<const Fp8BlockQuantize> works, uint64_t *found) {
  QuantizeBlocks blocks;
  const auto span_of = [&](const Fp8BlockQuantize &work, size_t i) {
    const bool wide = reinterpret_cast<uintptr_t>(work.from) % 16 == 0 && misfit(work.codes, 1) == 0 &&
                      work.columns % pack == 0;
    return Fp8BlockSpan{work, found ? found + i : nullptr, static_cast<uint32_t>(fp8_blocks(work.columns)), wide};
  };
  return launch_each(blocks.batch, works, span_of, blocks_of_matrix, [&](unsigned count) {
    return FSDP_LAUNCH_PHASED(blocks, count, blocks.threads, stream);
  });
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
