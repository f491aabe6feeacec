// SPDX-License-Identifier: Apache-2.0

#include "memory/visit_order.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace fsdp::memory {

namespace {

constexpr uint32_t train_mode = 0, eval_mode = 1;

// Positions in the list of training visits.
struct GroupVisits {
  uint32_t first_forward = never, last_forward = never, first_backward = never, last_backward = never;
};

// Adds the visits of one direction: the root groups in `order`, the other groups in `order`, and then the root groups
// again in reverse order.
void add_direction(const std::vector<uint32_t> &order, const ScheduleSpec &spec, fsdp_phase phase,
                   std::vector<fsdp_visit> &visits) {
  const auto add = [&](auto begin, auto end, bool root) {
    for (; begin != end; ++begin)
      if (spec.groups[*begin].root == root) visits.push_back({*begin, phase});
  };
  add(order.begin(), order.end(), true);
  add(order.begin(), order.end(), false);
  add(order.rbegin(), order.rend(), true);
}

std::vector<fsdp_visit> forward_and_backward(const ScheduleSpec &spec) {
  std::vector<uint32_t> order(spec.groups.size());
  std::iota(order.begin(), order.end(), 0u);
  std::vector<fsdp_visit> visits;
  add_direction(order, spec, FSDP_FORWARD, visits);
  std::reverse(order.begin(), order.end());
  add_direction(order, spec, FSDP_BACKWARD, visits);
  return visits;
}

std::vector<fsdp_visit> training_visits(const ScheduleSpec &spec) {
  switch (spec.kind) {
    case FSDP_SCHEDULE_SEQUENTIAL:
    case FSDP_SCHEDULE_INTERLEAVED:
    case FSDP_SCHEDULE_ANY: return forward_and_backward(spec);
    case FSDP_SCHEDULE_VISITS: return spec.visits;
    default: fail(FSDP_INVALID_ARGUMENT, "unknown schedule {}", spec.kind);
  }
}

// Reports in `violations` what is wrong. Visits with an unknown group or phase are ignored. A BACKWARD visit before the
// group's first FORWARD visit is reported and still counted.
std::vector<GroupVisits> find_first_and_last_visits(const ScheduleSpec &spec, std::span<const fsdp_visit> visits,
                                                    std::vector<std::string> &violations) {
  std::vector<GroupVisits> found(spec.groups.size());
  for (uint32_t i = 0; i < visits.size(); ++i) {
    const auto [group, phase] = visits[i];
    if (group >= found.size()) {
      violations.push_back(format_text("visit {}: group {} is outside [0, {})", i, group, found.size()));
      continue;
    }
    GroupVisits &of_group = found[group];
    if (phase == FSDP_FORWARD) {
      of_group.first_forward = std::min(of_group.first_forward, i);
      of_group.last_forward = i;
    } else if (phase == FSDP_BACKWARD) {
      if (of_group.first_forward == never)
        violations.push_back(format_text("visit {}: BACKWARD of group {} before its first FORWARD", i, group));
      of_group.first_backward = std::min(of_group.first_backward, i);
      of_group.last_backward = i;
    } else if (phase != FSDP_RECOMPUTE) {
      violations.push_back(format_text("visit {}: phase {} is none of FORWARD, BACKWARD and RECOMPUTE", i, phase));
    } else if (of_group.first_forward == never) {
      violations.push_back(format_text("visit {}: RECOMPUTE of group {} before its first FORWARD", i, group));
    }
  }
  for (size_t g = 0; g < found.size(); ++g)
    if (spec.groups[g].trainable && found[g].last_backward == never)
      violations.push_back(format_text("group {} is trainable, but has no BACKWARD visit", g));
  return found;
}

std::vector<GroupVisits> check_visits(const ScheduleSpec &spec, std::span<const fsdp_visit> visits) {
  std::vector<std::string> violations;
  auto found = find_first_and_last_visits(spec, visits, violations);
  if (!violations.empty()) fail(FSDP_INVALID_ARGUMENT, "{}", violations.front());
  return found;
}

class Builder {
 public:
  explicit Builder(const ScheduleSpec &spec) : spec_(spec) {
    order_.train = training_visits(spec);
    const bool by_phase = std::ranges::any_of(spec.groups, &ScheduledGroup::by_phase);
    order_.slots = gather_slots(spec.kind, by_phase);
    found_ = check_visits(spec, order_.train);
    for (const fsdp_visit &visit : order_.train)
      if (visit.phase == FSDP_FORWARD) order_.eval.push_back({visit.group_index, FSDP_EVAL});
  }

  VisitOrder build() {
    request_buffers();
    if (spec_.kind == FSDP_SCHEDULE_ANY) {
      plan_grads();
      forget_order();
    } else {
      plan_order();
    }
    if (spec_.apart) part();
    return std::move(order_);
  }

 private:
  bool interleaved() const { return spec_.kind == FSDP_SCHEDULE_INTERLEAVED; }

  void plan_order() {
    if (interleaved()) {
      const uint32_t turn = static_cast<uint32_t>(order_.train.size() / 2);
      plan_chain(order_.train, 0, turn, train_mode, order_.train_prefetch);
      plan_chain(order_.train, turn, turn, train_mode, order_.train_prefetch);
    } else {
      plan_chain(order_.train, 0, static_cast<uint32_t>(order_.train.size()), train_mode, order_.train_prefetch);
    }
    keep_residents();
    plan_chain(order_.eval, 0, static_cast<uint32_t>(order_.eval.size()), eval_mode, order_.eval_prefetch);
    plan_grads();
  }

  // Nothing is known about which groups are held when. So every buffer fits the largest group and is always live.
  void forget_order() {
    order_.train.clear();
    order_.eval.clear();
    order_.held_groups = spec_.held_groups;
    if (spec_.apart) return;
    uint64_t largest = 0;
    for (const PoolRequest &request : order_.gathered) {
      largest = std::max(largest, request.bytes);
      order_.shared += request.bytes != 0 && order_.shared < spec_.held_groups;
    }
    if (order_.shared) order_.gathered.assign(order_.shared, {largest, {{train_mode, 0, UINT64_MAX}}, 0});
  }

  PoolRequest &gathered(uint32_t group, fsdp_phase phase) {
    return order_.gathered[order_.slots * group + gather_slot(spec_, group, phase)];
  }

  void request_buffers() {
    for (const ScheduledGroup &group : spec_.groups) {
      order_.gathered.push_back({group.gathered_bytes, {}, 0});
      // The backward pass advances independently of the forward pass of another micro-batch.
      if (interleaved())
        order_.gathered.push_back({group.gathered_bytes, {}, 1});
      else if (order_.slots == 2)
        order_.gathered.push_back({group.by_phase ? group.gathered_bytes : 0, {}, 0});
      for (const uint64_t bytes : group.grad_bytes) order_.grads.push_back({bytes, {}, 0});
    }
  }

  // The visits [start, start + count) follow one another, and no visit overlaps with the visit before or after it.
  void plan_chain(std::span<const fsdp_visit> visits, uint32_t start, uint32_t count, uint32_t mode,
                  std::vector<std::vector<uint32_t>> &prefetch) {
    const auto chain = visits.subspan(start, count);
    PrefetchWindow window = open_windows(chain, spec_, resident_from(mode, start));
    for (uint32_t i = 0; i < count; ++i) {
      const auto [group, phase] = chain[i];
      gathered(group, phase).live.push_back({mode, start + window.begins[i], start + i + 1ull});
      if (spec_.recompute && spec_.groups[group].by_phase && phase == FSDP_BACKWARD)
        gathered(group, FSDP_RECOMPUTE).live.push_back({mode, start + i, start + i + 1ull});
      for (uint32_t &ahead : window.ahead[i]) ahead += start;
      prefetch.push_back(std::move(window.ahead[i]));
    }
  }

  // For each group, the position in the chain after which the group stays gathered.
  std::vector<uint32_t> resident_from(uint32_t mode, uint32_t start) const {
    std::vector<uint32_t> from(spec_.groups.size(), never);
    if (mode == eval_mode || start != 0) return from;
    for (size_t g = 0; g < from.size(); ++g)
      if (spec_.groups[g].resident) from[g] = found_[g].first_forward;
    return from;
  }

  // A resident group stays from its first forward visit to its last backward visit. If no backward visit follows its
  // last forward visit, it stays until the pass ends. With INTERLEAVED it stays for ever, because the forward pass of
  // another micro-batch may begin before the backward pass.
  void keep_residents() {
    for (uint32_t g = 0; g < spec_.groups.size(); ++g) {
      const GroupVisits &visits = found_[g];
      if (!spec_.groups[g].resident || visits.first_forward == never) continue;
      const bool returned =
          !interleaved() && visits.last_backward != never && visits.last_backward > visits.last_forward;
      const uint64_t begin = interleaved() ? 0 : visits.first_forward;
      const uint64_t end = returned ? visits.last_backward + 1ull : order_.train.size();
      gathered(g, FSDP_FORWARD).live.push_back({train_mode, begin, end});
    }
  }

  // Makes all buffers live all the time.
  void part() {
    for (PoolRequest &request : order_.gathered) request.live = {{train_mode, 0, UINT64_MAX}};
    for (PoolRequest &request : order_.grads) request.live = {{train_mode, 0, UINT64_MAX}};
  }

  static uint32_t count_grads(const ScheduledGroup &group) {
    return static_cast<uint32_t>(std::ranges::count_if(group.grad_bytes, [](uint64_t bytes) { return bytes != 0; }));
  }

  // Time counts the transient gradients that backward visits open. A group's last part is opened first, and opening one
  // gradient too many drains the oldest. Which parts the first of several visits opens is not known.
  void plan_grads() {
    std::vector<uint64_t> time;  // time at each position
    uint64_t now = 0;
    for (const auto &[group, phase] : order_.train) {
      time.push_back(now);
      if (phase == FSDP_BACKWARD) now += count_grads(spec_.groups[group]);
    }
    const uint64_t pending = std::max(spec_.pending_grads, 1u);
    size_t end = 0;
    for (size_t g = 0; g < found_.size(); ++g) {
      const auto &[first, last] = std::pair(found_[g].first_backward, found_[g].last_backward);
      end += spec_.groups[g].grad_bytes.size();
      if (last == never) continue;
      if (first != last) order_.open_grads += count_grads(spec_.groups[g]);
      for (size_t k = 0, opened = 0; k < spec_.groups[g].grad_bytes.size(); ++k) {
        PoolRequest &request = order_.grads[end - 1 - k];
        if (request.bytes == 0) continue;
        request.live.push_back({train_mode, time[first] + (first == last ? opened : 0), time[last] + opened + pending});
        ++opened;
      }
    }
  }

  const ScheduleSpec &spec_;
  VisitOrder order_;
  std::vector<GroupVisits> found_;
};

}  // namespace

std::vector<std::string> find_violations(const ScheduleSpec &spec) {
  std::vector<std::string> violations;
  find_first_and_last_visits(spec, training_visits(spec), violations);
  return violations;
}

VisitOrder build_visit_order(const ScheduleSpec &spec) { return Builder(spec).build(); }

namespace {

class Windows {
 public:
  Windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec, std::span<const uint32_t> resident_from)
      : visits_(visits), spec_(spec), resident_from_(resident_from), previous_(visits.size(), never) {
    std::vector<uint32_t> last(2 * spec.groups.size(), never);
    for (uint32_t i = 0; i < visits.size(); ++i) {
      const auto [group, phase] = visits[i];
      previous_[i] = std::exchange(last[2 * group + gather_slot(spec, group, phase)], i);
    }
  }

  // The positions that the visit at `position` gathers ahead. A resident group that is gathered already is skipped.
  std::vector<uint32_t> open(uint32_t position) const {
    std::vector<uint32_t> ahead;
    uint64_t left = spec_.prefetch_bytes == 0 ? UINT64_MAX : spec_.prefetch_bytes;  // saturates at 0
    uint32_t depth = spec_.prefetch_depth;
    for (uint32_t i = position + 1; i < visits_.size() && depth > 0; ++i) {
      if (resident_from_[visits_[i].group_index] < i) continue;
      --depth;
      // A nearer visit inside the window gathers the same group.
      if (previous_[i] != never && previous_[i] > position) continue;
      const uint64_t bytes = spec_.groups[visits_[i].group_index].prefetch_bytes;
      if (stays(i) || bytes <= left) ahead.push_back(i);
      // A visit that does not fit also uses up the limit, so that no visit further ahead overtakes it.
      left -= std::min(left, bytes);
    }
    return ahead;
  }

  // Is the group still gathered since its previous visit? If that was near enough, the buffer was kept, and there is
  // nothing to limit.
  bool stays(uint32_t i) const { return previous_[i] != never && i - previous_[i] <= spec_.prefetch_depth; }
  uint32_t previous(uint32_t i) const { return previous_[i]; }

 private:
  std::span<const fsdp_visit> visits_;
  const ScheduleSpec &spec_;
  std::span<const uint32_t> resident_from_;
  std::vector<uint32_t> previous_;  // the visit before this one that used the same buffer
};

}  // namespace

PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from) {
  const Windows windows(visits, spec, resident_from);
  PrefetchWindow result;
  for (uint32_t i = 0; i < visits.size(); ++i) {
    result.begins.push_back(windows.stays(i) ? windows.previous(i) : i);
    result.ahead.push_back(windows.open(i));
  }
  for (uint32_t i = 0; i < visits.size(); ++i)
    for (uint32_t next : result.ahead[i]) result.begins[next] = std::min(result.begins[next], i);
  return result;
}

}  // namespace fsdp::memory
