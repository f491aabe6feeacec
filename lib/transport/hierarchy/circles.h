// SPDX-License-Identifier: Apache-2.0
// How many hosts come to one ballot, or each to what all say: neighbours in circles, whose first ones meet in circles
// again, until one circle is left; then the first ones pass back what that came to. Within a circle all tell all: that
// is one message's time where a tree of pairs would need several. Few hosts are one circle, and nothing goes back.
//
//   17 hosts    [0 1 2 3] [4 5 6 7] ... [16]   ->   [0 4 8 12] [16]   ->   [0 16]   ->   back
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/exchange.h"

namespace fsdp::transport {

// Each message takes a host some microseconds of a core, and each neighbour a connection: in circles of four a host has
// three for each level, which is a third of the messages and connections that circles of 16 need, in as little time.
constexpr uint32_t circle_size_of(uint32_t host_count) { return host_count <= 16 ? 16 : 4; }

struct Circle {
  std::vector<uint32_t> hosts;  // in rising order; the first one goes on to the next circle, if there is one
  uint64_t step = 1;            // so many hosts, neighbours, meet through each of these
  bool top = false;
};

// Those that this host meets in: the n-th is of level n, and each but the last one is led by it.
inline std::vector<Circle> circles_of(uint32_t host, uint32_t host_count, uint32_t size) {
  std::vector<Circle> circles;
  for (uint64_t step = 1;; step *= size) {  // of neighbours at this level
    Circle circle;
    const uint64_t first = host / (step * size) * (step * size);
    for (uint64_t h = first; h < std::min<uint64_t>(host_count, first + step * size); h += step)
      circle.hosts.push_back(static_cast<uint32_t>(h));
    circle.step = step;
    circle.top = step * size >= host_count;
    const bool last = circle.top || circle.hosts.front() != host;
    circles.push_back(std::move(circle));
    if (last) return circles;
  }
}

// How many other hosts are in those.
inline uint32_t neighbours_in_circles(uint32_t host, uint32_t host_count, uint32_t size) {
  uint32_t count = 0;
  for (uint64_t step = 1;; step *= size) {
    const uint64_t first = host / (step * size) * (step * size);
    const uint64_t end = std::min<uint64_t>(host_count, first + step * size);
    count += static_cast<uint32_t>((end - first + step - 1) / step) - 1;
    if (step * size >= host_count || first != host) return count;
  }
}

// meet(circle, level, ballot): the ballots of its hosts, in their order. pass(circle, level, ballot): the first one's.
template <class Meet, class Pass>
Ballot fold_circles(const std::vector<Circle> &circles, Ballot mine, Meet &&meet, Pass &&pass, size_t level = 0) {
  const Circle &circle = circles[level];
  std::vector<Ballot> told = meet(circle, level, mine);
  Ballot folded = told.front();
  for (size_t i = 1; i < told.size(); ++i) folded.add(told[i]);
  if (circle.top) return folded;
  if (level + 1 < circles.size()) folded = fold_circles(circles, folded, meet, pass, level + 1);
  return circle.hosts.size() == 1 ? folded : pass(circle, level, folded);
}

// The room that gather_circles needs, in hosts: in its circle each has a place for as many as any.
inline uint64_t circle_room(uint32_t host_count, uint32_t size) {
  uint64_t step = 1;
  while (step * size < host_count) step *= size;
  return (host_count + step - 1) / step * step;
}

// This host has what it says, `bytes` bytes, at its place in `all`; then it has what all say.
// meet(circle, level, first, bytes): each host of the circle brings so many bytes, the n-th at first + n * bytes, and
// has all of them. pass(circle, level, first, bytes): the first one's go to the others.
template <class Meet, class Pass>
void gather_circles(const std::vector<Circle> &circles, uint32_t host_count, std::byte *all, uint64_t bytes,
                    Meet &&meet, Pass &&pass) {
  for (size_t level = 0; level < circles.size(); ++level) {
    const Circle &circle = circles[level];
    if (circle.hosts.size() > 1) meet(circle, level, all + circle.hosts.front() * bytes, circle.step * bytes);
  }
  for (size_t level = circles.size(); level-- > 0;)
    if (!circles[level].top && circles[level].hosts.size() > 1) pass(circles[level], level, all, host_count * bytes);
}

}  // namespace fsdp::transport
