// SPDX-License-Identifier: Apache-2.0

#include "transport/call/launch.h"

#include <bit>
#include <cstring>

#include "base/dtype.h"
#include "device/host/kernels.h"

namespace fsdp::transport {

void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate) {
  if (!accumulate)
    return device::kernels::rank_sum({base, stride, ranks, FSDP_FLOAT32, FSDP_FLOAT32, to, count, 1.0F, false});
  for (uint32_t r = 0; r < ranks; ++r) device::kernels::add(to, FSDP_FLOAT32, base + r * stride, FSDP_FLOAT32, count);
}

namespace {

uint64_t mix(uint64_t hash, uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;  // of the golden ratio
  return hash ^ hash >> 29;
}

}  // namespace

const char *operation_name(Operation operation) noexcept {
  switch (operation) {
    case Operation::all_gather: return "all_gather";
    case Operation::reduce_scatter: return "reduce_scatter";
    case Operation::all_reduce: return "all_reduce";
    case Operation::broadcast: return "broadcast";
    case Operation::barrier: return "barrier";
    case Operation::exchange: return "exchange";
  }
  return "an unknown operation";
}

void Fingerprint::start(Operation op, const Tag &tag) noexcept {
  if (tag.call) {
    *this = *tag.call;
    hash = mix(hash, static_cast<uint64_t>(op));
    return;
  }
  operation = op;
  call = 0;
  what = tag.what;
  elements = 0;
  dtype = 0;
  hash = mix(mix(1, static_cast<uint64_t>(op)), tag.what);
  for (const char *c = tag.name; *c; ++c) hash = mix(hash, static_cast<unsigned char>(*c));
  const size_t note = ::strnlen(tag.note, sizeof name - 1), length = ::strnlen(tag.name, sizeof name - 1 - note);
  std::memcpy(name, tag.name, length);
  std::memcpy(name + length, tag.note, note);
  name[length + note] = '\0';
}

void Fingerprint::add_span(fsdp_dtype of, fsdp_dtype wire_dtype, uint64_t count) noexcept {
  add(of, static_cast<uint64_t>(of) << 32 | static_cast<uint32_t>(wire_dtype), count);
}

void Fingerprint::add_move(const Move &move) noexcept {
  add(0, static_cast<uint64_t>(move.source) << 32 | move.target, move.bytes);
}

void Fingerprint::add(fsdp_dtype of, uint64_t kind, uint64_t count) noexcept {
  hash = mix(mix(hash, kind), count);
  if (call) return;
  dtype = of;
  elements += count;
}

void Fingerprint::number_call(uint64_t number) noexcept {
  call = number + 1;
  hash = mix(hash, call);
}

std::string Fingerprint::text(uint64_t number) const {
  const std::string object(name, ::strnlen(name, sizeof name));
  if (call) number = call - 1;
  if (operation == Operation::barrier) return format_text("barrier of '{}' (#{})", object, number);
  if (dtype == 0) return format_text("{} of '{}' (#{}, {} bytes)", operation_name(operation), object, number, elements);
  return format_text("{} of '{}' (#{}, {}, {} elements)", operation_name(operation), object, number, dtype_name(dtype),
                     elements);
}

namespace {

void require_plain(const Sum &sum, bool accumulate, const Tag &tag) {
  if (!sum.plain())
    fail(FSDP_INTERNAL, "a sum of '{}' by messages: {} sent as {}, times {}; they are float32, unscaled", tag.name,
         dtype_name(sum.dtype), dtype_name(sum.wire), sum.factor);
  if (sum.everywhere && (accumulate || sum.to.own != sum.from.own))
    fail(FSDP_INTERNAL, "a sum of '{}' by messages goes everywhere, and is not in place", tag.name);
}

// Peers read the addends in place, so these must be in an arena.
void require_arenas(const Sum &sum, const Tag &tag) {
  if (!sum.from.arena || (sum.everywhere && !sum.to.arena))
    fail(FSDP_INTERNAL, "a sum of '{}' is of memory that no other rank reads", tag.name);
}

void require_equal_slices(const Sum &sum, uint32_t ranks, const Tag &tag) {
  if (sum.count % ranks)
    fail(FSDP_INTERNAL, "a sum of '{}' has {} elements, which are no equal slices of {} ranks", tag.name, sum.count,
         ranks);
}

}  // namespace

Operation operation_of(std::span<const Sum> sums, bool accumulate, const Shape &shape, uint32_t ranks, const Tag &tag) {
  const bool everywhere = !sums.empty() && sums[0].everywhere;
  for (const Sum &sum : sums) {
    if (sum.everywhere != everywhere)
      fail(FSDP_INTERNAL, "the sums of '{}' go everywhere and to their ranks alone in one call", tag.name);
    if (shape.arenas || !everywhere) require_equal_slices(sum, ranks, tag);
    shape.arenas ? require_arenas(sum, tag) : require_plain(sum, accumulate, tag);
  }
  return everywhere ? Operation::all_reduce : Operation::reduce_scatter;
}

void require_root(uint32_t root, uint32_t ranks) {
  if (root >= ranks) fail(FSDP_INTERNAL, "broadcast from rank {} of {}", root, ranks);
}

void require_moves(const Part &from, std::span<const Move> moves, const Shape &shape, uint32_t ranks, const Tag &tag) {
  if (shape.arenas && !from.arena && !moves.empty())
    fail(FSDP_INTERNAL, "an exchange of '{}' is of memory that no other rank reads", tag.name);
  for (const Move &move : moves)
    if (move.source >= ranks || move.target >= ranks)
      fail(FSDP_INTERNAL, "a move of '{}' from rank {} to rank {} of {}", tag.name, move.source, move.target, ranks);
}

uint64_t count_moves(std::span<const Move> moves, uint32_t rank) noexcept {
  const auto counts = [&](const Move &move) { return move.bytes && (move.source == rank || move.target == rank); };
  return static_cast<uint64_t>(std::ranges::count_if(moves, counts));
}

// A move reads only the source's `own` on this rank, because other ranks may pass a part without memory.
void Launch::add(const Part &from, std::span<const Move> moves, uint32_t rank, uint32_t ranks) {
  sent.assign(ranks, 0);
  for (const Move &move : moves) {
    describe(fingerprint, move);
    if (move.bytes && (move.source == rank || move.target == rank)) {
      Piece &piece = pieces.emplace_back(Piece{from, Part::alone(move.to), move.bytes});
      piece.from.offset += move.offset;
      if (move.source == rank) piece.from.own += move.offset;
      piece.source = move.source;
      piece.target = move.target;
      piece.place = sent[move.source];
    }
    if (move.source != move.target) sent[move.source] += move.bytes;
  }
}

namespace {

constexpr size_t first_launches = 64;
constexpr size_t first_pieces = 16;

std::unique_ptr<Launch> make_launch(uint64_t piece_count) {
  auto launch = std::make_unique<Launch>();
  // Rounded up, so that calls of varying lengths need few launches.
  launch->pieces.reserve(std::bit_ceil(std::max<uint64_t>(piece_count, first_pieces)));
  return launch;
}

}  // namespace

LaunchPool::LaunchPool() {
  for (size_t i = 0; i < first_launches; ++i) launches_.push_back(make_launch(0));
}

// Returns the smallest free launch that is large enough. So large launches stay free for calls that need them, and the
// pool stops growing after the first step with the most calls in flight.
Launch &LaunchPool::find(uint64_t piece_count) {
  Launch *best = nullptr;
  for (const auto &launch : launches_) {
    if (launch->busy.load(std::memory_order_acquire) || launch->pieces.capacity() < piece_count) continue;
    if (!best || launch->pieces.capacity() < best->pieces.capacity()) best = launch.get();
    if (best->pieces.capacity() == first_pieces) return *best;
  }
  if (best) return *best;
  launches_.push_back(make_launch(piece_count));
  return *launches_.back();
}

Launch &LaunchPool::take(Operation operation, const Tag &tag, uint64_t piece_count) {
  Launch &launch = find(piece_count);
  launch.pieces.clear();
  launch.busy.store(true, std::memory_order_relaxed);
  launch.start(operation, tag);
  return launch;
}

}  // namespace fsdp::transport
