// SPDX-License-Identifier: Apache-2.0
// Which ranks of this host have died: whose process has ended, or has crashed and is writing its core.
#pragma once

#include <string>

#include "base/fd.h"
#include "membership/liveness/control.h"
#include "membership/liveness/links.h"
#include "membership/liveness/pulse.h"
#include "membership/verdict.h"

namespace fsdp::membership {

// Whether a process is writing its core. Until the core is written, for minutes if the process has much memory, it
// neither beats nor ends: its pidfd says that it lives, and its connections stay open.

// process: a pidfd, since a process number may be of another namespace or of a later process. False also where the
// kernel does not tell: before Linux 4.15, or if /proc shows the process to its own user only. Reads two files. proc:
// where /proc is mounted.
bool is_dumping_core(const Fd &process, const char *proc = "/proc") noexcept;

class Deaths {
 public:
  // Looks for dead ranks among those that have not left the job and are not `known`. May be called again: what was
  // found stays. Only ranks whose heartbeats are late are checked for a core dump.
  void find(const Control &control, Links &links, const Pulse &pulse, const RankSet &known = {});
  bool empty() const noexcept { return ranks_.empty(); }
  const RankSet &ranks() const noexcept { return ranks_; }
  // "reduce_scatter of 'layer.3' (#17): rank 5 died; rank 3 (pid 77, host a) is dumping core"
  Accusation accuse(const std::string &where, const Control &control) const;

 private:
  RankSet ranks_, dumping_;
};

// "rank 3 (pid 77, host a) is dumping core"
std::string dump_text(const std::vector<std::string> &names);

}  // namespace fsdp::membership
