// SPDX-License-Identifier: Apache-2.0
// Sums of squares in the order that norm_piece in device/work.h defines, and delays. Least traffic: 4 bytes per
// element. Up to 32768 pieces, of up to 56 sums, take two launches. The first launch has 16 threads for each piece and
// 16 pieces in a block. The second launch has a block for each sum, which adds the sums of pieces in 16 chains. An
// addition waits 8 cycles of an H100 for the previous one, and longer for memory, so the addends of a chain are fetched
// ahead. A sum of more pieces has a launch for each 32768 of them. In each of these launches one block adds the pieces
// of the previous launch while the other blocks read. The pieces of the last one are added in a launch of their own (13
// us at most, calculated).
#include <iterator>
#include <type_traits>

#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

constexpr unsigned lanes = norm_sums, pieces_per_block = threads / lanes;
constexpr uint64_t pieces_per_launch = 32768;
// Sums of pieces of this launch and of the previous one, and the chains that have not reached their end.
static_assert(kernels::scratch_bytes >= (2 * pieces_per_launch + lanes) * sizeof(double));
static_assert(pieces_per_launch % lanes == 0, "a piece keeps its number modulo the lanes in every launch");

// Adds, in order, the values of a thread among values that the threads of a group share: from[0], from[stride] ...
// `count` of them, squared or unchanged. Each addition waits for the previous one, and loads wait for memory. So
// `groups` times `ahead` loads are under way at once, and a group is loaded again when it has been added. Missing
// values of the last group count as zeros, which do not change a sum that began at zero.
template <unsigned stride, unsigned groups, class From, class Count, class Term>
FSDP_DEVICE double add_chain(double sum, From from, Count count, Term term) {
  using Value = std::remove_cvref_t<decltype(from[0])>;
  constexpr unsigned ahead = 16, all = groups * ahead;
  Count at = 0;
  if (count >= all) {
    Value loaded[groups][ahead];
    FSDP_UNROLL
    for (unsigned g = 0; g < groups; ++g)
      FSDP_UNROLL
      for (unsigned k = 0; k < ahead; ++k) loaded[g][k] = from[(g * ahead + k) * stride];
    for (; at + 2 * all <= count; at += all)
      FSDP_UNROLL
      for (unsigned g = 0; g < groups; ++g) {
        FSDP_UNROLL
        for (unsigned k = 0; k < ahead; ++k) sum = added(sum, term(loaded[g][k]));
        FSDP_UNROLL
        for (unsigned k = 0; k < ahead; ++k) loaded[g][k] = from[(at + all + g * ahead + k) * stride];
      }
    FSDP_UNROLL
    for (unsigned g = 0; g < groups; ++g)
      FSDP_UNROLL
      for (unsigned k = 0; k < ahead; ++k) sum = added(sum, term(loaded[g][k]));
    at += all;
  }
  for (; at < count; at += ahead) {
    Value loaded[ahead];
    FSDP_UNROLL
    for (unsigned k = 0; k < ahead; ++k) loaded[k] = at + k < count ? from[(at + k) * stride] : Value();
    FSDP_UNROLL
    for (unsigned k = 0; k < ahead; ++k) sum = added(sum, term(loaded[k]));
  }
  return sum;
}

// The number of the `count` values that belong to this lane.
FSDP_DEVICE unsigned own_of(unsigned count, unsigned lane) { return (count + lanes - 1 - lane) / lanes; }

struct Square {
  FSDP_DEVICE double operator()(float value) const {
    return multiplied(static_cast<double>(value), static_cast<double>(value));
  }
};

// Main weights of 16 bits, with or without the rests that make them fp32.
struct CompactSource {
  const uint16_t *values;
  const int16_t *rest;
  bool is_half;

  FSDP_DEVICE SplitWeight operator[](uint64_t i) const {
    return {values[i], rest ? rest[i] : static_cast<int16_t>(0)};
  }
  FSDP_DEVICE CompactSource operator+(uint64_t offset) const {
    return {values + offset, rest ? rest + offset : rest, is_half};
  }
};
struct CompactSquare {
  bool is_half;
  FSDP_DEVICE double operator()(SplitWeight weight) const {
    return Square()(is_half ? F16::value(weight.upper) : float_of(join_weight(weight.upper, weight.rest)));
  }
};

FSDP_DEVICE Square square_of(const float *) { return {}; }
FSDP_DEVICE CompactSquare square_of(const CompactSource &source) { return {source.is_half}; }

struct Itself {
  FSDP_DEVICE double operator()(double value) const { return value; }
};

FSDP_DEVICE double fold(double *lane) {
  for (unsigned half = lanes / 2; half > 0; half /= 2)
    for (unsigned j = 0; j < half; ++j) lane[j] = added(lane[j], lane[j + half]);
  return lane[0];
}

struct PieceExtent {
  uint64_t begin;
  unsigned count;
};

// The places of the pieces in `count` elements.
struct Pieces {
  uint64_t count = 0, granule = 1, per_granule = 1;

  Pieces() = default;
  Pieces(uint64_t count, uint64_t granule)
      : count(count), granule(granule ? granule : count), per_granule((this->granule + norm_piece - 1) / norm_piece) {}
  uint64_t total() const {
    return count == 0 ? 0 : count / granule * per_granule + (count % granule + norm_piece - 1) / norm_piece;
  }
  // No division is needed for pieces of the first granule, which is often the only one, nor if each granule is one
  // piece.
  FSDP_DEVICE PieceExtent at(uint64_t piece) const {
    const uint64_t which = piece < per_granule ? 0 : per_granule == 1 ? piece : piece / per_granule;
    const uint64_t in_granule = (piece - which * per_granule) * norm_piece, begin = which * granule + in_granule;
    uint64_t left = granule - in_granule;
    if (left > count - begin) left = count - begin;
    return {begin, static_cast<unsigned>(left < norm_piece ? left : norm_piece)};
  }
};

// A sum, or as many of its pieces as a launch has room for. Only the last sum of a launch may continue in the next
// launch, as its first sum.
template <class Values>
struct PieceRange {
  Values values;
  Pieces pieces;
  uint64_t first, end;  // numbers of pieces
  double *result;
  bool is_last;
};
template <class Values>
using PieceRanges = Batch<PieceRange<Values>, sizeof(Values) == sizeof(float *) ? 56 : 44>;

// Sums of pieces with which the chains continue. The chains are 0 before the first piece.
struct Chains {
  const double *sums;
  unsigned count;
  bool is_first;
  double *lanes_before;  // the chains' sums before and after

  FSDP_DEVICE void fetch(unsigned thread, unsigned threads) const {
    for (unsigned at = thread * lanes; at < count; at += threads * lanes) prefetch(sums + at);
  }
  template <unsigned groups>
  FSDP_DEVICE double add(unsigned lane) const {
    return add_chain<lanes, groups>(is_first ? 0 : lanes_before[lane], sums + lane, own_of(count, lane), Itself());
  }
};

// Makes one sum for each piece. The pieces of a block are adjacent, 16 for each block. If a sum continues from the
// previous launch, there is one more block, the first, which adds the pieces left by that launch.
template <class Values>
struct SumPieces {
  static constexpr unsigned threads = cuda::threads;
  struct Shared {
    double lane[pieces_per_block][lanes + 1];  // one more, so that the folding threads use different banks
  };
  PieceRanges<Values> parts;
  double *sums;
  Chains left;

  FSDP_DEVICE bool adds() const { return left.count > 0 && blockIdx.x == 0; }
  FSDP_DEVICE unsigned block() const { return blockIdx.x - (left.count > 0); }

  FSDP_DEVICE void first(Shared &shared) const {
    if (adds()) return add_left();
    const unsigned which = parts.span_of(block()), lane = threadIdx.x % lanes;
    const PieceRange<Values> &part = parts.spans[which];
    const uint64_t number =
        part.first + uint64_t{block() - parts.first_block[which]} * pieces_per_block + threadIdx.x / lanes;
    const PieceExtent piece = number < part.end ? part.pieces.at(number) : PieceExtent{0, 0};
    shared.lane[threadIdx.x / lanes][lane] =
        add_chain<lanes, 2>(0, part.values + piece.begin + lane, own_of(piece.count, lane), square_of(part.values));
  }
  // Threads after the last piece of a part have no piece.
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x % lanes == 0 && !adds())
      sums[uint64_t{block()} * pieces_per_block + threadIdx.x / lanes] = fold(shared.lane[threadIdx.x / lanes]);
  }
  FSDP_DEVICE void add_left() const {
    if (threadIdx.x < lanes)
      left.lanes_before[threadIdx.x] = left.add<2>(threadIdx.x);
    else
      left.fetch(threadIdx.x - lanes, threads - lanes);
  }
};
static_assert(sizeof(SumPieces<const float *>) <= max_argument_bytes);
static_assert(sizeof(SumPieces<CompactSource>) <= max_argument_bytes);

// One block for each sum that ends in a launch.
template <class Values>
struct AddPieces {
  static constexpr unsigned threads = cuda::threads;
  struct Shared {
    double lane[lanes];
  };
  PieceRanges<Values> parts;
  double *sums, *lanes_before;

  FSDP_BOTH Chains chains(const PieceRange<Values> &part, uint32_t first_block) const {
    return {sums + uint64_t{first_block} * pieces_per_block, static_cast<unsigned>(part.end - part.first),
            part.first == 0, lanes_before};
  }
  FSDP_DEVICE void first(Shared &shared) const {
    const Chains own = chains(parts.spans[blockIdx.x], parts.first_block[blockIdx.x]);
    if (threadIdx.x < lanes)
      shared.lane[threadIdx.x] = own.add<6>(threadIdx.x);
    else
      own.fetch(threadIdx.x - lanes, threads - lanes);
  }
  FSDP_DEVICE void second(Shared &shared) const {
    if (threadIdx.x == 0) *parts.spans[blockIdx.x].result = fold(shared.lane);
  }
};
static_assert(sizeof(AddPieces<const float *>) <= max_argument_bytes);
static_assert(sizeof(AddPieces<CompactSource>) <= max_argument_bytes);

// The next piece of the requested sums.
struct Next {
  size_t span = 0;
  uint64_t piece = 0;
};

const float *values_of(const SquaresSpan &span) { return span.values; }
CompactSource values_of(const CompactSquaresSpan &span) {
  return {span.values, span.rest, span.dtype == FSDP_FLOAT16};
}

// Returns the number of blocks. A sum that does not fit is divided between blocks, so that pieces keep their lanes.
template <class Values, class Span>
uint64_t fill(PieceRanges<Values> &parts, std::span<const Span> spans, Next &next) {
  constexpr uint64_t max_blocks = pieces_per_launch / pieces_per_block;
  uint64_t blocks = 0;
  for (parts.count = 0; next.span < spans.size() && parts.count < std::size(parts.spans) && blocks < max_blocks;) {
    const Span &span = spans[next.span];
    const Pieces pieces(span.count, span.granule);
    const uint64_t left = pieces.total() - next.piece, room = (max_blocks - blocks) * pieces_per_block;
    const uint64_t taken = left < room ? left : room;
    parts.add({values_of(span), pieces, next.piece, next.piece + taken, span.result, taken == left}, blocks);
    blocks += (taken + pieces_per_block - 1) / pieces_per_block;
    next = taken == left ? Next{next.span + 1, 0} : Next{next.span, next.piece + taken};
  }
  return blocks;
}

// Only the last sum may end in a later launch.
template <class Values>
Chains take_left(AddPieces<Values> &add) {
  const unsigned last = add.parts.count - 1;
  if (add.parts.spans[last].is_last) return {};
  --add.parts.count;
  return add.chains(add.parts.spans[last], add.parts.first_block[last]);
}

template <class Values, class Span>
int sum_pieces(kernels::Stream stream, std::span<const Span> spans, void *scratch) {
  auto *const sums = static_cast<double *>(scratch);
  double *const halves[] = {sums, sums + pieces_per_launch}, *const lanes_before = sums + 2 * pieces_per_launch;
  SumPieces<Values> sum = {{}, halves[0], {}};
  for (Next next; next.span < spans.size(); sum.sums = halves[sum.sums == halves[0]]) {
    const auto blocks = static_cast<unsigned>(fill<Values>(sum.parts, spans, next)) + (sum.left.count > 0);
    if (const int error = blocks ? FSDP_LAUNCH_PHASED(sum, blocks, sum.threads, stream) : 0) return error;
    AddPieces<Values> add = {sum.parts, sum.sums, lanes_before};
    sum.left = take_left(add);
    if (add.parts.count == 0) continue;
    if (const int error = FSDP_LAUNCH_PHASED(add, add.parts.count, add.threads, stream)) return error;
  }
  return 0;
}

__global__ void add_values(double *result, const double *values, uint64_t count) {
  *result = add_chain<1, 2>(0, values, count, Itself());
}

constexpr double largest = 1.7976931348623157e308;  // the largest finite number; comparisons with NaN are false

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
  return sum_pieces<const float *>(stream, spans, scratch);
}

int sum_compact_squares(Stream stream, std::span<const CompactSquaresSpan> spans, void *scratch) {
  return sum_pieces<CompactSource>(stream, spans, scratch);
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
