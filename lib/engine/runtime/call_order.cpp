// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/call_order.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {
namespace {

std::string describe_gather(const Runtime &model, const SequencedCall &call) {
  for (const Group &group : model.groups)
    for (size_t s = 0; s < group.slots.size(); ++s) {
      const GatheredPiece &slot = group.slots[s];
      if (slot.number != call.number) continue;
      return format_text("gathered {}group '{}'{}{}",
                         group.piece_count() > 1 ? format_text("piece {} of ", slot.piece) : std::string(),
                         group.name(), s >= group.piece_count() ? " for BACKWARD" : "",
                         call.kind == CallKind::join ? " in the same call" : "");
    }
  return "gathered a group or piece that does not exist";
}

}  // namespace

std::string describe_call(const Runtime &model, const SequencedCall &call) {
  switch (call.kind) {
    case CallKind::replay: return format_text("replayed capture {}", call.number);
    case CallKind::cancel: return format_text("gave up the replay of capture {}", call.number);
    case CallKind::refresh:
      return format_text("refreshed the whole weights of group '{}'", model.groups[call.number].name());
    case CallKind::values: return "exchanged numbers of its parameters";
    case CallKind::reduce:
      return call.number < model.parts.size() ? format_text("reduced group '{}'", model.parts[call.number].name)
                                              : "reduced a group that does not exist";
    default: return describe_gather(model, call);
  }
}

namespace {

using OrderHash = ModelCalls::OrderHash;

constexpr auto order_exchange = "the order of two models' calls";

template <class Value>
std::vector<Value> read_all(std::span<const std::byte> bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(Value));
  return values;
}

// The first call of the model before which two ranks have made different numbers of the other model's calls.
struct Crossing {
  bool known = false;   // false: the call is no longer kept
  uint64_t number = 0;  // number of the model's call
  uint64_t other = 0;   // number of the other model's call that comes before it on one rank and not on the other
  bool first_is_ahead = false;  // has the first rank made the model's call first?
};

// Each rank sends the number of its first count, and then its counts.
Crossing find_crossing(std::span<const std::byte> of_first, std::span<const std::byte> of_odd) {
  const auto a = read_all<uint64_t>(of_first), b = read_all<uint64_t>(of_odd);
  if (a.empty() || b.empty()) return {};
  for (uint64_t n = std::max(a[0], b[0]); n - a[0] + 1 < a.size() && n - b[0] + 1 < b.size(); ++n) {
    const uint64_t x = a[n - a[0] + 1], y = b[n - b[0] + 1];
    if (x != y) return {true, n, std::min(x, y) + 1, x < y};
  }
  return {};
}

std::string name_model(const Runtime &model) {
  const std::string ranks = name_ranks(model.team(), model.context.world_size());
  return format_text("model {}{}{}", model.number(), ranks.empty() ? "" : " on ranks ", ranks);
}

std::string describe_with_model(const Runtime &model, const SequencedCall &call) {
  return format_text("{} of {}", describe_call(model, call), name_model(model));
}

// The texts of both calls, each ended by a 0 byte. A text is empty if this rank no longer keeps the call.
std::string describe_calls(const Runtime &model, uint64_t key, const Crossing &crossing) {
  std::string own, other;
  model.model_calls->visit_own(
      crossing.number, [&](const Runtime &of, const SequencedCall &call) { own = describe_with_model(of, call); });
  model.model_calls->visit_other(key, crossing.other, [&](const Runtime &of, const SequencedCall &call) {
    other = describe_with_model(of, call);
  });
  return own + '\0' + other + '\0';
}

struct TwoTexts {
  std::string own, other = "called another one";
  void take(std::span<const std::byte> bytes) {
    const auto *const text = reinterpret_cast<const char *>(bytes.data());
    if (bytes.empty() || bytes.back() != std::byte{0}) return;
    const std::string first(text);
    if (!first.empty()) own = first;
    if (first.size() + 1 < bytes.size() && text[first.size() + 1]) other = text + first.size() + 1;
  }
};

std::string exchange_texts(Runtime &model, const OrderDifference &difference, const Crossing &crossing) {
  transport::Team &team = model.team();
  std::string mine;
  if (team.rank() == difference.first || team.rank() == difference.odd)
    mine = describe_calls(model, difference.key, crossing);
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), order_exchange);
  TwoTexts texts;
  texts.take(all[difference.first]);
  texts.take(all[difference.odd]);
  uint32_t ahead = difference.first, behind = difference.odd;
  if (!crossing.first_is_ahead) std::swap(ahead, behind);
  return format_text("two models are called in different orders: rank {} {} before it {}, rank {} the other way round",
                     team.world_rank(ahead), texts.own, texts.other, team.world_rank(behind));
}

}  // namespace

// Each rank is compared with the lowest rank that has the same other model, among the ranks with which it exchanges
// messages.
std::optional<OrderDifference> find_order_difference(Runtime &model) {
  const auto mine = model.model_calls ? model.model_calls->hashes() : std::vector<OrderHash>();
  const auto all = model.team().all_gather(std::as_bytes(std::span(mine)), order_exchange);
  // Key: the lowest compared rank in this model, the other model's key, and the lowest compared rank in the other
  // model. Value: the first rank with this key, and the hash of that rank.
  std::map<std::tuple<uint32_t, uint64_t, uint64_t>, std::pair<uint32_t, uint64_t>> firsts;
  for (uint32_t r = 0; r < all.size(); ++r)
    for (const OrderHash &one : read_all<OrderHash>(all[r])) {
      const auto [first, added] = firsts.try_emplace({model.first_compared(r), one.key, one.first}, r, one.hash);
      if (first->second.second != one.hash) return OrderDifference{first->second.first, r, one.key};
    }
  return std::nullopt;
}

std::string describe_order_difference(Runtime &model, const OrderDifference &difference) {
  transport::Team &team = model.team();
  std::vector<uint64_t> mine;
  if (team.rank() == difference.first || team.rank() == difference.odd) {
    const ModelCalls::CountsBefore counts = model.model_calls->counts_before(difference.key);
    mine.push_back(counts.first);
    mine.insert(mine.end(), counts.counts.begin(), counts.counts.end());
  }
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), order_exchange);
  const Crossing crossing = find_crossing(all[difference.first], all[difference.odd]);
  if (crossing.known) return exchange_texts(model, difference, crossing);
  return format_text(
      "ranks {} and {} have called this model and another one in different orders, more than {} calls ago",
      team.world_rank(difference.first), team.world_rank(difference.odd), CallLog::max_kept);
}

}  // namespace fsdp::engine
