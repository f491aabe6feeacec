// SPDX-License-Identifier: Apache-2.0
// Tests how a leader handles messages that another leader should not have sent. See tests/fuzz/leader_fuzzer.cpp, too.
#include "node_job.h"
#include "transport/net.h"

namespace fsdp::transport::test {
namespace {

FrameStream join(NodeLinks &links, uint32_t node) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  links.emplace(node, FrameStream(Fd(ends[0]), tree::longest, StreamKeys{}));
  return FrameStream(Fd(ends[1]), tree::longest, StreamKeys{});
}

template <class M>
void say(FrameStream &stream, const M &message) {
  stream.queue(static_cast<uint32_t>(message.kind), tree::bytes_of(message));
  stream.flush();
}

// The messages come from ranks that the job lacks, are for such ranks, or name an unknown membership. Other leaders
// would refuse them, too.
TEST(NodeTree, InvalidMessagesAreNotPassedOn) {
  Rank rank;
  NodePlan plan{0, {0, 1, 2}, {{0, "h", ""}, {1, "h", ""}, {2, "h", ""}}, "secret", "job"};
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  NodeLinks links;
  FrameStream broken = join(links, 1), other = join(links, 2);
  auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan, std::move(links), std::move(listener));
  say(broken, tree::Post{3, tree::Post::everybody, {}, {}});
  say(broken, tree::Post{1, 3, {}, {}});
  say(broken, tree::WaitText{3, 1, {}});
  const tree::StateMap states = {{1, {1, 0, 4, 0, 0}}, {3, {3, 0, 1, 0, 0}}};
  for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) broken.queue(frame);
  broken.flush();
  say(broken, tree::Post{1, tree::Post::everybody, {}, {}});
  for (int i = 0; i < 10; ++i) leader.run(-1, 1);
  std::vector<uint32_t> heard;
  while (const auto frame = other.receive())
    if (!tree::as<tree::Beat>(*frame)) heard.push_back(frame->kind);
  EXPECT_EQ(heard, std::vector<uint32_t>{static_cast<uint32_t>(tree::LinkKind::post)});
}

// Nodes 1 and 2 are below node 0, and node 3 is below node 1. Once node 1 has left, node 3 takes refuge at node 2.
TEST(NodeTree, TheRootBelievesARefugeOfNodesWhoseParentHasLeft) {
  Rank rank;
  NodePlan plan{0, {0, 1, 2, 3}, {{0, "h", ""}, {1, "h", ""}, {2, "h", ""}, {3, "h", ""}}, "secret", "job"};
  plan.degree = 2;
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  NodeLinks links;
  FrameStream parent = join(links, 1), refuge = join(links, 2);
  auto seat = create_lone_seat(0, 4, rank.waiter, rank.failure);
  for (uint32_t r = 0; r < 4; ++r) seat->control.set_membership(r, Membership::member);
  NodeLeader leader(*seat, plan, std::move(links), std::move(listener));
  const auto say_that_rank_3_left = [&] {
    const tree::StateMap states = {{3, {3, 0, static_cast<uint32_t>(Membership::left), 0, 0}}};
    for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) refuge.queue(frame);
    refuge.flush();
    for (int i = 0; i < 10; ++i) leader.run(-1, 1);
  };
  say_that_rank_3_left();
  EXPECT_EQ(seat->control.membership(3), Membership::member) << "node 1 would have said it";
  seat->control.set_membership(1, Membership::left);
  say_that_rank_3_left();
  EXPECT_EQ(seat->control.membership(3), Membership::left);
}

// Makes the leader of a node of three. No rank has announced that it is a member, as in the first moments of a job.
struct EarlyLeave {
  explicit EarlyLeave(uint32_t node) {
    plan.rank = node;
    for (size_t n = 0; n < 3; ++n) listeners.push_back(open_leader_listener("127.0.0.1"));
    for (size_t n = 0; n < 3; ++n) plan.nodes[n].address = listeners[n].address;
    seat = create_lone_seat(node, 3, rank.waiter, rank.failure);
  }
  void lead(NodeLinks links) {
    leader = std::make_unique<NodeLeader>(*seat, plan, std::move(links), std::move(listeners[plan.node()]));
  }
  Rank rank;
  NodePlan plan{0, {0, 1, 2}, {{0, "h", ""}, {1, "h", ""}, {2, "h", ""}}, "secret", "job"};
  std::vector<LeaderListener> listeners;
  std::shared_ptr<Seat> seat;
  std::unique_ptr<NodeLeader> leader;
};

TEST(NodeTree, ARootThatLeavesFirstStaysForLeadersOfWhichItHasNotHeard) {
  EarlyLeave root(0);
  NodeLinks links;
  FrameStream one = join(links, 1), other = join(links, 2);
  root.lead(std::move(links));
  const int64_t begin = now_ns();
  root.leader->finish();
  EXPECT_GE(now_ns() - begin, 290'000'000) << "others pass messages through it, and need time to find a refuge";
}

TEST(NodeTree, ALeaderSeeksRefugeBeforeItHasHeardOfMembers) {
  EarlyLeave child(2);
  Newcomers refuge(child.plan, child.listeners[1].stream);
  NodeLinks links;
  FrameStream root = join(links, 0);
  child.lead(std::move(links));
  const tree::StateMap states = {{0, {0, 0, static_cast<uint32_t>(Membership::gone), 0, 0}}};
  for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) root.queue(frame);
  say(root, tree::Goodbye{});
  std::vector<uint32_t> from;
  for (int i = 0; i < 500 && from.empty(); ++i) {
    child.leader->run(-1, 1);
    for (const Newcomers::Newcomer &newcomer : refuge.look()) from.push_back(newcomer.hello.node);
  }
  EXPECT_EQ(from, std::vector<uint32_t>{2});
}

// The child posts after its parent has left and before its refuge answers. Returns whether the refuge gets the post.
bool refuge_gets_post(bool leaves_at_once) {
  EarlyLeave child(2);
  NodePlan other = child.plan;
  other.rank = 1;
  Newcomers newcomers(other, child.listeners[1].stream);
  NodeLinks links;
  FrameStream root = join(links, 0), refuge;
  child.lead(std::move(links));
  const tree::StateMap states = {{0, {0, 0, static_cast<uint32_t>(Membership::gone), 0, 0}}};
  for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) root.queue(frame);
  say(root, tree::Goodbye{});
  for (int i = 0; i < 20; ++i) child.leader->run(-1, 1);
  const uint64_t word = 7;
  child.seat->control.posts().store(2, std::as_bytes(std::span(&word, 1)), "", std::nullopt);
  for (int i = 0; i < 20; ++i) child.leader->run(-1, 1);
  bool heard = false;
  for (const auto end = now_ns() + int64_t{10'000'000'000}; !heard && now_ns() < end;) {
    child.leader->run(-1, 1);
    for (Newcomers::Newcomer &newcomer : newcomers.look()) {
      refuge = std::move(newcomer.stream);
      greet(refuge, other, tree::Bond::refuge);
    }
    if (!refuge) continue;
    refuge.flush();
    bool linked = false;  // the child has taken the refuge, and says which ranks have left
    const auto receive = [&] {
      for (; const auto frame = refuge.receive(); linked = true) heard = heard || tree::as<tree::Post>(*frame);
    };
    receive();
    if (!leaves_at_once || !linked) continue;
    child.leader->finish();
    receive();
    return heard;
  }
  return heard;
}

TEST(NodeTree, APostThatNoLeaderCouldPassOnIsToldAgain) { EXPECT_TRUE(refuge_gets_post(false)); }
TEST(NodeTree, ALeaderThatLeavesTellsItsLatestPostsAgain) { EXPECT_TRUE(refuge_gets_post(true)); }

// Node 1 is a refuge without children. Nodes that used it may have lost the latest posts of others. Node 0 leaves
// before the posts are repeated for node 1.
TEST(NodeTree, PostsAreToldAgainForEachRefugeThatHasLeft) {
  EarlyLeave child(2);
  NodeLinks links;
  FrameStream root = join(links, 0);
  child.lead(std::move(links));
  const uint64_t word = 7;
  child.seat->control.posts().store(2, std::as_bytes(std::span(&word, 1)), "", std::nullopt);
  uint32_t posts = 0;
  const auto run_until = [&](uint32_t count) {
    for (const auto end = now_ns() + int64_t{10'000'000'000}; posts < count && now_ns() < end;) {
      child.leader->run(-1, 1);
      while (const auto frame = root.receive()) posts += tree::as<tree::Post>(*frame).has_value();
    }
  };
  const auto say_that_it_left = [&](uint32_t rank) {
    for (const auto end = now_ns() + int64_t{20'000'000}; now_ns() < end;) child.leader->run(-1, 1);
    const tree::StateMap states = {{rank, {rank, 0, static_cast<uint32_t>(Membership::left), 0, 0}}};
    for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) root.queue(frame);
    root.flush();
  };
  run_until(1);
  ASSERT_EQ(posts, 1u);
  say_that_it_left(1);
  say_that_it_left(0);
  run_until(3);
  EXPECT_EQ(posts, 3u);
}

}  // namespace
}  // namespace fsdp::transport::test
