// SPDX-License-Identifier: Apache-2.0
// The reduce between hosts: two ranks that share no memory sum a buffer over TCP and by UCX, beside a TCP connection
// that swaps as many bytes and sums nothing. Over TCP it is also measured with checksums of messages, and within TLS.
// Each rank sends every byte once, and so does the reference. The ranks are on one host, if need be in network
// namespaces of their own.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "perf/bench.h"
#include "perf/raw_socket.h"
#include "transport/net.h"

namespace perf {
namespace {

using fsdp::fail;

void enter_namespace(const std::string &name) {
  const fsdp::Fd file(::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || ::setns(file.get(), CLONE_NEWNET) != 0)
    fsdp::fail_errno(errno, "network namespace '" + name + "' (made by: ip netns add; entering it takes root)");
  // UCX looks for devices in /sys, which shows those of the namespace that mounted it.
  const bool shown = ::unshare(CLONE_NEWNS) == 0 && ::mount("", "/", "none", MS_SLAVE | MS_REC, nullptr) == 0 &&
                     ::mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0;
  if (!shown) fsdp::fail_errno(errno, "/sys of network namespace '" + name + "'");
}

// Asks only for what goes through the network: on one host UCX would find shared memory. A port at the loopback device
// may be trusted; for other devices the user has to say so.
void choose_devices(const Request &request) {
  ::setenv("UCX_TLS", "tcp,self", 0);
  if (!request.namespaces.empty() || std::getenv("UCX_NET_DEVICES")) return;
  ::setenv("UCX_NET_DEVICES", "lo", 1);
  ::setenv("FSDP_UCX_TCP", "trusted", 1);
}

struct Wire {
  const char *name;
  std::unique_ptr<fsdp::transport::Net> net;
  std::unique_ptr<fsdp::transport::Collectives> communicator;
};

class Outer {
 public:
  explicit Outer(Bench &bench) : bench_(bench) {
    Member &member = bench.member;
    seat_ = fsdp::transport::create_lone_seat(bench.rank(), 2, member.waiter, member.failure);
    connect();
    const auto tcp = [&](fsdp::transport::NetProtection guarded) {
      return fsdp::transport::create_tcp_net(bench.rank(), socket_.local_address(), guarded);
    };
    add("TCP", tcp({}));
    add("TCP CRC32C", tcp({.checksum = true}));
    try_to_add("TCP TLS", [&] { return tcp({.encryption = true}); });
    try_to_add("UCX", [&] { return fsdp::transport::create_ucx_net(bench.rank(), false); });
  }

  void measure_size(uint64_t bytes) {
    const auto values = bench_.member.device->allocate(bytes, "values");
    const auto other = bench_.member.device->allocate(bytes, "what the reference receives");
    auto *floats = reinterpret_cast<float *>(values->data());
    const Work reference = [&] { socket_.swap(values->data(), other->data(), bytes); };
    for (Wire &wire : wires_) measure_wire(wire, floats, bytes, reference);
  }

 private:
  void measure_wire(Wire &wire, float *floats, uint64_t bytes, const Work &reference) {
    const auto values = fsdp::transport::Part::alone(floats);
    const fsdp::transport::Sum span{.from = values, .to = values, .count = bytes / sizeof(float), .everywhere = true};
    const Work work = [&] { wire.communicator->sum({&span, 1}, false, {1, "outer"}, bench_.stream()); };
    Line line = make_line(bench_, "outer", wire.name, "fp32", bytes, measure(bench_, work, reference));
    line.reference = "raw TCP socket";
    if (bench_.request.check) {
      for (uint64_t i = 0; i < span.count; ++i) floats[i] = addend(bench_.rank(), i);
      const uint64_t before = wire.communicator->sent_bytes();
      work();
      uint64_t wrong = wire.communicator->sent_bytes() - before != bytes;
      for (uint64_t i = 0; i < span.count; ++i) wrong += floats[i] != addend(0, i) + addend(1, i);
      line.wrong = bench_.lab.sum(wrong);
      line.checked = true;
    }
    bench_.report.add(line);
  }

  // Both ranks have the same libraries and settings.
  template <class Make>
  void try_to_add(const char *name, Make &&make) {
    std::unique_ptr<fsdp::transport::Net> net;
    try {
      net = make();
    } catch (const fsdp::Error &error) {
      if (error.status != FSDP_UNSUPPORTED) throw;
      std::fprintf(stderr, "without %s: %s\n", name, error.message.c_str());
      return;
    }
    add(name, std::move(net));
  }

  void add(const char *name, std::unique_ptr<fsdp::transport::Net> net) {
    const fsdp::transport::NetAddresses addresses(bench_.member.team->all_gather(net->address(), "addresses"));
    net->join({addresses, "measured", "fsdp-perf", 8000}, seat_, *bench_.member.device);
    auto communicator = net->create_collectives({0, 1}, 1, "outer reduce");
    wires_.push_back({name, std::move(net), std::move(communicator)});
  }

  void connect() {
    uint16_t port = 0, ports[2];
    if (bench_.rank() == 0) {
      socket_.listen();
      port = socket_.port();
    }
    bench_.member.team->all_gather(&port, sizeof port, ports, "port");
    if (bench_.rank() == 0)
      socket_.accept();
    else
      socket_.connect(bench_.request.address, ports[0]);
  }

  Bench &bench_;
  std::shared_ptr<fsdp::membership::Seat> seat_;
  RawSocket socket_;
  std::vector<Wire> wires_;
};

}  // namespace

void run_outer(Bench &bench) {
  const Request &request = bench.request;
  if (bench.size() != 2 || request.threads) fail(FSDP_INVALID_ARGUMENT, "outer is measured with two processes: -n 2");
  choose_devices(request);
  if (!request.namespaces.empty()) enter_namespace(request.namespaces[bench.rank()]);
  Outer outer(bench);
  for (const uint64_t bytes : request.sizes()) outer.measure_size(bytes / 8 * 8);
}

}  // namespace perf
