// SPDX-License-Identifier: Apache-2.0
// Network namespaces joined by a bridge, each with its own address, stand for hosts that can be cut off. They are made
// and removed here, which needs root and the ip tool.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

namespace fsdp::transport::test {

class TestNetwork {
 public:
  explicit TestNetwork(uint32_t hosts) : hosts_(hosts), id_(next_id()) {
    works_ = run("ip link add {} type bridge", bridge()) && run("ip link set {} up", bridge());
    for (uint32_t h = 0; h < hosts && works_; ++h)
      works_ = run("ip netns add {}", space(h)) &&
               run("ip link add {} type veth peer name eth0 netns {}", port(h), space(h)) &&
               run("ip link set {} master {} up", port(h), bridge()) &&
               run("ip -n {} address add {}/24 dev eth0", space(h), address(h)) &&
               run("ip -n {} link set lo up", space(h)) && run("ip -n {} link set eth0 up", space(h)) && runs(h);
  }
  ~TestNetwork() {
    for (uint32_t h = 0; h < hosts_; ++h) (void)run("ip link del {}", port(h));
    for (uint32_t h = 0; h < hosts_; ++h) (void)run("ip netns del {}", space(h));
    (void)run("ip link del {}", bridge());
  }
  TestNetwork(const TestNetwork &) = delete;
  TestNetwork &operator=(const TestNetwork &) = delete;

  // Returns whether namespaces can be made here. If so, a test fails if works() is false.
  static bool possible() { return ::geteuid() == 0 && std::system("ip netns list >/dev/null 2>&1") == 0; }
  bool works() const { return works_; }
  std::string space(uint32_t host) const { return fmt::format("fsdp-test-{}-{}", id_, host); }
  std::string address(uint32_t host) const { return fmt::format("10.77.0.{}", host + 1); }
  // Cuts silently: packets are dropped, and no end is told.
  bool cut(uint32_t host) { return run("ip link set {} nomaster", port(host)); }
  bool heal(uint32_t host) { return run("ip link set {} master {}", port(host), bridge()); }
  // Does the same for connections between these hosts only.
  bool part(uint32_t one, uint32_t other) { return isolate(one, "on") && isolate(other, "on"); }
  bool join(uint32_t one, uint32_t other) { return isolate(one, "off") && isolate(other, "off"); }

 private:
  // The kernel marks a device as running some time after the device was set up. Until then UCX refuses it.
  bool runs(uint32_t host) const {
    return run("timeout 10 sh -c 'until ip -n {} -o link show dev eth0 | grep -q \"state UP\"; do sleep 0.01; done'",
               space(host));
  }
  bool isolate(uint32_t host, const char *how) {
    return run("ip link set {} type bridge_slave isolated {}", port(host), how);
  }
  // The kernel removes a namespace some time after its name is gone.
  static uint32_t next_id() {
    static uint32_t made = 0;
    return static_cast<uint32_t>(::getpid()) % 6000 * 10 + made++ % 10;
  }
  std::string bridge() const { return fmt::format("fbr{}", id_); }
  std::string port(uint32_t host) const { return fmt::format("fp{}-{}", id_, host); }
  template <class... Args>
  static bool run(fmt::format_string<const Args &...> command, const Args &...args) {
    return std::system((fmt::format(command, args...) + " >/dev/null 2>&1").c_str()) == 0;
  }

  uint32_t hosts_, id_;
  bool works_;
};

}  // namespace fsdp::transport::test
