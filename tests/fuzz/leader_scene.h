// SPDX-License-Identifier: Apache-2.0
// A job of nine hosts with two ranks each. The leader of one of them is the library's, and two of its neighbours are
// the fuzzer's: one sends anything, and an honest one receives the leader's reactions.
//
//          0             a child of the root (0, 1), a parent (1, 0), a child (1, 3), one that takes refuge (1, 5),
//        1   2           and a refuge (3, 0), once the parent has left
//       3 4 5 6
//      7 8
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <vector>

#include "membership/tree/leader.h"

namespace fsdp::membership::fuzz {

constexpr uint32_t node_count = 9, ranks_of_node = 2, world_size = node_count * ranks_of_node;

inline void require(bool well, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (well) return;
  std::fprintf(stderr, "%s:%d: not so\n", file, line);
  std::abort();
}

enum class Way { tree, refugee, refuge };
struct Shape {
  uint32_t self, hostile, honest;
  Way way;
};
constexpr Shape shapes[] = {
    {0, 1, 2, Way::tree}, {1, 0, 3, Way::tree}, {1, 3, 0, Way::tree}, {1, 5, 0, Way::refugee}, {3, 0, 7, Way::refuge}};

// The state that outlives an input: the memory of a leader's host, and the sockets at which others find the leader.
class Host {
 public:
  explicit Host(uint32_t node);
  static Host &of(uint32_t node);
  // Returns everything to its first state.
  void reset();

  NodePlan plan;
  Seat &seat() { return *seat_; }
  Control &control() { return seat_->control; }
  std::vector<std::byte> memory() const { return {memory_.data(), memory_.data() + memory_.size_bytes()}; }
  // Returns whether the memory outside of the verdict differs from `before`.
  bool differs(const std::vector<std::byte> &before) const;
  LeaderListener listener() const { return {door_.duplicate(), datagrams_.duplicate(), {}}; }
  const Fd &door() const { return door_; }
  void send_datagram(std::span<const uint8_t> bytes) const;
  const Fd &refuge() const { return refuge_; }  // where the leader of node 0 listens

 private:
  Host(uint32_t node, Fd file);
  void find_verdict();

  Fd file_;
  Fd door_, datagrams_, datagrams_from_, refuge_;  // links before the last are unix sockets, so nothing arrives late
  std::unique_ptr<Seat> seat_;
  Mapping memory_;
  std::vector<std::byte> first_;
  size_t verdict_begin_ = 0, verdict_end_ = 0;
};

class Scene {
 public:
  // greets: a neighbour that makes its own connection first sends a leader's greeting; otherwise the input must do so.
  Scene(const Shape &shape, bool parent_of_refugee_left, bool greets);
  ~Scene();

  Host &host() { return host_; }
  const NodePlan &plan() const { return host_.plan; }
  Control &control() { return host_.control(); }
  FrameStream &hostile() { return hostile_; }
  // Waits until everything that the hostile neighbour has sent has arrived.
  void deliver();
  // Reads the leader's messages to the hostile neighbour. If an end is awaited, it reads until the connection ends.
  void drain(bool ends);
  bool connected() const { return static_cast<bool>(hostile_); }
  // Returns whether the other end may report about this rank.
  bool tells_of(uint32_t rank) const;
  // Runs one round of the leader after this time. The honest neighbour must receive only valid messages.
  void round(uint64_t ms);
  void send_datagram(std::span<const uint8_t> bytes) const { host_.send_datagram(bytes); }
  // Sends the bytes with the right mark and proof.
  void send_true_datagram(uint32_t from, uint32_t kind, uint64_t number) const;
  // Call this when the fuzzer has said of the honest neighbour that it is dumping core.
  void give_honest_up() { expects_beats_ = false; }
  const std::optional<Accusation> &verdict() const { return verdict_; }
  uint64_t beats_heard() const { return beats_; }
  bool expects_beats() const { return expects_beats_; }

 private:
  bool has_detour(uint32_t node) const;
  FrameStream join(NodeLinks &links, uint32_t node);
  void seek_shelter(bool greets);
  void give_shelter(bool greets);
  void prove(Fd socket, Role role, bool greets);
  bool over_tcp() const { return shape_.way == Way::refuge; }
  void check_verdict();
  void say_honest_beat();
  void hear_honest();
  void check_heard(const Frame &frame);
  bool honest_may_hear_of(const tree::RankState &state) const;

  Shape shape_;
  Host &host_;
  FrameStream hostile_, honest_;
  std::unique_ptr<NodeLeader> leader_;
  std::optional<Accusation> verdict_;
  uint64_t beats_ = 0, own_beat_ms_ = 0;
  bool expects_beats_ = true;
};

// Returns whether it is a valid verdict: a failure that names ranks of the job.
bool is_verdict(const Accusation &accusation);

}  // namespace fsdp::membership::fuzz
