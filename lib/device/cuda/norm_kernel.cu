// SPDX-License-Identifier: Apache-2.0
// Sums of squares in the order that is defined at norm_piece in device/work.h, and delays. Least traffic: 4 bytes per
// element. A sum of squares is two launches per 65536 pieces: 16 threads for each piece, 16 pieces
// in a block; then one block that adds the pieces' sums, from which on 16 chains of additions set the pace.
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

constexpr unsigned lanes = norm_sums, pieces_per_block = threads / lanes;
constexpr uint64_t pieces_per_launch = 65536;
static_assert(kernels::scratch_bytes == (pieces_per_launch + lanes) * sizeof(double));
static_assert(pieces_per_launch % lanes == 0, "a piece keeps its number modulo the lanes in every launch");

// values[at], values[at + stride] ... before end, squared or as they are, added to sum in order. Loads go ahead of the
// chain.
template <class Value, class Term>
FSDP_DEVICE double add_chain(double sum, const Value *values, uint64_t at, uint64_t end, unsigned stride, Term term) {
  constexpr unsigned ahead = 8;
  for (; at + (ahead - 1) * stride < end; at += ahead * stride) {
    Value loaded[ahead];
    for (unsigned k = 0; k < ahead; ++k) loaded[k] = values[at + k * stride];
    for (unsigned k = 0; k < ahead; ++k) sum = added(sum, term(loaded[k]));
  }
  for (; at < end; at += stride) sum = added(sum, term(values[at]));
  return sum;
}

struct Square {
  FSDP_DEVICE double operator()(float value) const {
    return multiplied(static_cast<double>(value), static_cast<double>(value));
  }
};
struct Itself {
  FSDP_DEVICE double operator()(double value) const { return value; }
};

FSDP_DEVICE double fold(double *lane) {
  for (unsigned half = lanes / 2; half > 0; half /= 2)
    for (unsigned j = 0; j < half; ++j) lane[j] = added(lane[j], lane[j + half]);
  return lane[0];
}

// Where the pieces are in `count` elements.
struct Pieces {
  uint64_t count, granule, per_granule;

  Pieces(uint64_t count, uint64_t granule)
      : count(count), granule(granule ? granule : count), per_granule((this->granule + norm_piece - 1) / norm_piece) {}
  uint64_t total() const {
    return count == 0 ? 0 : count / granule * per_granule + (count % granule + norm_piece - 1) / norm_piece;
  }
  FSDP_DEVICE uint64_t begin(uint64_t piece) const {
    return piece / per_granule * granule + piece % per_granule * norm_piece;
  }
  FSDP_DEVICE uint64_t end(uint64_t piece) const {
    uint64_t end = begin(piece) + norm_piece;
    const uint64_t granule_end = (piece / per_granule + 1) * granule;
    if (end > granule_end) end = granule_end;
    return end < count ? end : count;
  }
};

// to[p] = the sum of piece first + p.
struct SumPieces {
  static constexpr unsigned threads = cuda::threads;
  struct Shared {
    double lane[pieces_per_block][lanes + 1];  // one more, so that the folding threads use different banks
  };
  const float *values;
  Pieces pieces;
  uint64_t first_piece, end_piece;
  double *to;

  FSDP_DEVICE uint64_t piece() const {
    return first_piece + uint64_t{blockIdx.x} * pieces_per_block + threadIdx.x / lanes;
  }

  FSDP_DEVICE void first(Shared &shared) const {
    if (piece() >= end_piece) return;
    const unsigned lane = threadIdx.x % lanes;
    shared.lane[threadIdx.x / lanes][lane] =
        add_chain(0, values, pieces.begin(piece()) + lane, pieces.end(piece()), lanes, Square());
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x % lanes == 0 && piece() < end_piece)
      to[piece() - first_piece] = fold(shared.lane[threadIdx.x / lanes]);
  }
};

// The sums of pieces go on from where an earlier launch has left them, and are folded after the last.
struct AddPieces {
  static constexpr unsigned threads = 32;
  struct Shared {
    double lane[lanes];
  };
  const double *sums;
  uint64_t count;
  double *carried;
  bool is_first, is_last;
  double *result;

  FSDP_DEVICE void first(Shared &shared) const {
    const unsigned lane = threadIdx.x;
    if (lane >= lanes) return;
    shared.lane[lane] = add_chain(is_first ? 0 : carried[lane], sums, lane, count, lanes, Itself());
    carried[lane] = shared.lane[lane];
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (is_last && threadIdx.x == 0) *result = fold(shared.lane);
  }
};

__global__ void add_values(double *result, const double *values, uint64_t count) {
  *result = add_chain(0, values, 0, count, 1, Itself());
}

constexpr double largest = 1.7976931348623157e308;  // that is finite; no NaN compares with it

__global__ void make_norm(Norm *to, const NormShares shares) {
  Norm norm{0, 0, 1};
  for (uint32_t s = 0; s < shares.slots; ++s)
    norm.squares = added(norm.squares, shares.shares[s % shares.slices * shares.inner + s / shares.slices]);
  norm.norm = root(norm.squares);
  if (shares.max_norm > 0 && norm.norm > shares.max_norm && norm.norm <= largest)
    norm.factor = narrowed(divided(shares.max_norm, norm.norm));
  *to = norm;
}

__global__ void spend_time(uint32_t microseconds) { spend(microseconds); }

}  // namespace

namespace kernels {

int sum_squares(Stream stream, double *result, const float *values, uint64_t count, uint64_t granule, void *scratch) {
  auto *const sums = static_cast<double *>(scratch);
  const Pieces pieces(count, granule);
  uint64_t first = 0;
  do {
    const uint64_t left = pieces.total() - first, taken = left < pieces_per_launch ? left : pieces_per_launch;
    const SumPieces sum{values, pieces, first, first + taken, sums};
    const auto blocks = static_cast<unsigned>((taken + pieces_per_block - 1) / pieces_per_block);
    if (const int error = blocks ? FSDP_LAUNCH_PHASED(sum, blocks, sum.threads, stream) : 0) return error;
    const AddPieces add{sums, taken, sums + pieces_per_launch, first == 0, taken == left, result};
    if (const int error = FSDP_LAUNCH_PHASED(add, 1, add.threads, stream)) return error;
    first += taken;
  } while (first < pieces.total());
  return 0;
}

int sum_values(Stream stream, double *result, const double *values, uint64_t count) {
  return FSDP_LAUNCH(add_values, 1, 1, stream, result, values, count);
}

int find_norm(Stream stream, Norm *norm, const NormShares &shares) {
  return FSDP_LAUNCH(make_norm, 1, 1, stream, norm, shares);
}

int delay(Stream stream, uint32_t microseconds) { return FSDP_LAUNCH(spend_time, 1, 1, stream, microseconds); }

}  // namespace kernels
}  // namespace fsdp::device::cuda
