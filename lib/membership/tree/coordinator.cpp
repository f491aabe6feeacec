// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/coordinator.h"

#include <algorithm>

namespace fsdp::membership {
namespace {

const NodePlan no_tree;

// While the job forms, the report with the greater weight wins. A death has the greatest, because it was seen on the
// dead rank's own connection. A lost peer may have ended because of another rank's death. On a silent host the ranks
// may have ended earlier.
int weight_of(const Accusation &accusation) {
  if (accusation.kind == FailureKind::died) return 2;
  return accusation.kind == FailureKind::cut ? 0 : 1;
}

std::vector<CutLink> links_of(const Accusation &accusation) {
  const uint32_t count = std::min(accusation.link_count, Accusation::max_links);
  return std::vector<CutLink>(accusation.links, accusation.links + count);
}

// One report may tell more than the death of ranks. It is kept if it names all ranks of the other report.
Accusation merge_deaths(const Accusation &one, const Accusation &other) {
  const auto plain = [](const Accusation &a) { return a.ranks.empty() || a.what() == death_text(a.ranks); };
  RankSet all = one.ranks;
  all.add(other.ranks);
  std::string what;
  if (!plain(one) && one.ranks.contains(other.ranks))
    what = one.what();
  else if (!plain(other) && other.ranks.contains(one.ranks))
    what = other.what();
  else if (!plain(one) || !plain(other))
    what = one.what() + "; " + other.what();
  return accuse_dead(one.where_bytes ? one.where() : other.where(), all, what);
}

bool before(const CutLink &a, const CutLink &b) { return a.first != b.first ? a.first < b.first : a.second < b.second; }

}  // namespace

std::string NodePlan::leader_text(uint32_t node) const {
  return format_text("rank {} (leader of node {}, host {})", nodes[node].leader, node, nodes[node].host);
}

Accusation accuse_links(const NodePlan &plan, const std::vector<CutLink> &cut) {
  std::vector<CutLink> links = cut;
  std::sort(links.begin(), links.end(), before);
  links.erase(std::unique(links.begin(), links.end()), links.end());
  Accusation accusation;
  accusation.kind = FailureKind::cut;
  std::vector<std::string> names;
  const auto name = [&](uint16_t node) { return format_text("host {} (node {})", plan.nodes[node].host, node); };
  for (const CutLink &link : links) {
    if (std::max(link.first, link.second) >= plan.nodes.size()) continue;  // a peer wrote these numbers
    if (accusation.link_count < Accusation::max_links) accusation.links[accusation.link_count++] = link;
    names.push_back(format_text("{}{} and {}", names.empty() ? "" : "between ", name(link.first), name(link.second)));
  }
  accusation.text.set(format_text("no contact between {} for {:.1f} s: the network between them is cut",
                                  fmt::join(names, ", "), plan.heartbeat_timeout_ms / 1e3));
  return accusation;
}

Coordinator::Coordinator() : forming_(true), plan_(no_tree) {}

void Coordinator::hear(const Accusation &accusation, uint64_t now_ms) {
  if (first_) return merge(accusation);
  first_ = accusation;
  since_ms_ = now_ms;
}

// Does `other` replace `first`? While the job runs, it does if `first` reports a silent node as cut off, and `other`
// reports that this node's leader has stopped or died.
bool Coordinator::explains(const Accusation &other, const Accusation &first) const {
  if (forming_) return weight_of(other) > weight_of(first);
  if (first.kind != FailureKind::cut || (other.kind != FailureKind::stopped && other.kind != FailureKind::died))
    return false;
  if (other.rank < 0 || static_cast<size_t>(other.rank) >= plan_.node_of.size()) return false;
  const std::vector<CutLink> links = links_of(first);
  const uint32_t node = plan_.node_of[static_cast<size_t>(other.rank)];
  return std::ranges::all_of(links, [node](const CutLink &link) { return link.first == node || link.second == node; });
}

// A rank and its node's leader may report the same failure. The rank's report names the operation; the leader's arrives
// earlier.
void Coordinator::merge(const Accusation &other) {
  Accusation &first = *first_;
  if (explains(other, first)) first = other;
  if (other.kind != first.kind) return;
  if (first.kind == FailureKind::died) {
    if (first.ranks.empty() && other.ranks.empty()) return;  // peers wrote both
    first = merge_deaths(first, other);
  } else if (first.kind == FailureKind::stopped && !first.ranks.contains(other.ranks)) {
    // A report that names all ranks of the first one replaces its text.
    first.text.set(other.ranks.contains(first.ranks) ? other.text.copy()
                                                     : first.text.copy() + "; " + other.text.copy());
    first.ranks.add(other.ranks);
    first.rank = std::min(first.rank, other.rank);
  } else if (first.kind == FailureKind::cut && forming_) {
    if (first.text.copy() != other.text.copy()) first.text.set(first.text.copy() + "; " + other.text.copy());
  } else if (first.kind == FailureKind::cut) {
    std::vector<CutLink> links = links_of(first), more = links_of(other);
    links.insert(links.end(), more.begin(), more.end());
    first = accuse_links(plan_, links);
  }
}

// Time to wait for simultaneous failures. Cut links outside the tree are found later than those of the tree.
uint64_t Coordinator::grace_ms() const {
  if (forming_) return forming_grace_ms;
  if (first_->kind == FailureKind::cut) return longest_grace_ms;
  return first_->kind == FailureKind::died || first_->kind == FailureKind::stopped ? 100 : 0;
}

std::optional<Accusation> Coordinator::decide(uint64_t now_ms) const {
  if (!first_ || now_ms - since_ms_ < grace_ms()) return {};
  return first_;
}

}  // namespace fsdp::membership
