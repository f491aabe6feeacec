// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "perf/bench.h"

namespace perf {

struct Operation {
  const char *name;
  void (*run)(Bench &bench);
  bool needs_peers;         // nothing to measure on one rank
  bool on_request = false;  // not among all
};

constexpr Operation operations[] = {
    {"barrier", run_barrier, true},
    {"all_gather", run_all_gather, true},
    {"reduce_scatter", run_reduce_scatter, true},
    {"all_reduce", run_all_reduce, true},
    {"unshard", run_unshard, true},
    {"reduce", run_reduce, true},
    {"unshard_reshard", run_unshard_reshard, false},
    {"adamw", run_adamw, false},
    {"quantize", run_quantize, false, true},
    {"layout", run_layout, false},
    {"step", run_step, true},
    {"outer", run_outer, true, true},
    {"save", run_save, false, true},
    {"load", run_load, false, true},
    {"step_save", run_step_save, false, true},
    {"step_home", run_step_home, false, true},
};

}  // namespace perf
