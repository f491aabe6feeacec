// SPDX-License-Identifier: Apache-2.0
// One rank of a run of fsdp-perf, and what every operation is measured with.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "device/device.h"
#include "perf/lab.h"
#include "perf/report.h"
#include "perf/request.h"
#include "transport/team.h"

namespace perf {

class Peers;
enum class PeerOperation : uint32_t;

// The rank's membership in a world of its own below the C ABI, as a context would hold it.
struct Member {
  Member() : waiter(failure, nullptr, nullptr, 300'000) {}
  fsdp::Failure failure;
  fsdp::Waiter waiter;
  std::unique_ptr<fsdp::device::Device> device;
  std::unique_ptr<fsdp::transport::World> world;
  std::unique_ptr<fsdp::transport::Team> team;
};

struct Bench {
  const Request &request;
  Lab lab;
  std::string rendezvous;
  Member &member;
  Report &report;  // rank 0's is printed
  Peers *peers;    // NULL: not measured

  uint32_t rank() const { return lab.rank(); }
  uint32_t size() const { return lab.size(); }
  fsdp::device::Stream &stream() const { return member.device->caller_stream(nullptr); }
};

using Work = std::function<void()>;

struct Measured {
  double seconds = 0;      // median of one run of the work
  double reference = 0;    // ... and of its reference
  double ratio = 0;        // median of reference / work over the pairs
  double p99_seconds = 0;  // over the pairs
  double peer = 0;         // the best peer; 0: none
  double peer_ratio = 0;   // median of peer / work
  uint32_t pairs = 0;
};

struct PeerCall {
  PeerOperation operation;
  uint64_t bytes;
  std::optional<PeerOperation> other = {};  // an equivalent operation; the faster one is reported
};

// Work, reference and peer take turns, so that other load on the machine affects all of them equally.
Measured measure(Bench &bench, const Work &work, const Work &reference, std::optional<PeerCall> peer = {});
// The reference is the time until one rank sees another rank's flag.
Measured measure_latency(Bench &bench, const Work &work, std::optional<PeerCall> peer = {});

// The copy that the figures are compared with: n bytes from private memory to private memory on every rank at once, by
// the fastest of memcpy, the string instruction and non-temporal stores.
class CopyReference {
 public:
  CopyReference(Bench &bench, uint64_t bytes);
  void operator()();
  const char *name() const;

 private:
  std::unique_ptr<fsdp::device::Memory> from_, to_;
  uint64_t bytes_;
  uint32_t kind_ = 0;
};

// What ranks add up: small whole numbers, exact in every dtype, whatever the order.
inline float addend(uint32_t rank, uint64_t i) { return static_cast<float>((i + 3 * rank) % 8); }

double median(std::vector<double> values);
Line make_line(const Bench &bench, const char *operation, const char *variant, const char *dtype, uint64_t bytes,
               const Measured &measured);

// Each measures all its variants and sizes and reports them.
void run_all_gather(Bench &bench);
void run_reduce_scatter(Bench &bench);
void run_all_reduce(Bench &bench);
void run_barrier(Bench &bench);
void run_unshard(Bench &bench);
void run_reduce(Bench &bench);
void run_unshard_reshard(Bench &bench);
void run_adamw(Bench &bench);
void run_compact_adamw(Bench &bench);  // a part of run_adamw()
void run_quantize(Bench &bench);
void run_layout(Bench &bench);
void run_step(Bench &bench);
void run_step_save(Bench &bench);
void run_step_home(Bench &bench);
void run_outer(Bench &bench);
void run_save(Bench &bench);
void run_load(Bench &bench);

}  // namespace perf
