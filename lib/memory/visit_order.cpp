// SPDX-License-Identifier: Apache-2.0

#include "memory/visit_order.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "base/error.h"

namespace fsdp::memory {

namespace {

constexpr uint32_t train_mode = 0, eval_mode = 1;

// The first and last visits of a group, or of all visits that read one buffer, as positions in the list of training
// visits.
struct VisitRange {
  uint32_t first_forward = never, last_forward = never, first_backward = never, last_backward = never;

  void add(uint32_t position, fsdp_phase phase) {
    if (phase == FSDP_FORWARD) {
      first_forward = std::min(first_forward, position);
      last_forward = position;
    } else if (phase == FSDP_BACKWARD) {
      first_backward = std::min(first_backward, position);
      last_backward = position;
    }
  }
};

// Adds the visits of one direction: the root groups in `order`, the other groups in `order`, and then the root groups
// again in reverse order.
void add_direction(const std::vector<uint32_t> &order, const ScheduleSpec &spec, fsdp_phase phase,
                   std::vector<fsdp_visit> &visits) {
  const auto add = [&](auto begin, auto end, bool root) {
    for (; begin != end; ++begin)
      if (spec.groups[*begin].root == root) visits.push_back({*begin, phase, 0});
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

std::string describe_pieces(uint32_t count) {
  return count == 1 ? "one piece" : format_text("the pieces 0 to {}", count - 1);
}

// Reports in `violations` what is wrong. Visits with an unknown group or phase are ignored. A BACKWARD visit before the
// group's first FORWARD visit is reported and still counted.
std::vector<VisitRange> find_first_and_last_visits(const ScheduleSpec &spec, std::span<const fsdp_visit> visits,
                                                   std::vector<std::string> &violations) {
  std::vector<VisitRange> found(spec.groups.size());
  for (uint32_t i = 0; i < visits.size(); ++i) {
    const auto [group, phase, piece] = visits[i];
    if (group >= found.size()) {
      violations.push_back(format_text("visit {}: group {} is outside [0, {})", i, group, found.size()));
      continue;
    }
    if (piece > spec.groups[group].piece_count)
      violations.push_back(format_text("visit {}: it names piece {} of group {}, which has {}", i, piece - 1, group,
                                       describe_pieces(spec.groups[group].piece_count)));
    if (phase != FSDP_FORWARD && phase != FSDP_BACKWARD && phase != FSDP_RECOMPUTE)
      violations.push_back(format_text("visit {}: phase {} is none of FORWARD, BACKWARD and RECOMPUTE", i, phase));
    else if (phase != FSDP_FORWARD && found[group].first_forward == never)
      violations.push_back(format_text("visit {}: {} of group {} before its first FORWARD", i,
                                       phase == FSDP_BACKWARD ? "BACKWARD" : "RECOMPUTE", group));
    found[group].add(i, phase);
  }
  for (size_t g = 0; g < found.size(); ++g)
    if (spec.groups[g].trainable && found[g].last_backward == never)
      violations.push_back(format_text("group {} is trainable, but has no BACKWARD visit", g));
  return found;
}

std::vector<VisitRange> check_visits(const ScheduleSpec &spec, std::span<const fsdp_visit> visits) {
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
    order_.slots = gather_slots(spec.kind, by_phase, true);
    order_.buffers = BufferNumbers(spec.groups);
    found_ = check_visits(spec, order_.train);
    of_buffer_.resize(order_.buffers.count());
    for (uint32_t i = 0; i < order_.train.size(); ++i) {
      const fsdp_visit &visit = order_.train[i];
      if (visit.phase == FSDP_FORWARD) order_.eval.push_back({visit.group_index, FSDP_EVAL, visit.piece});
      const auto [begin, end] = order_.buffers.of(visit);
      for (uint32_t buffer = begin; buffer < end; ++buffer) of_buffer_[buffer].add(i, visit.phase);
    }
  }

  VisitOrder build() {
    request_buffers();
    if (spec_.kind == FSDP_SCHEDULE_ANY) {
      plan_grads();
      forget_order();
    } else {
      plan_order();
    }
    if (spec_.apart) keep_apart();
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

  // The times at which groups are held are unknown. So every buffer fits the largest group and is always live.
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

  PoolRequest &gathered(uint32_t buffer, uint32_t group, fsdp_phase phase) {
    return order_.gathered[order_.slots * buffer + gather_slot(spec_, group, phase)];
  }

  void request_buffers() {
    for (const ScheduledGroup &group : spec_.groups) {
      const bool twice = gather_slots(spec_.kind, group.by_phase, group.backward_weights) == 2;
      for (const GatherBuffer &buffer : group.buffers) {
        order_.gathered.push_back({buffer.bytes, {}, 0});
        // The backward pass advances independently of the forward pass of another micro-batch.
        if (order_.slots == 2) order_.gathered.push_back({twice ? buffer.bytes : 0, {}, interleaved() ? 1u : 0u});
      }
      for (const uint64_t bytes : group.grad_bytes) order_.grads.push_back({bytes, {}, group.mesh});
    }
  }

  // The visits [start, start + count) follow one another, and no visit overlaps with the visit before or after it.
  void plan_chain(std::span<const fsdp_visit> visits, uint32_t start, uint32_t count, uint32_t mode,
                  std::vector<std::vector<uint32_t>> &prefetch) {
    const auto chain = visits.subspan(start, count);
    PrefetchWindow window = open_windows(chain, spec_, resident_from(mode, start));
    for (const BufferRead &read : window.reads) {
      const uint64_t i = read.position, end = start + i + 1;
      const auto [group, phase, piece] = chain[i];
      gathered(read.buffer, group, phase).live.push_back({mode, start + read.begin, end});
      if (spec_.recompute && spec_.groups[group].by_phase && phase == FSDP_BACKWARD)
        gathered(read.buffer, group, FSDP_RECOMPUTE).live.push_back({mode, start + i, end});
    }
    for (std::vector<uint32_t> &positions : window.ahead) {
      for (uint32_t &ahead : positions) ahead += start;
      prefetch.push_back(std::move(positions));
    }
  }

  template <class Action>
  void for_each_resident(Action &&action) const {
    for (uint32_t g = 0; g < spec_.groups.size(); ++g)
      for (uint32_t p = 0; spec_.groups[g].resident && p < spec_.groups[g].buffers.size(); ++p)
        action(g, order_.buffers.number(g, p));
  }

  // For each buffer, the position in the chain after which it stays gathered.
  std::vector<uint32_t> resident_from(uint32_t mode, uint32_t start) const {
    std::vector<uint32_t> from(of_buffer_.size(), never);
    if (mode == eval_mode || start != 0) return from;
    for_each_resident([&](uint32_t, uint32_t buffer) { from[buffer] = of_buffer_[buffer].first_forward; });
    return from;
  }

  // A resident group stays from its first forward visit to its last backward visit. If no backward visit follows its
  // last forward visit, it stays until the pass ends. With INTERLEAVED it always stays, because the forward pass of
  // another micro-batch may begin before the backward pass.
  void keep_residents() {
    for_each_resident([&](uint32_t group, uint32_t buffer) {
      const VisitRange &visits = of_buffer_[buffer];
      if (visits.first_forward == never) return;
      const bool returned =
          !interleaved() && visits.last_backward != never && visits.last_backward > visits.last_forward;
      const uint64_t begin = interleaved() ? 0 : visits.first_forward;
      const uint64_t end = returned ? visits.last_backward + 1ull : order_.train.size();
      gathered(buffer, group, FSDP_FORWARD).live.push_back({train_mode, begin, end});
    });
  }

  // Makes all buffers live at all times, so that none share bytes.
  void keep_apart() {
    for (PoolRequest &request : order_.gathered) request.live = {{train_mode, 0, UINT64_MAX}};
    for (PoolRequest &request : order_.grads) request.live = {{train_mode, 0, UINT64_MAX}};
  }

  static uint32_t count_grads(const ScheduledGroup &group) {
    return static_cast<uint32_t>(std::ranges::count_if(group.grad_bytes, [](uint64_t bytes) { return bytes != 0; }));
  }

  // For each BACKWARD position, the position at which the gradients of this visit are first written. Consecutive visits
  // of a group's pieces share one position. When a piece is visited again, a new position begins.
  std::vector<uint32_t> find_openings() const {
    std::vector<uint32_t> openings;
    std::set<uint32_t> pieces;  // visited since the last opening
    uint32_t opening = never;
    for (uint32_t i = 0; i < order_.train.size(); ++i) {
      const auto &[group, phase, piece] = order_.train[i];
      if (i == 0 || piece == 0 || order_.train[i - 1].group_index != group) pieces.clear();
      if (phase == FSDP_BACKWARD && (pieces.empty() || !pieces.insert(piece).second)) {
        opening = i;
        pieces.clear();
        if (piece) pieces.insert(piece);
      }
      openings.push_back(phase == FSDP_BACKWARD ? opening : i);
    }
    return openings;
  }

  // Time counts the transient gradients that backward visits open. The last part of a group is opened first, and
  // opening one gradient too many drains the oldest. It is not known which parts are opened by the first of several
  // visits.
  void plan_grads() {
    const std::vector<uint32_t> openings = find_openings();
    std::vector<uint64_t> time;  // time at each position
    uint64_t now = 0;
    for (uint32_t i = 0; i < order_.train.size(); ++i) {
      const fsdp_visit &visit = order_.train[i];
      time.push_back(openings[i] == i ? now : time[openings[i]]);
      if (visit.phase == FSDP_BACKWARD && openings[i] == i) now += count_grads(spec_.groups[visit.group_index]);
    }
    const uint64_t pending = std::max(spec_.pending_grads, 1u);
    size_t end = 0;
    for (size_t g = 0; g < found_.size(); ++g) {
      const auto &[first, last] = std::pair(found_[g].first_backward, found_[g].last_backward);
      end += spec_.groups[g].grad_bytes.size();
      if (last == never) continue;
      const bool once = openings[first] == openings[last];
      if (!once) order_.open_grads += count_grads(spec_.groups[g]);
      for (size_t k = 0, opened = 0; k < spec_.groups[g].grad_bytes.size(); ++k) {
        PoolRequest &request = order_.grads[end - 1 - k];
        if (request.bytes == 0) continue;
        request.live.push_back({train_mode, time[first] + (once ? opened : 0), time[last] + opened + pending});
        ++opened;
      }
    }
  }

  const ScheduleSpec &spec_;
  VisitOrder order_;
  std::vector<VisitRange> found_, of_buffer_;  // by group, and by buffer
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
      : visits_(visits), spec_(spec), resident_from_(resident_from) {
    const BufferNumbers numbers(spec.groups);
    std::vector<uint32_t> last(2 * size_t{numbers.count()}, never);
    for (const ScheduledGroup &group : spec.groups)
      for (const GatherBuffer &buffer : group.buffers) prefetch_bytes_.push_back(buffer.prefetch_bytes);
    for (uint32_t i = 0; i < visits.size(); ++i) {
      first_.push_back(reads_.size());
      const auto [group, phase, piece] = visits[i];
      if (phase == FSDP_BACKWARD && !spec.groups[group].backward_weights) continue;
      const auto [begin, end] = numbers.of(visits[i]);
      for (uint32_t b = begin; b < end; ++b)
        reads_.push_back({i, b, std::exchange(last[2 * b + gather_slot(spec, group, phase)], i), i});
    }
    first_.push_back(reads_.size());
  }

  PrefetchWindow open() {
    PrefetchWindow result;
    for (BufferRead &read : reads_)
      if (stays(read)) read.begin = read.previous;
    for (uint32_t i = 0; i < visits_.size(); ++i) result.ahead.push_back(look_ahead(i));
    for (uint32_t i = 0; i < visits_.size(); ++i)
      for (const uint32_t next : result.ahead[i])
        for (BufferRead &read : reads_of(next)) read.begin = std::min(read.begin, i);
    result.reads = std::move(reads_);
    return result;
  }

 private:
  std::span<BufferRead> reads_of(uint32_t i) { return std::span(reads_).subspan(first_[i], first_[i + 1] - first_[i]); }

  // The positions that the visit at `position` gathers ahead. Resident weights that are already gathered are skipped.
  std::vector<uint32_t> look_ahead(uint32_t position) {
    std::vector<uint32_t> ahead;
    uint64_t left = spec_.prefetch_bytes == 0 ? UINT64_MAX : spec_.prefetch_bytes;  // saturates at 0
    uint32_t depth = spec_.prefetch_depth;
    for (uint32_t i = position + 1; i < visits_.size() && depth > 0; ++i) {
      const std::span<BufferRead> reads = reads_of(i);
      if (std::ranges::all_of(reads, [&](const BufferRead &read) { return resident_from_[read.buffer] < i; })) continue;
      --depth;
      // Is a nearer visit inside the window that gathers the same weights?
      const auto nearer = [&](const BufferRead &read) { return read.previous != never && read.previous > position; };
      if (std::ranges::all_of(reads, nearer)) continue;
      uint64_t bytes = 0;
      for (const BufferRead &read : reads) bytes += prefetch_bytes_[read.buffer];
      if (bytes <= left || std::ranges::all_of(reads, [&](const BufferRead &read) { return stays(read); }))
        ahead.push_back(i);
      // A visit that does not fit also uses up the limit, so that no visit further ahead overtakes it.
      left -= std::min(left, bytes);
    }
    return ahead;
  }

  // Are the weights still gathered since the previous visit that read them? If that visit was near enough, the buffer
  // was kept, and the limit does not apply.
  bool stays(const BufferRead &read) const {
    return read.previous != never && read.position - read.previous <= spec_.prefetch_depth;
  }

  std::span<const fsdp_visit> visits_;
  const ScheduleSpec &spec_;
  std::span<const uint32_t> resident_from_;
  std::vector<uint64_t> prefetch_bytes_;  // by buffer
  std::vector<BufferRead> reads_;         // in order of position
  std::vector<size_t> first_;             // for each position, the index of its first read; one more at the end
};

}  // namespace

PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from) {
  return Windows(visits, spec, resident_from).open();
}

}  // namespace fsdp::memory
