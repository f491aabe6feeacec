// SPDX-License-Identifier: Apache-2.0
// What is below a rank while ranks join: one connection, of a rank that has joined there, and those that have come
// through it.
#pragma once

#include <poll.h>

#include <algorithm>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "membership/join/message.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// A rank takes this many from other hosts, and sends more on to them.
constexpr size_t join_degree = 64;

struct Branch {
  FrameStream stream;
  uint32_t rank = 0;  // who is at its other end
  std::string host, listens;
  bool other_host = false;
  bool watched = true;               // its end would be a death
  std::vector<uint32_t> ranks = {};  // that have joined by it, its own first
  bool has(uint32_t wanted) const { return std::find(ranks.begin(), ranks.end(), wanted) != ranks.end(); }
};

class Branches {
 public:
  Branch &add(FrameStream stream, const message::Join &join, bool other_host);
  std::list<Branch> &all() noexcept { return all_; }
  // By which this rank has joined; NULL: none.
  Branch *of(uint32_t rank);
  // To whom the next one from another host is sent; empty: it is taken here. near: it has come by a loopback address.
  std::optional<message::Redirect> redirect(bool near);

  void add_polls(std::vector<pollfd> &polls) const;
  void queue(const SharedFrame &frame);
  // True when all has gone, or will never go.
  bool flush();
  void clear() { all_.clear(); }

 private:
  std::list<Branch> all_;
  size_t turn_ = 0;
};

// The frame again, for others.
SharedFrame pass_on(const Frame &frame);

}  // namespace fsdp::membership
