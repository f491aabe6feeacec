// SPDX-License-Identifier: Apache-2.0
#include "transport/call/describe.h"

namespace fsdp::transport {

namespace {

void require_plain(const Sum &sum, bool accumulate, const Tag &tag) {
  if (!sum.plain())
    fail(FSDP_INTERNAL, "a sum of '{}' by messages: {} sent as {}, times {}; they are float32, unscaled", tag.name,
         dtype_name(sum.dtype), dtype_name(sum.wire), sum.factor);
  if (sum.everywhere && (accumulate || sum.to.own != sum.from.own))
    fail(FSDP_INTERNAL, "a sum of '{}' by messages goes everywhere, and is not in place", tag.name);
}

// Peers read it where it lies.
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

}  // namespace fsdp::transport
