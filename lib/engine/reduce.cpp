// SPDX-License-Identifier: Apache-2.0
#include "engine/reduce.h"

#include <algorithm>

#include "base/dtype.h"

namespace fsdp::engine {

Reducer::Reducer(Runtime &runtime) : runtime_(runtime), most_live_(runtime.spec.pending_groups()) {
  pool_.reducing.reserve(runtime.groups.size() + 1);
  size_t most = 0;
  for (const Group &group : runtime.groups) {
    set_access(group, comm::Access::none);
    most = std::max(most, group.places.size());
  }
  lent_.reserve(most);
}

void Reducer::set_access(const Group &group, comm::Access access) {
  if (runtime_.context.debug() && group.plan->trainable) runtime_.storage->set_grad_access(*group.plan, access);
}

void Reducer::reduce(Group &group, uint32_t flags, fsdp_stream stream) {
  const CallSpan span(runtime_, "reduce_grad", &group);
  runtime_.caller_stream(stream, "fsdp_reduce_grad");
  if (!group.plan->trainable) return;
  Contribution &grad = group.grad;
  if (grad.last)
    fail(FSDP_INVALID_STATE,
         "fsdp_reduce_grad: group '{}' was already reduced with FSDP_LAST in this step; the next call is "
         "fsdp_finish_grads",
         group.name());
  check_complete(group);
  check_writers(group, "fsdp_reduce_grad");
  const bool last = flags & FSDP_LAST;
  ++grad.given_count;
  grad.last = last;
  if (group.plan->persistent_grad && !last) {
    grad.stage = GradStage::idle;  // the contributions add up where they are
    chain_writers(group);
    return;
  }
  wait_for_writers(group);
  // The main grads may still be read by the update that was before.
  runtime_.join_window(*runtime_.reduces.stream);
  const uint32_t turn = runtime_.outer ? runtime_.outer->take_turn(group, *runtime_.reduces.stream) : 0;
  if (runtime_.communicates())
    enqueue(group, turn);
  else
    enqueue_local(group, turn);
  runtime_.reduces.stream->record(*grad.reduced);
  if (runtime_.outer && runtime_.outer->sums(last))
    runtime_.outer->reduce(group, turn, group.partial && grad.reduced_count > 0, runtime_.step.version());
  ++grad.reduced_count;
  grad.stage = GradStage::reducing;
  set_access(group, comm::Access::read);
  if (!group.plan->persistent_grad) pool_.reducing.push_back(group.index);
}

void Reducer::enqueue(Group &group, uint32_t turn) {
  const comm::Tag tag{group.index, group.name()};
  const bool accumulate = group.grad.reduced_count > 0 && !group.partial;
  Stats &stats = runtime_.stats;
  if (runtime_.collectives().records_calls) runtime_.calls.add(CallKind::reduce, group.index);
  ++stats.reduces;
  stats.reduced_bytes += group.reduced_bytes;
  const char *name = group.everywhere ? "all_reduce" : "reduce_scatter";
  const uint64_t bytes = group.everywhere ? group.all_reduced_bytes : group.reduced_bytes;
  runtime_.reduces.trace->begin(name, group, bytes);
  group.grad.ticket = runtime_.reduces.comm->sum(group.sums[turn], accumulate, tag, *runtime_.reduces.stream);
  ++(group.everywhere ? stats.all_reduces : stats.reduce_scatters);
  (group.everywhere ? stats.all_reduce_bytes : stats.reduce_scatter_bytes) += bytes;
  runtime_.reduces.trace->end(name, group, bytes, runtime_.step.version(), *runtime_.reduces.comm);
}

// A world of one: a copy with explicit scale.
void Reducer::enqueue_local(Group &group, uint32_t turn) {
  const bool accumulate = group.grad.reduced_count > 0 && !group.partial;
  runtime_.reduces.trace->begin("local_sum", group, group.reduced_bytes);
  for (const comm::Sum &sum : group.sums[turn])
    runtime_.reduces.stream->rank_sum({sum.from.of(0), 0, 1, sum.dtype, sum.wire, sum.to.floats(), sum.count,
                                       sum.factor, accumulate, sum.to.own == sum.from.own});
  runtime_.reduces.trace->end("local_sum", group, group.reduced_bytes, runtime_.step.version());
}

// The main grads of no_shard groups are summed slot by slot where there is an outer axis; now they become whole. After
// the last reduce, so that its sums do not wait for these.
void Reducer::gather_whole() {
  if (!runtime_.outer) return;
  for (Group &group : runtime_.groups) {
    if (group.whole_grads.empty()) continue;
    runtime_.outer->gather_grads(group, runtime_.step.version());
    if (!runtime_.communicates()) continue;
    runtime_.reduces.stream->wait(*group.grad.summed);
    runtime_.reduces.trace->begin("all_gather", group, group.reduced_bytes);
    runtime_.reduces.comm->gather(group.whole_grads, {group.index, group.name()}, *runtime_.reduces.stream);
    runtime_.reduces.trace->end("all_gather", group, group.reduced_bytes, runtime_.step.version(),
                                *runtime_.reduces.comm);
    ++runtime_.stats.all_gathers;
  }
}

std::string Reducer::list_missing() const {
  std::string text;
  const auto add = [&](const Group &group, const char *what) {
    text += format_text("{}group '{}' {}", text.empty() ? "" : "; ", group.name(), what);
  };
  for (const Group &group : runtime_.groups) {
    if (!group.plan->trainable) continue;
    if (group.grad.stage == GradStage::lent)
      add(group, "has gradients that were acquired but not reduced");
    else if (group.grad.given_count == 0)
      add(group, "was not reduced: call fsdp_reduce_grad");
    else if (!group.grad.last)
      add(group, "was reduced without FSDP_LAST");
  }
  return text;
}

uint64_t Reducer::count_reduces() const noexcept {
  uint64_t count = 0;
  for (const Group &group : runtime_.groups)
    if (group.plan->trainable && !group.plan->persistent_grad) count += group.grad.given_count;
  return count;
}

void Reducer::start_step() {
  for (Group &group : runtime_.groups) {
    Contribution &grad = group.grad;
    grad.stage = GradStage::idle;
    set_access(group, comm::Access::none);
    grad.reduced_count = grad.given_count = 0;
    grad.last = false;
    std::fill(grad.acquired.begin(), grad.acquired.end(), uint8_t{0});
    std::fill(grad.touched.begin(), grad.touched.end(), uint8_t{0});
  }
  pool_.reducing.clear();
  runtime_.stats.pending_grads = pool_.live = 0;
}

}  // namespace fsdp::engine
