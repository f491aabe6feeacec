// SPDX-License-Identifier: Apache-2.0
// Sums of squares in the order that is defined at norm_piece in device/work.h, and delays. Least traffic: 4 bytes per
// element. Sums of squares are two launches per 65536 pieces, of up to 56 sums: 16 threads for each piece, 16 pieces in
// a block; then one block a sum that adds the pieces' sums, from which on 16 chains of additions set the pace.
#include <iterator>

#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"
#include "device/cuda/spans.h"

namespace fsdp::device::cuda {
namespace {

constexpr unsigned lanes = norm_sums, pieces_per_block = threads / lanes;
constexpr uint64_t pieces_per_launch = 65536;
static_assert(kernels::scratch_bytes == (pieces_per_launch + 2 * lanes) * sizeof(double));
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
  uint64_t count = 0, granule = 1, per_granule = 1;

  Pieces() = default;
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

// A sum, or as many of its pieces as a launch has room for: only the last of a launch goes on in the next, as its
// first.
struct PieceRange {
  const float *values;
  Pieces pieces;
  uint64_t first, end;  // pieces
  double *result;
  bool is_last;
};
using PieceRanges = Batch<PieceRange, 56>;

// One sum for each piece: those of a block are side by side, 16 for each block.
struct SumPieces {
  static constexpr unsigned threads = cuda::threads;
  struct Shared {
    double lane[pieces_per_block][lanes + 1];  // one more, so that the folding threads use different banks
  };
  PieceRanges parts;
  double *sums;

  FSDP_DEVICE const PieceRange &part() const { return parts.spans[parts.span_of(blockIdx.x)]; }
  FSDP_DEVICE uint64_t piece() const {
    const unsigned which = parts.span_of(blockIdx.x);
    return parts.spans[which].first + uint64_t{blockIdx.x - parts.first_block[which]} * pieces_per_block +
           threadIdx.x / lanes;
  }

  FSDP_DEVICE void first(Shared &shared) const {
    const PieceRange &of = part();
    if (piece() >= of.end) return;
    const unsigned lane = threadIdx.x % lanes;
    shared.lane[threadIdx.x / lanes][lane] =
        add_chain(0, of.values, of.pieces.begin(piece()) + lane, of.pieces.end(piece()), lanes, Square());
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x % lanes == 0 && piece() < part().end)
      sums[uint64_t{blockIdx.x} * pieces_per_block + threadIdx.x / lanes] = fold(shared.lane[threadIdx.x / lanes]);
  }
};
static_assert(sizeof(SumPieces) <= most_argument_bytes);

// A block for each part. The sums of pieces go on from where an earlier launch has left them, and are folded after the
// last.
struct AddPieces {
  static constexpr unsigned threads = 32;
  struct Shared {
    double lane[lanes];
  };
  PieceRanges parts;
  const double *sums;
  // From the launch before, and to the next: the first part may read while the last one writes, which is another sum's.
  const double *carried_in;
  double *carried_out;

  FSDP_DEVICE void first(Shared &shared) const {
    const unsigned lane = threadIdx.x;
    if (lane >= lanes) return;
    const PieceRange &part = parts.spans[blockIdx.x];
    const double *const own = sums + uint64_t{parts.first_block[blockIdx.x]} * pieces_per_block;
    shared.lane[lane] =
        add_chain(part.first == 0 ? 0 : carried_in[lane], own, lane, part.end - part.first, lanes, Itself());
    if (!part.is_last) carried_out[lane] = shared.lane[lane];
  }
  FSDP_DEVICE void second(Shared &shared) const {
    const PieceRange &part = parts.spans[blockIdx.x];
    if (part.is_last && threadIdx.x == 0) *part.result = fold(shared.lane);
  }
};
static_assert(sizeof(AddPieces) <= most_argument_bytes);

// What comes next of the sums that are asked for.
struct Next {
  size_t span = 0;
  uint64_t piece = 0;
};

// The number of blocks. A sum that does not fit is cut between blocks, so that pieces keep their lanes.
uint64_t fill(PieceRanges &parts, std::span<const SquaresSpan> spans, Next &next) {
  constexpr uint64_t most_blocks = pieces_per_launch / pieces_per_block;
  uint64_t blocks = 0;
  for (parts.count = 0; next.span < spans.size() && parts.count < std::size(parts.spans) && blocks < most_blocks;) {
    const SquaresSpan &span = spans[next.span];
    const Pieces pieces(span.count, span.granule);
    const uint64_t left = pieces.total() - next.piece, room = (most_blocks - blocks) * pieces_per_block;
    const uint64_t taken = left < room ? left : room;
    parts.add({span.values, pieces, next.piece, next.piece + taken, span.result, taken == left}, blocks);
    blocks += (taken + pieces_per_block - 1) / pieces_per_block;
    next = taken == left ? Next{next.span + 1, 0} : Next{next.span, next.piece + taken};
  }
  return blocks;
}

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

int sum_squares(Stream stream, std::span<const SquaresSpan> spans, void *scratch) {
  auto *const sums = static_cast<double *>(scratch);
  SumPieces sum = {{}, sums};
  double *const carried[] = {sums + pieces_per_launch, sums + pieces_per_launch + lanes};
  AddPieces add = {{}, sums, carried[0], carried[1]};
  for (Next next; next.span < spans.size();) {
    const auto blocks = static_cast<unsigned>(fill(sum.parts, spans, next));
    if (const int error = blocks ? FSDP_LAUNCH_PHASED(sum, blocks, sum.threads, stream) : 0) return error;
    add.parts = sum.parts;
    if (const int error = FSDP_LAUNCH_PHASED(add, add.parts.count, add.threads, stream)) return error;
    const bool even = add.carried_in == carried[0];
    add.carried_in = carried[even], add.carried_out = carried[!even];
  }
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
