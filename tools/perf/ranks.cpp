// SPDX-License-Identifier: Apache-2.0
#include "perf/ranks.h"

#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "perf/operations.h"

namespace perf {
namespace {

void perform(Bench &bench) {
  for (const Operation &operation : operations) {
    const auto &wanted = bench.request.operations;
    if (wanted.empty() && operation.on_request) continue;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), operation.name) == wanted.end()) continue;
    if (bench.size() == 1 && operation.needs_peers) continue;
    operation.run(bench);
  }
}

void write_report(const Request &request, const Report &report) {
  const std::string machine = describe_machine();
  if (!request.json_file.empty()) report.write_json(request.json_file, machine);
  if (!request.plot_file.empty()) write_plot(request.plot_file, report.lines(), machine);
}

// As launchers do: each rank gets its share of the cores that this process may use, and all its threads stay there.
// Left alone, the kernel may run two ranks on one core for milliseconds while another is idle.
void bind_to_cores(uint32_t rank, uint32_t ranks) {
  cpu_set_t allowed, mine;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  const auto cores = static_cast<uint32_t>(CPU_COUNT(&allowed));
  if (ranks > cores) return;
  CPU_ZERO(&mine);
  uint32_t ordinal = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    if (ordinal >= rank * cores / ranks && ordinal < (rank + 1) * cores / ranks) CPU_SET(cpu, &mine);
    ++ordinal;
  }
  ::sched_setaffinity(0, sizeof mine, &mine);
}

// The world is made by `join`, which differs between processes and threads. Returns the exit status.
template <class Join>
int act(const Request &request, Peers *peers, LabMemory &memory, uint32_t rank, const std::string &rendezvous,
        Join &&join) {
  if (request.bind) bind_to_cores(rank, request.ranks);
  try {
    Member member;
    member.device = fsdp::device::create_host_device({}, member.waiter, member.failure);
    member.world = join(member);
    std::vector<uint32_t> all(request.ranks);
    std::iota(all.begin(), all.end(), 0);
    member.team = member.world->create_team(all, "fsdp-perf");
    Report report(rank == 0);
    Bench bench{request, Lab(memory, rank, request.ranks), rendezvous, member, report, peers};
    perform(bench);
    bench.lab.meet();
    member.world->leave();
    if (rank != 0) return 0;
    write_report(request, report);
    if (report.wrong()) fmt::print(stderr, "fsdp-perf: {} wrong elements\n", report.wrong());
    return report.wrong() ? 1 : 0;
  } catch (const std::exception &error) {
    memory.failed.store(true);
    fmt::print(stderr, "fsdp-perf: rank {}: {}\n", rank, error.what());
    return 1;
  }
}

int run_threads(const Request &request, Peers *peers, LabMemory &memory) {
  auto job = fsdp::transport::create_local_job(request.ranks);
  std::vector<int> codes(request.ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < request.ranks; ++rank)
    threads.emplace_back([&, rank] {
      codes[rank] = act(request, peers, memory, rank, "", [&](Member &member) {
        return fsdp::transport::create_local_world(job, rank, member.waiter, member.failure, *member.device);
      });
    });
  for (std::thread &thread : threads) thread.join();
  return *std::max_element(codes.begin(), codes.end());
}

// Waits for these processes alone, since the peers' jobs are children too. Returns the worst exit status. A process
// that is killed makes the others stop.
int await_processes(std::vector<pid_t> processes, LabMemory &memory) {
  int worst = 0;
  while (!processes.empty()) {
    for (size_t i = processes.size(); i-- > 0;) {
      int status = 0;
      if (::waitpid(processes[i], &status, WNOHANG) != processes[i]) continue;
      if (!WIFEXITED(status)) memory.failed.store(true);
      worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 1);
      processes.erase(processes.begin() + static_cast<long>(i));
    }
    ::usleep(20'000);
  }
  return worst;
}

int run_processes(const Request &request, Peers *peers, LabMemory &memory) {
  const std::string rendezvous = fmt::format("fsdp-perf-{}", ::getpid());
  std::vector<pid_t> processes;
  std::fflush(nullptr);
  for (uint32_t rank = 0; rank < request.ranks; ++rank) {
    const pid_t process = ::fork();
    if (process < 0) throw std::runtime_error("fork failed");
    if (process == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int code = act(request, peers, memory, rank, rendezvous, [&](Member &member) {
        fsdp::membership::WorldOptions options;
        options.rank = rank;
        options.size = request.ranks;
        options.rendezvous = rendezvous;
        return fsdp::transport::create_process_world(options, member.waiter, member.failure, *member.device);
      });
      std::fflush(nullptr);
      ::_exit(code);
    }
    processes.push_back(process);
  }
  return await_processes(processes, memory);
}

}  // namespace

int run_ranks(const Request &request, Peers *peers) {
  LabMemory &memory = *create_lab_memory();
  return request.threads ? run_threads(request, peers, memory) : run_processes(request, peers, memory);
}

}  // namespace perf
