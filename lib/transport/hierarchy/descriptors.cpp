// SPDX-License-Identifier: Apache-2.0
#include "transport/hierarchy/descriptors.h"

#include <cerrno>

#include "membership/tree/plan.h"
#include "transport/hierarchy/team.h"
#include "transport/names.h"

namespace fsdp::transport {

// The lowest rank of a host speaks for it where all ranks meet.
DescriptorNeed need_of_leader(uint32_t node, uint32_t node_count) {
  const uint32_t neighbours = child_count_in_tree(node, node_count) + (node != 0);
  return {neighbours + (node_count > 2 ? most_refugees + refuge_count : 0),
          neighbours_in_circles(node, node_count, circle_size_of(node_count))};
}

std::optional<Error> find_shortage_of(uint32_t rank, std::string_view host, const Descriptors &has,
                                      const DescriptorNeed &need) {
  const std::string shortage = find_shortage(has, need);
  if (shortage.empty()) return {};
  return Error(FSDP_SYSTEM, format_text("rank {} ({}): {}", rank, host, shortage), static_cast<int32_t>(rank),
               FSDP_ORIGIN_OS, EMFILE);
}

}  // namespace fsdp::transport
