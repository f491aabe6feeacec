// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/deaths.h"

#include <functional>
#include <vector>

#include "base/text.h"

namespace fsdp::membership {

void Deaths::find(const Control &control, Links &links, const Pulse &pulse, const RankSet &known) {
  const auto ended = [&](uint32_t rank) {
    const Membership state = control.membership(rank);
    if (state != Membership::left && state != Membership::gone && !known.contains(rank)) ranks_.add(rank);
  };
  links.find_dead(std::ref(ended));  // without an allocation: waits do this
  pulse.find_late([&](uint32_t rank) {
    if (ranks_.contains(rank) || known.contains(rank) || !links.dumps_core(rank)) return;
    ranks_.add(rank);
    dumping_.add(rank);
  });
}

Accusation Deaths::accuse(const std::string &where, const Control &control) const {
  RankSet ended;
  std::vector<std::string> dumping;
  for (const uint32_t rank : ranks_.list())
    if (dumping_.contains(rank))
      dumping.push_back(name_process(rank, control.process(rank), control.host(rank)));
    else
      ended.add(rank);
  std::string what = ended.empty() ? "" : death_text(ended);
  if (!dumping.empty()) what += (what.empty() ? "" : "; ") + dump_text(dumping);
  return accuse_dead(where, ranks_, what);
}

std::string dump_text(const std::vector<std::string> &names) {
  const bool one = names.size() == 1;
  return format_text("{} {} {} dumping core", one ? "rank" : "ranks", fmt::join(names, ", "), one ? "is" : "are");
}

}  // namespace fsdp::membership
