// SPDX-License-Identifier: Apache-2.0
#include "perf/join.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "membership/wire/endpoint.h"
#include "membership/wire/secret.h"
#include "perf/lab.h"
#include "perf/report.h"
#include "perf/simulated_host.h"

namespace perf {
namespace {

constexpr double patience_seconds = 300;

// Mapped for as long as this object lives.
class SharedJoinMemory {
 public:
  SharedJoinMemory() {
    void *data = ::mmap(nullptr, sizeof(JoinMemory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::runtime_error("no memory for what the hosts report");
    memory_ = static_cast<JoinMemory *>(data);
  }
  ~SharedJoinMemory() { ::munmap(memory_, sizeof(JoinMemory)); }
  SharedJoinMemory(const SharedJoinMemory &) = delete;
  SharedJoinMemory &operator=(const SharedJoinMemory &) = delete;
  JoinMemory &operator*() const { return *memory_; }

 private:
  JoinMemory *memory_;
};

// Starts libcrypto, which takes milliseconds, before there are hosts: real hosts would do it on separate machines.
void start_crypto() { (void)fsdp::membership::authenticate("a secret", "a label", {}); }

// A port at which no process listens yet: rank 0 will.
std::string free_rendezvous() {
  std::string problem;
  const auto places = fsdp::membership::Endpoint::numeric("127.0.0.1", 0, problem);
  const fsdp::Fd listener = fsdp::membership::listen_at(places.at(0), 1);
  if (!listener) throw std::runtime_error("no port of 127.0.0.1 for the rendezvous");
  return "tcp://" + fsdp::membership::Endpoint::local(listener).text();
}

// One job of so many hosts.
class SimulatedJob {
 public:
  SimulatedJob(uint32_t hosts, uint32_t ranks_per_host)
      : hosts_(hosts), ranks_per_host_(ranks_per_host), processes_(hosts) {
    const std::string rendezvous = free_rendezvous();
    std::fflush(nullptr);
    for (uint32_t h = 0; h < hosts; ++h) {
      const pid_t process = ::fork();
      if (process < 0) throw std::runtime_error(fmt::format("no process for host {} of {}", h, hosts));
      if (process == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::_exit(live({h, hosts, ranks_per_host, rendezvous}, *memory_));
      }
      processes_[h] = process;
    }
  }
  ~SimulatedJob() {
    for (const pid_t process : processes_)
      if (process > 0) ::kill(process, SIGKILL);
    reap();
  }
  SimulatedJob(const SimulatedJob &) = delete;
  SimulatedJob &operator=(const SimulatedJob &) = delete;

  // All are in the job, and have met. Throws if one has failed.
  void join() {
    give_order(*memory_, Order::join);
    await(hosts_, "joined");
    check_failed();
  }

  // Returns the seconds until the last host has named it. Throws unless all have named it.
  double kill_host(uint32_t host) {
    const double start = now();
    ::kill(processes_[host], SIGKILL);
    await(2 * hosts_ - 1, "named the host that was killed");
    double last = start;
    for (uint32_t h = 0; h < hosts_; ++h) {
      if (h == host) continue;
      if (report(h).state != JoinReport::named || report(h).named_rank != report_rank(host))
        throw std::runtime_error(fmt::format("host {} names rank {} and not {}: {}", h, report(h).named_rank,
                                             report_rank(host), report(h).text));
      last = std::max(last, report(h).named_at);
    }
    return last - start;
  }

  double close() {
    const double start = now();
    give_order(*memory_, Order::close);
    reap();
    for (uint32_t h = 0; h < hosts_; ++h)
      if (report(h).state != JoinReport::closed)
        throw std::runtime_error(fmt::format("host {} has not closed: {}", h, report(h).text));
    return now() - start;
  }

  template <class Value>
  double most(Value JoinReport::*value) const {
    double most = 0;
    for (uint32_t h = 0; h < hosts_; ++h) most = std::max(most, static_cast<double>(report(h).*value));
    return most;
  }

 private:
  JoinReport &report(uint32_t host) const { return (*memory_).hosts[host]; }
  int32_t report_rank(uint32_t host) const { return static_cast<int32_t>(host * ranks_per_host_); }

  void check_failed() const {
    for (uint32_t h = 0; h < hosts_; ++h)
      if (report(h).state == JoinReport::failed)
        throw std::runtime_error(fmt::format("host {} has failed: {}", h, report(h).text));
  }
  void await(uint32_t count, const char *what) const {
    const double end = now() + patience_seconds;
    while ((*memory_).arrived.load() < count) {
      check_failed();
      if (now() > end)
        throw std::runtime_error(
            fmt::format("{} of {} hosts have not {}", count - (*memory_).arrived.load(), hosts_, what));
      ::usleep(2000);
    }
  }
  void reap() {
    for (pid_t &process : processes_)
      if (process > 0) {
        ::waitpid(process, nullptr, 0);
        process = 0;
      }
  }

  uint32_t hosts_, ranks_per_host_;
  SharedJoinMemory memory_;
  std::vector<pid_t> processes_;
};

double processor_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_CHILDREN, &used);
  const auto seconds = [](const timeval &time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

Line line_of(const Request &request, uint32_t hosts, const char *variant, double seconds) {
  Line line;
  line.operation = "join";
  line.variant = fmt::format("{} hosts, {}", hosts, variant);
  line.ranks = hosts * request.ranks_per_host;
  line.seconds = seconds;
  line.pairs = 1;
  return line;
}

void measure_join(const Request &request, uint32_t hosts, Report &report) {
  const double before = processor_seconds();
  SimulatedJob job(hosts, request.ranks_per_host);
  job.join();
  Line line = line_of(request, hosts, "join", job.most(&JoinReport::join_seconds));
  line.more = {{"connections", job.most(&JoinReport::connections)}, {"MiB", job.most(&JoinReport::bytes) / (1 << 20)}};
  report.add(line);
  report.add(line_of(request, hosts, "agree", job.most(&JoinReport::agree_seconds)));
  report.add(line_of(request, hosts, "all-gather", job.most(&JoinReport::gather_seconds)));
  Line closing = line_of(request, hosts, "close", job.close());
  closing.more = {{"processor s of all", processor_seconds() - before}};
  report.add(closing);
}

void measure_death(const Request &request, uint32_t hosts, uint32_t victim, const char *variant, Report &report) {
  SimulatedJob job(hosts, request.ranks_per_host);
  job.join();
  report.add(line_of(request, hosts, variant, job.kill_host(victim)));
}

}  // namespace

int run_join(const Request &request) {
  Report report(true);
  start_crypto();
  for (uint32_t hosts = 2; hosts < request.hosts; hosts *= 4) measure_join(request, hosts, report);
  measure_join(request, request.hosts, report);
  if (request.hosts > 2) {
    measure_death(request, request.hosts, request.hosts - 1, "leaf killed", report);
    measure_death(request, request.hosts, 1, "inner killed", report);
  }
  const std::string machine = describe_machine();
  if (!request.json_file.empty()) report.write_json(request.json_file, machine);
  return 0;
}

}  // namespace perf
