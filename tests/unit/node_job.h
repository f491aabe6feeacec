// SPDX-License-Identifier: Apache-2.0
// Runs a job of several nodes on one machine. Each node is a control memory and processes that share it. The leaders
// communicate over loopback addresses or network namespaces. Ranks wait for words that all of them see.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "membership/join/rank_links.h"
#include "membership/tree/dial.h"
#include "membership/tree/leader.h"
#include "shm_bodies.h"
#include "transport/names.h"
#include "transport/shm/team.h"
#include "transport/shm/versions.h"

namespace fsdp::transport::test {

constexpr uint32_t most = 32;

// The library promises 1 s, but machines that run tests are loaded. The value is far below the limit of silence, which
// finds every death, too.
constexpr double at_once = 5;
constexpr uint32_t silence_ms = 10'000;

inline int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void pause_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// All processes share this memory.
struct Common {
  Word words[2][most];
  std::atomic<int32_t> pids[most], child;
  std::atomic<uint32_t> ready, steps[most];
  std::atomic<bool> stop, done[most];  // done: the rank has released everything, or reported what it kept
  char address[most][64];
  std::atomic<int32_t> status[most], rank[most];
  std::atomic<int64_t> seen_ns[most];
  char text[most][944];
  char left_behind[most][256];
};

class SharedGate final : public AwaitedWords {
 public:
  SharedGate(const Words &words, uint64_t target, const char *what) : AwaitedWords(words, target), what_(what) {}
  bool needs_callers() const override { return true; }
  std::string text() const override { return what_; }

 private:
  const char *what_;
};

// Runs one rank of a node in its own process.
struct NodeRank {
  uint32_t rank = 0;
  Common *common = nullptr;
  std::vector<uint32_t> ranks;  // all ranks of the job
  Failure failure;
  std::unique_ptr<Waiter> waiter;
  std::unique_ptr<device::Device> device;
  std::shared_ptr<Seat> seat;
  std::unique_ptr<ShmWorld> world;

  void await(uint32_t gate, uint64_t target, const char *what) {
    const Words words(reinterpret_cast<std::byte *>(common->words[gate]), sizeof(Word), ranks);
    SharedGate meeting(words, target, what);
    seat->watch.enter_caller();
    seat->watch.check();
    seat->watch.wait(meeting);
  }
  void meet(uint64_t target, const char *what = "the test's gate") {
    common->words[0][rank].raise(target);
    await(0, target, what);
    ++common->steps[rank];
  }
  void close() {
    meet(UINT32_MAX);
    world->leave();
  }
};

using NodeBody = std::function<void(NodeRank &)>;

// Meets until there is a verdict, or until the parent tells it to stop.
inline void train(NodeRank &rank) {
  for (uint64_t step = 1; !rank.common->stop; ++step) {
    pause_ms(2);
    rank.meet(step);
  }
  rank.close();
}

class NodeJob {
 public:
  NodeJob(std::vector<uint32_t> ranks_of_nodes, uint32_t heartbeat_timeout_ms)
      : forming_ms(heartbeat_timeout_ms), limit_ms_(heartbeat_timeout_ms) {
    static int count = 0;
    name_ = fmt::format("job-{}-{}", ::getpid(), ++count);
    common_ = static_cast<Common *>(
        ::mmap(nullptr, sizeof(Common), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (uint32_t node = 0; node < ranks_of_nodes.size(); ++node) {
      places_.push_back({static_cast<uint32_t>(node_of_.size()), fmt::format("h{}", node), {}});
      node_of_.insert(node_of_.end(), ranks_of_nodes[node], node);
      interfaces_.push_back("127.0.0.1");
      namespaces_.emplace_back();
    }
    for (size_t node = 0; node < places_.size(); ++node) {
      controls_.push_back(Control::create(size(), {ranks_of_nodes[node], node == 0}));
    }
  }
  ~NodeJob() {
    for (const pid_t pid : pids_)
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    ::munmap(common_, sizeof(Common));
  }
  NodeJob(const NodeJob &) = delete;
  NodeJob &operator=(const NodeJob &) = delete;

  uint32_t size() const { return static_cast<uint32_t>(node_of_.size()); }
  uint32_t node_of(uint32_t rank) const { return node_of_[rank]; }
  uint32_t leader(uint32_t node) const { return places_[node].leader; }
  Common &common() { return *common_; }
  // Must be called before start. The node lives in this network namespace.
  void place(uint32_t node, const std::string &space, const std::string &address) {
    namespaces_[node] = space;
    interfaces_[node] = address;
  }
  uint32_t forming_ms;  // the constructor's limit, unless it is set
  uint32_t degree = tree_degree;
  bool all_exchange = true;  // otherwise no ranks count as sending each other messages
  // Runs in a leader before it meets the others.
  std::function<void(uint32_t)> before_tree;
  void set_secret(uint32_t node, const std::string &secret) { odd_node_ = node, odd_secret_ = secret; }

  void start(const NodeBody &body) {
    for (uint32_t rank = 0; rank < size(); ++rank) {
      std::fflush(nullptr);
      const pid_t pid = ::fork();
      if (pid == 0) {
        act(rank, body);
        ::_exit(0);
      }
      common_->pids[rank] = pid;
      pids_.push_back(pid);
    }
  }
  bool await_steps(uint32_t steps, double seconds = 20) {
    const auto start = std::chrono::steady_clock::now();
    for (uint32_t rank = 0; rank < size(); ++rank)
      while (common_->steps[rank] < steps) {
        if (seconds_since(start) > seconds) return false;
        pause_ms(1);
      }
    return true;
  }
  void send(uint32_t rank, int signal) { ::kill(pids_[rank], signal); }
  // Returns false if a rank hangs. besides: a rank that may continue.
  bool collect(double seconds, std::optional<uint32_t> besides = {}) {
    const auto start = std::chrono::steady_clock::now();
    for (pid_t &pid : pids_) {
      if (besides && &pid == &pids_[*besides]) continue;
      while (pid > 0) {
        int status = 0;
        if (::waitpid(pid, &status, WNOHANG) == pid)
          pid = -1;
        else if (seconds_since(start) > seconds) {
          print_ranks();
          return false;
        } else
          pause_ms(1);
      }
    }
    return true;
  }
  void print_ranks() const {
    for (uint32_t r = 0; r < size(); ++r)
      std::printf("rank %u of node %u %s after %u steps, with status %d: %s\n", r, node_of_[r],
                  common_->done[r] ? "has ended" : "has not ended", common_->steps[r].load(), common_->status[r].load(),
                  common_->text[r]);
  }
  // Checks that ranks release everything that they took: descriptors, threads and shared memory.
  void expect_nothing_left(const std::vector<uint32_t> &victims = {}) {
    for (uint32_t r = 0; r < size(); ++r) {
      if (std::count(victims.begin(), victims.end(), r)) continue;
      EXPECT_TRUE(common_->done[r]) << "rank " << r;
      EXPECT_STREQ(common_->left_behind[r], "") << "rank " << r;
    }
  }
  std::string text(uint32_t rank) const { return common_->text[rank]; }

  // Expects every rank but the victims to report this.
  void expect(fsdp_status status, int32_t blamed, const std::string &end_of_text, std::vector<uint32_t> victims,
              int64_t since_ns, double seconds) {
    double slowest = 0;
    std::string first;
    for (uint32_t r = 0; r < size(); ++r) {
      if (std::count(victims.begin(), victims.end(), r)) continue;
      if (first.empty()) first = text(r);
      EXPECT_EQ(common_->status[r], status) << "rank " << r << ": " << text(r);
      EXPECT_EQ(common_->rank[r], blamed) << "rank " << r << ": " << text(r);
      EXPECT_TRUE(text(r).ends_with(end_of_text)) << "rank " << r << ": " << text(r);
      slowest = std::max(slowest, static_cast<double>(common_->seen_ns[r] - since_ns) * 1e-9);
    }
    EXPECT_LT(slowest, seconds);
    std::printf("seen by all after %.0f ms: %s\n", slowest * 1e3, first.c_str());
  }
  void expect_same_text(const std::vector<uint32_t> &ranks) {
    for (const uint32_t r : ranks) EXPECT_EQ(text(r), text(ranks[0])) << "rank " << r;
  }

 private:
  void enter_namespace(const std::string &space) {
    if (space.empty()) return;
    const Fd file(::open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC));
    if (!file || ::setns(file.get(), CLONE_NEWNET) != 0) throw std::runtime_error("cannot enter " + space);
  }
  std::unique_ptr<Links> make_links(uint32_t rank) {
    RankDescriptors descriptors = make_descriptors();
    std::vector<PeerDescriptors> peers;
    for (uint32_t r = 0; r < size(); ++r) {
      if (r == rank || node_of_[r] != node_of_[rank]) continue;
      while (common_->pids[r] == 0) pause_ms(1);
      peers.push_back({r, Fd(static_cast<int>(::syscall(SYS_pidfd_open, common_->pids[r].load(), 0))), {}});
    }
    return std::make_unique<ProcessLinks>(rank, std::move(descriptors.inbox), std::move(peers));
  }
  std::unique_ptr<MonitorTask> make_task(NodeRank &self, LeaderListener &listener) {
    NodePlan plan{self.rank, node_of_, places_, "secret", name_, limit_ms_, forming_ms, degree};
    if (node_of_[self.rank] == odd_node_) plan.secret = odd_secret_;
    for (size_t node = 0; node < places_.size(); ++node) plan.nodes[node].address = common_->address[node];
    if (leader(plan.node()) != self.rank) return std::make_unique<CoreDumpReporter>(*self.seat, plan);
    if (before_tree) before_tree(self.rank);
    return lead_node(*self.seat, plan, std::move(listener), *self.waiter);
  }
  void join(NodeRank &self) {
    const uint32_t node = node_of_[self.rank];
    enter_namespace(namespaces_[node]);
    const bool leads = leader(node) == self.rank;
    auto links = make_links(self.rank);
    LeaderListener listener;
    if (leads) {
      listener = open_leader_listener(interfaces_[node]);
      std::strncpy(common_->address[node], listener.address.c_str(), sizeof common_->address[node] - 1);
    }
    ++common_->ready;  // no rank dies before all others have its pidfd
    while (common_->ready < size()) pause_ms(1);
    self.seat = std::make_shared<Seat>(self.rank, size(), controls_[node], std::move(links), *self.waiter, self.failure,
                                       limit_ms_);
    for (const uint32_t r : self.ranks)
      if (all_exchange) self.seat->control.set_data_peer(r);
    auto monitor = std::make_unique<Monitor>(self.seat, make_task(self, listener));
    self.world = std::make_unique<ShmWorld>(self.seat, *self.device, "test", std::move(monitor));
    common_->words[1][self.rank].raise(1);
    self.await(1, 1, "the job's start");
  }
  void act(uint32_t rank, const NodeBody &body) {
    NodeRank self;
    self.rank = rank;
    self.common = common_;
    for (uint32_t r = 0; r < size(); ++r) self.ranks.push_back(r);
    self.waiter = std::make_unique<Waiter>(self.failure, nullptr, nullptr, 30'000);
    self.device = device::create_host_device({}, *self.waiter, self.failure);
    const Holdings before = Holdings::without_threads();
    const Error error = test::error_of([&] {
      join(self);
      body(self);
    });
    common_->seen_ns[rank] = now_ns();
    common_->status[rank] = error.status;
    common_->rank[rank] = error.rank;
    std::strncpy(common_->text[rank], error.what(), sizeof common_->text[rank] - 1);
    self.world.reset();
    self.seat.reset();
    const Holdings after = Holdings::await(before);
    if (after.text() != before.text())
      std::snprintf(common_->left_behind[rank], sizeof *common_->left_behind, "%s became %s", before.text().c_str(),
                    after.text().c_str());
    common_->done[rank] = true;
  }

  uint32_t limit_ms_;
  std::string name_;
  Common *common_;
  std::vector<uint32_t> node_of_;
  std::vector<NodePlace> places_;
  std::vector<std::string> interfaces_, namespaces_;
  std::vector<Fd> controls_;
  std::vector<pid_t> pids_;
  uint32_t odd_node_ = UINT32_MAX;
  std::string odd_secret_;
};

}  // namespace fsdp::transport::test
