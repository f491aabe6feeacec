// SPDX-License-Identifier: Apache-2.0
#include "run/job.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>

#include "run/console.h"
#include "run/exit_order.h"
#include "run/failure.h"
#include "run/job_environment.h"
#include "run/rank_process.h"

namespace run {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int timeout_status = 124;  // as timeout(1)

// A port that no other job on this machine gets while this object lives. It is bound but not listened on, and lets
// others bind it (SO_REUSEADDR): a program may still use MASTER_PORT for its own purposes.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto *generic = reinterpret_cast<sockaddr *>(&address);
    if (socket_.get() < 0 || setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(socket_.get(), generic, length) != 0 || getsockname(socket_.get(), generic, &length) != 0)
      fail("cannot find a free port on 127.0.0.1");
    port_ = ntohs(address.sin_port);
  }
  uint16_t port() const { return port_; }

 private:
  UniqueFd socket_;
  uint16_t port_;
};

UniqueFd block_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&set, number);
  struct sigaction hangup;
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);  // nohup
  if (sigprocmask(SIG_BLOCK, &set, nullptr) != 0) fail("cannot block signals");
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, ranks leave no status
  UniqueFd fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (fd.get() < 0) fail("cannot make a signalfd");
  return fd;
}

std::string describe(const Exit &exit) {
  if (exit.signal == 0) return fmt::format("exited with status {}", exit.status);
  return fmt::format("was killed by signal {} ({})", exit.signal, strsignal(exit.signal));
}

struct Rank {
  RankProcess process;
  LineSplitter out, err;
};

class Job {
 public:
  explicit Job(const JobOptions &options)
      : options_(options), environment_(options, port_.port()), signals_(block_signals()), started_(Clock::now()) {}

  int run() {
    run_attempt();
    for (; failed_ && !forwarded_ && attempt_ < options_.max_restarts; run_attempt()) {
      ++attempt_;
      say(fmt::format("starting the ranks again (restart {} of {})", attempt_, options_.max_restarts));
      forget_attempt();
    }
    console_.finish();
    return status_;
  }

 private:
  void run_attempt() {
    start();
    while (running() > 0) {
      wait();
      read_signals();
      read_output();
      check_exits();
      check_clock();
    }
    read_output();  // what the last ones wrote before they ended
    for (auto &rank : ranks_) {
      rank.out.finish();
      rank.err.finish();
    }
  }

  void forget_attempt() {
    ranks_.clear();
    status_ = 0;
    ending_ = failed_ = killed_ = false;
    end_at_.reset();
    kill_at_.reset();
  }

  uint32_t world_rank(size_t r) const { return options_.node_rank * options_.ranks + static_cast<uint32_t>(r); }

  void start() {
    const size_t width = std::to_string(options_.nodes * options_.ranks - 1).size();
    for (uint32_t r = 0; r < options_.ranks; ++r) {
      const auto prefix = options_.prefix ? fmt::format("[{:>{}}] ", world_rank(r), width) : std::string();
      ranks_.push_back({RankProcess(options_.command, environment_.of_rank(r, attempt_)),
                        LineSplitter(console_, 1, prefix, r == 0), LineSplitter(console_, 2, prefix, r == 0)});
      exits_.watch(r, ranks_.back().process.ended.get());
    }
  }

  size_t running() const {
    return static_cast<size_t>(
        std::count_if(ranks_.begin(), ranks_.end(), [](const Rank &rank) { return rank.process.running(); }));
  }

  void wait() {
    std::vector<pollfd> fds{{signals_.get(), POLLIN, 0}, {exits_.fd(), POLLIN, 0}};
    for (const auto &rank : ranks_)
      for (const auto *fd : {&rank.process.out, &rank.process.err})
        if (fd->get() >= 0) fds.push_back({fd->get(), POLLIN, 0});
    int timeout_ms = -1;
    if (const auto next = next_deadline()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count();
      timeout_ms = static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
    }
    if (poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR) fail("cannot wait for the ranks");
  }

  std::optional<Clock::time_point> next_deadline() const {
    if (kill_at_) return kill_at_;
    if (ending_) return std::nullopt;
    std::optional<Clock::time_point> next = end_at_;
    if (options_.timeout.count() > 0) {
      const auto timeout = started_ + in_ticks(options_.timeout);
      next = next ? std::min(*next, timeout) : timeout;
    }
    return next;
  }

  static Clock::duration in_ticks(std::chrono::duration<double> seconds) {
    return std::chrono::duration_cast<Clock::duration>(seconds);
  }

  void read_signals() {
    signalfd_siginfo info;
    while (read(signals_.get(), &info, sizeof info) == sizeof info) {
      const int number = static_cast<int>(info.ssi_signo);
      if (forwarded_) {  // asked twice: now
        say("got a second signal; killing all ranks");
        kill_all();
      } else {
        say(fmt::format("forwarding signal {} ({}) to all ranks", number, strsignal(number)));
        forwarded_ = true;
        end_all(number);
      }
    }
  }

  void read_output() {
    for (auto &rank : ranks_) {
      drain(rank.process.out, rank.out);
      drain(rank.process.err, rank.err);
    }
    console_.flush();
    if (console_.closed() && !ending_) {  // as if SIGPIPE had ended us
      if (status_ == 0) status_ = 128 + SIGPIPE;
      end_all(SIGTERM);
    }
  }

  static void drain(UniqueFd &fd, LineSplitter &lines) {
    char buffer[65536];
    // So many reads empty any pipe, and one busy rank does not keep the others waiting.
    for (int turn = 0; turn < 16 && fd.get() >= 0; ++turn) {
      const ssize_t got = read(fd.get(), buffer, sizeof buffer);
      if (got > 0) {
        lines.feed({buffer, static_cast<size_t>(got)});
      } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        lines.finish();
        fd.reset();
      } else if (errno == EAGAIN) {
        return;
      }
    }
  }

  // Each in the order in which they ended. Of those that failed by themselves the first is the cause, with one
  // exception. No rank gets SIGKILL because a peer has failed, so a rank that got it is the cause, even if the others
  // were faster to end.
  void check_exits() {
    for (const size_t r : exits_.take()) {
      const auto exit = ranks_[r].process.poll_exit();
      if (!exit || exit->status == 0) continue;
      const bool killed = exit->signal == SIGKILL && !killed_ && !ending_;
      if (status_ == 0 || killed) blame(r, *exit);
      killed_ = killed_ || killed;
    }
    if (status_ != 0 && running() > 0 && !ending_ && !end_at_) give_grace();
  }

  void blame(size_t r, const Exit &exit) {
    read_output();  // the rank's last output comes before the line of fsdp-run
    status_ = exit.status;
    say(fmt::format("rank {} (pid {}) {}", world_rank(r), ranks_[r].process.pid(), describe(exit)));
    failed_ = failed_ || !ending_;
  }

  void give_grace() {
    if (options_.grace.count() > 0)
      say(fmt::format("{} {:g} s to report and end (--grace-seconds)",
                      running() == 1 ? "the other rank has" : fmt::format("the other {} have", running()),
                      options_.grace.count()));
    end_at_ = Clock::now() + in_ticks(options_.grace);
  }

  void check_clock() {
    const auto next = next_deadline();
    if (!next || Clock::now() < *next || running() == 0) return;
    if (kill_at_) {
      say(fmt::format("{} rank(s) did not end within {:g} s; killing", running(), options_.kill.count()));
      return kill_all();
    }
    if (end_at_ && *next == *end_at_) {
      say(fmt::format("{} rank(s) did not end by themselves within {:g} s; ending them", running(),
                      options_.grace.count()));
    } else {
      if (!failed_) status_ = timeout_status;
      say(fmt::format("not done after {:g} s; ending {} rank(s)", options_.timeout.count(), running()));
    }
    end_all(SIGTERM);
  }

  void end_all(int number) {
    ending_ = true;
    kill_at_ = Clock::now() + in_ticks(options_.kill);
    for (const auto &rank : ranks_) rank.process.signal(number);
  }

  void kill_all() {
    kill_at_.reset();
    for (const auto &rank : ranks_) rank.process.signal(SIGKILL);
  }

  void say(const std::string &text) {
    console_.write_line(2, "fsdp-run: " + text);
    console_.flush();
  }

  const JobOptions &options_;
  ReservedPort port_;
  JobEnvironment environment_;
  UniqueFd signals_;
  Clock::time_point started_;
  Console console_;
  ExitOrder exits_;
  std::vector<Rank> ranks_;
  int status_ = 0;
  uint32_t attempt_ = 0;
  bool failed_ = false;                       // a rank ended by itself, with a failure
  bool killed_ = false;                       // ... by a SIGKILL that fsdp-run did not send
  bool ending_ = false;                       // the ranks were told to end
  bool forwarded_ = false;                    // ... because this process got a signal
  std::optional<Clock::time_point> end_at_;   // when the grace period ends
  std::optional<Clock::time_point> kill_at_;  // when ranks that SIGTERM did not end get SIGKILL
};

}  // namespace

int run_job(const JobOptions &options) { return Job(options).run(); }

}  // namespace run
