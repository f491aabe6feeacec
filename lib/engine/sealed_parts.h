// SPDX-License-Identifier: Apache-2.0
// What works on a sealed model's runtime. Each part knows those before it.
#pragma once

#include "engine/checkpoints.h"
#include "engine/gather.h"
#include "engine/graphs.h"
#include "engine/meetings.h"
#include "engine/optimizer.h"
#include "engine/params.h"
#include "engine/reduce.h"
#include "engine/update.h"

namespace fsdp::engine {

struct SealedParts {
  SealedParts(Runtime &runtime, bool adamw)
      : gatherer(runtime),
        reducer(runtime),
        optimizer(runtime, adamw),
        params(runtime),
        checkpoints(runtime, adamw),
        meetings(runtime),
        graphs(runtime, gatherer, reducer, optimizer, checkpoints, meetings),
        update(runtime, gatherer, reducer, optimizer, checkpoints, meetings, graphs, adamw) {}

  Gatherer gatherer;
  Reducer reducer;
  Optimizer optimizer;
  Params params;
  Checkpoints checkpoints;
  Meetings meetings;
  Graphs graphs;
  UpdateWindow update;
};

}  // namespace fsdp::engine
