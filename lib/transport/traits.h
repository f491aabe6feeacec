// SPDX-License-Identifier: Apache-2.0
// How the collectives of a team behave, where that shows outside of them. Each transport says it in its own folder.
#pragma once

namespace fsdp::transport {

struct CollectiveTraits {
  // A gather waits for all ranks, which must call it too. Else it pulls a version that all have published, and waits
  // for nobody; ranks that write the next one must know that it has ended (versions.h).
  bool gathers_meet;
  // Ranks that call different things wait for each other inside of streams, so who calls keeps what it has called, for
  // the ranks to compare when they meet. Else every collective is compared before it moves a byte.
  bool records_calls;
  // What a step has enqueued is over when the step has ended, and the next one starts a round of its own, which ranks
  // enter as they come. Else streams may still be at it, and a round lasts until a step is discarded.
  bool rounds_end_with_steps;
  // A ticket is released as soon as all ranks have read the sources. Else they are free when the stream has come by.
  bool releases_tickets;
  // Gradients whose reduce dtype is another are rounded before they travel, in a buffer of their own.
  bool rounds_before_sending;
  // Slices of fewer than 32 bits are summed by the rank that they are for, in rank order, and received in a buffer of
  // the caller's.
  bool receives_slices;
};

}  // namespace fsdp::transport
