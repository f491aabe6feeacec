// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/form.h"

#include <poll.h>

#include <thread>

#include "base/slice.h"
#include "membership/tree/dial.h"
#include "membership/tree/door.h"

namespace fsdp::membership {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto pause = std::chrono::milliseconds(50);

class Forming {
 public:
  Forming(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links)
      : plan_(plan),
        waiter_(waiter),
        limit_{Clock::now() + std::chrono::milliseconds(plan.forming_ms), waiter},
        look_ms_(slice_ms_of(static_cast<uint32_t>(plan.node_of.size()))),
        door_(plan, listener),
        links_(links) {}

  void run() {
    if (plan_.has_parent()) dial(plan_.parent());
    for (const uint32_t child : plan_.children())
      while (!links_.contains(child)) accept(child);
  }

 private:
  [[noreturn]] void lose(uint32_t node, const std::string &why) const {
    fail_rank(FSDP_PEER_FAILED, static_cast<int32_t>(plan_.nodes[node].leader),
              "{} did not connect while the job formed: {}", plan_.leader_text(node), why);
  }

  // A connection that ended before it was answered is made again: the other end does not keep one on which nothing
  // comes for a while, and the network may have been away for that long.
  void dial(uint32_t node) {
    std::string problem;
    for (;;) {
      Dial one(plan_, node, tree::Bond::tree);
      while (one.advance() == Dial::State::trying && !limit_.over()) {
        waiter_.poll();
        pollfd poll = one.poll();
        ::poll(&poll, 1, look_ms_);
      }
      if (one.state() == Dial::State::answered) {
        links_.insert_or_assign(node, one.take());
        return;
      }
      // At the limit one that tries only says that time is over.
      if (problem.empty() || one.state() != Dial::State::trying) problem = one.problem();
      if (one.state() == Dial::State::refused || limit_.over()) lose(node, problem);
      waiter_.poll();
      std::this_thread::sleep_for(pause);
    }
  }

  void accept(uint32_t missing) {
    if (limit_.over()) lose(missing, late_text());
    waiter_.poll();
    std::vector<pollfd> polls;
    door_.add_polls(polls, true);
    ::poll(polls.data(), polls.size(), look_ms_);
    for (Door::Newcomer &newcomer : door_.look(true)) let_in(newcomer);
  }

  // One that connects again has given the earlier connection up.
  void let_in(Door::Newcomer &newcomer) {
    const uint32_t node = newcomer.hello.node;
    if (!plan_.is_child(node) || newcomer.hello.bond != tree::Bond::tree) return;
    greet(newcomer.stream, plan_, tree::Bond::tree);
    newcomer.stream.flush();  // what does not go now goes later, before all else
    if (newcomer.stream.open()) links_.insert_or_assign(node, std::move(newcomer.stream));
  }

  std::string late_text() const {
    const std::string problem = door_.problem();
    return format_text("not within {} ms{}{}", plan_.forming_ms,
                       problem.empty() ? "" : "; connections could not be taken: ", problem);
  }

  const NodePlan &plan_;
  const Waiter &waiter_;
  Limit limit_;
  const int look_ms_;
  Door door_;
  NodeLinks &links_;
};

}  // namespace

void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links) {
  Forming(plan, listener, waiter, links).run();
}

}  // namespace fsdp::membership
