// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/descriptors.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "comm/hybrid/circles.h"
#include "comm/nodes/plan.h"

namespace fsdp::comm {

namespace {

DescriptorNeed need_of_leader(uint32_t node, uint32_t nodes) {
  const auto neighbours = static_cast<uint32_t>(children_in_tree(node, nodes).size()) + (node != 0);
  DescriptorNeed need{neighbours + (nodes > 2 ? most_refugees + refuge_count : 0), 0};
  for (const Circle &circle : circles_of(node, nodes)) need.messages += static_cast<uint32_t>(circle.hosts.size()) - 1;
  return need;
}

}  // namespace

// The lowest rank of a host leads it, and speaks for it where all ranks meet.
DescriptorNeed need_of(uint32_t rank, std::span<const uint32_t> node_of) {
  const uint32_t node = node_of[rank];
  if (std::ranges::find(node_of, node) != node_of.begin() + rank) return {};
  return need_of_leader(node, *std::ranges::max_element(node_of) + 1);
}

void check_descriptors(std::span<const Card> cards, std::span<const uint32_t> node_of,
                       std::span<const std::string> hosts) {
  const uint32_t nodes = *std::ranges::max_element(node_of) + 1;
  std::vector<bool> led(nodes);
  for (uint32_t r = 0; r < cards.size(); ++r) {
    const bool leads = !led[node_of[r]];
    led[node_of[r]] = true;
    const std::string shortage =
        find_shortage(cards[r].descriptors, leads ? need_of_leader(node_of[r], nodes) : DescriptorNeed());
    if (!shortage.empty())
      throw Error(FSDP_SYSTEM, format_text("rank {} ({}): {}", r, hosts[r], shortage), static_cast<int32_t>(r),
                  FSDP_ORIGIN_OS, EMFILE);
  }
}

}  // namespace fsdp::comm
