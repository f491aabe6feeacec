// SPDX-License-Identifier: Apache-2.0
#include "membership/join/branch.h"

namespace fsdp::membership {

namespace {

// A peer wrote it.
bool reaches(const std::string &listens, bool near) {
  try {
    return !listens.empty() && (!parse_address(listens).loopback() || near);
  } catch (const Error &) {
    return false;
  }
}

}  // namespace

SharedFrame pass_on(const Frame &frame) { return share_frame(write_frame(frame.kind, frame.body)); }

Branch &Branches::add(FrameStream stream, const message::Join &join, bool other_host) {
  return all_.emplace_back(
      Branch{std::move(stream), join.rank, join.host, join.listens, other_host, true, {join.rank}});
}

Branch *Branches::of(uint32_t rank) {
  for (Branch &branch : all_)
    if (branch.has(rank)) return &branch;
  return nullptr;
}

// In turn, so that none gets more than another.
std::optional<message::Redirect> Branches::redirect(bool near) {
  std::vector<const Branch *> hosts;
  size_t taken = 0;
  for (const Branch &branch : all_) {
    if (!branch.other_host || !branch.watched) continue;
    ++taken;
    if (reaches(branch.listens, near)) hosts.push_back(&branch);
  }
  if (taken < join_degree || hosts.empty()) return {};
  const Branch &to = *hosts[turn_++ % hosts.size()];
  return message::Redirect{to.rank, to.host, to.listens};
}

void Branches::add_polls(std::vector<pollfd> &polls) const {
  for (const Branch &branch : all_) {
    const short events = static_cast<short>((branch.watched ? POLLIN : 0) | (branch.stream.sending() ? POLLOUT : 0));
    if (events && branch.stream.speaks()) polls.push_back({branch.stream.socket().get(), events, 0});
  }
}

void Branches::queue(const SharedFrame &frame) {
  for (Branch &branch : all_)
    if (branch.stream.speaks()) branch.stream.queue(frame);
}

bool Branches::flush() {
  bool gone = true;
  for (Branch &branch : all_)
    if (branch.stream.speaks() && !branch.stream.flush() && branch.stream.speaks()) gone = false;
  return gone;
}

}  // namespace fsdp::membership
