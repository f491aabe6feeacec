// SPDX-License-Identifier: Apache-2.0
#include "perf/simulated_host.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "perf/bench.h"

namespace perf {
namespace {

constexpr int exchanges = 5;                                  // the first one also connects
constexpr uint32_t look_us = 20'000, slow_look_us = 200'000;  // of few hosts, of many
constexpr uint32_t few_hosts = 512;
constexpr uint32_t weighed_hosts = 128;             // hosts whose memory is measured, which takes a walk over all of
                                                    // their pages
constexpr uint32_t heartbeat_timeout_ms = 100'000;  // thousands of hosts share the cores of one

int64_t call_futex(std::atomic<uint32_t> &word, int operation, uint32_t value) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), operation, value, nullptr, nullptr, 0);
}

// Pages that no other process maps.
uint64_t private_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  uint64_t kilobytes = 0;
  for (std::string word; file >> word;) {
    uint64_t value = 0;
    if ((word == "Private_Clean:" || word == "Private_Dirty:") && file >> value) kilobytes += value;
  }
  return kilobytes * 1024;
}

uint32_t count_sockets() {
  uint32_t count = 0;
  for (const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    const std::string to = std::filesystem::read_symlink(entry.path(), none).string();
    count += to.starts_with("socket:");
  }
  return count;
}

// To one core each, in turn: a host that waits then sleeps, and does not spin as one that has the machine for itself.
void bind_to_core(uint32_t host) {
  cpu_set_t allowed, mine;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  uint32_t place = host % static_cast<uint32_t>(CPU_COUNT(&allowed));
  CPU_ZERO(&mine);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && place-- == 0) CPU_SET(cpu, &mine);
  ::sched_setaffinity(0, sizeof mine, &mine);
}

class Host {
 public:
  Host(const SimulatedHost &place, JoinMemory &memory)
      : place_(place), memory_(memory), report_(memory.hosts[place.host]) {}

  void join() {
    member_.device = fsdp::device::create_host_device({}, member_.waiter, member_.failure);
    await_order(memory_, Order::join);
    const bool weighed = place_.host < weighed_hosts;
    const uint64_t before = weighed ? private_bytes() : 0;
    const double start = now();
    fsdp::membership::WorldOptions options;
    options.rank = place_.leader();
    options.size = place_.hosts * place_.ranks_per_host;
    options.rendezvous = place_.rendezvous;
    options.secret = "the secret of simulated hosts";
    options.heartbeat_timeout_ms = heartbeat_timeout_ms;
    options.host_id = "simulated host " + std::to_string(place_.host);
    for (uint32_t r = 1; r < place_.ranks_per_host; ++r) options.stand_ins.push_back(place_.leader() + r);
    member_.world = fsdp::transport::create_process_world(options, member_.waiter, member_.failure, *member_.device);
    report_.join_seconds = now() - start;
    if (weighed) report_.bytes = std::max(private_bytes(), before) - before;
  }

  void exchange() {
    std::vector<uint32_t> leaders;
    for (uint32_t h = 0; h < place_.hosts; ++h) leaders.push_back(h * place_.ranks_per_host);
    const auto team = member_.world->create_team(leaders, "all leaders");
    report_.agree_seconds = fastest([&] { team->barrier("agree"); });
    std::array<std::byte, 64> mine{};
    std::vector<std::byte> all(leaders.size() * mine.size());
    report_.gather_seconds = fastest([&] { team->all_gather(mine.data(), mine.size(), all.data(), "gather"); });
    report_.connections = count_sockets();
  }

  // Until the job ends: by an error, which is noted, or in order.
  void watch() {
    report_.state = JoinReport::joined;
    memory_.arrived.fetch_add(1);
    while (memory_.order.load() < static_cast<uint32_t>(Order::close)) {
      member_.world->check();
      ::usleep(place_.hosts > few_hosts ? slow_look_us : look_us);
    }
    const double start = now();
    member_.world->leave();
    member_.world.reset();
    report_.close_seconds = now() - start;
    report_.state = JoinReport::closed;
  }

  void note(const fsdp::Error &error) {
    report_.named_at = now();
    report_.named_rank = error.rank;
    std::strncpy(report_.text, error.message.c_str(), sizeof report_.text - 1);
    report_.state = report_.state == JoinReport::joined ? JoinReport::named : JoinReport::failed;
    memory_.arrived.fetch_add(1);
  }

 private:
  template <class Call>
  static double fastest(Call &&call) {
    std::vector<double> seconds;
    for (int i = 0; i < exchanges; ++i) {
      const double start = now();
      call();
      seconds.push_back(now() - start);
    }
    return *std::min_element(seconds.begin(), seconds.end());
  }

  const SimulatedHost &place_;
  JoinMemory &memory_;
  JoinReport &report_;
  Member member_;
};

}  // namespace

void await_order(JoinMemory &memory, Order order) {
  for (uint32_t found = memory.order.load(); found < static_cast<uint32_t>(order); found = memory.order.load())
    call_futex(memory.order, FUTEX_WAIT, found);
}

void give_order(JoinMemory &memory, Order order) {
  memory.order.store(static_cast<uint32_t>(order));
  call_futex(memory.order, FUTEX_WAKE, INT32_MAX);
}

int live(const SimulatedHost &place, JoinMemory &memory) {
  bind_to_core(place.host);
  Host host(place, memory);
  try {
    host.join();
    host.exchange();
    host.watch();
    return 0;
  } catch (const fsdp::Error &error) {
    host.note(error);
    return 1;
  }
}

}  // namespace perf
