// SPDX-License-Identifier: Apache-2.0
// How reports become one verdict: the first report decides, and reports of the same kind of failure that arrive soon
// after are added to it. While the job forms, the report of a death replaces reports of its effects. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "membership/tree/plan.h"
#include "membership/verdict.h"

namespace fsdp::membership {

class Coordinator {
 public:
  explicit Coordinator(const NodePlan &plan) : forming_(false), plan_(plan) {}
  // For the time while the job forms, when hosts have no tree yet.
  Coordinator();

  void hear(const Accusation &accusation, uint64_t now_ms);
  bool open() const noexcept { return first_.has_value(); }
  // The maximum wait for simultaneous failures, and the fixed wait while the job forms.
  static constexpr uint64_t longest_grace_ms = 700, forming_grace_ms = 60;
  // The verdict; empty if nothing was reported, or if it is too early to decide.
  std::optional<Accusation> decide(uint64_t now_ms) const;

 private:
  void merge(const Accusation &other);
  bool explains(const Accusation &other, const Accusation &first) const;
  uint64_t grace_ms() const;

  const bool forming_;
  const NodePlan &plan_;
  std::optional<Accusation> first_;
  uint64_t since_ms_ = 0;
};

// "no contact between host a (node 0) and host b (node 1) for 8.0 s: the network between them is cut"
Accusation accuse_links(const NodePlan &plan, const std::vector<CutLink> &links);

}  // namespace fsdp::membership
