// SPDX-License-Identifier: Apache-2.0
#include "engine/gather_values.h"

namespace fsdp::engine {

// From the ranks of the inner axis first, then from those of the outer one where it divides slots.
device::Stream &gather_values(Runtime &runtime, const ValuesGather &gather, device::Stream &caller) {
  CollectiveStream &reduces = runtime.reduces;
  const layout::Mesh &mesh = runtime.spec.mesh;
  const uint64_t bytes = gather.bytes * mesh.inner_size, version = runtime.step.version();
  const uint32_t part = mesh.slices() > 1 ? mesh.outer_index(runtime.teams.all->rank()) : 0;
  const transport::Gather near{gather.from, gather.whole + part * bytes, gather.bytes};
  caller.record(*runtime.marks.order);
  if (!runtime.marks.order->done()) reduces.stream->wait(*runtime.marks.order);
  if (runtime.communicates()) {
    reduces.trace->begin("all_gather", gather.of, bytes);
    reduces.comm->gather({&near, 1}, {no_group, gather.of.in_flight}, *reduces.stream);
    reduces.trace->end("all_gather", gather.of, bytes, version, *reduces.comm);
  } else {
    reduces.stream->copy(near.to, near.from.own, near.bytes);
  }
  if (mesh.slices() == 1) return *reduces.stream;
  reduces.stream->record(gather.event);
  runtime.outer->gather_values(gather.of, gather.whole, bytes, gather.event, version);
  return runtime.outer->stream();
}

}  // namespace fsdp::engine
