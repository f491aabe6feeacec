// SPDX-License-Identifier: Apache-2.0
// The order of the calls of several models of a context, if these calls are messages (on GPUs). Ranks that share two
// models must interleave the calls of both alike, or work on their GPUs waits for each other. Two models are compared
// on the ranks that exchange messages in both. On other ranks the same model may be interleaved with other models.
//
// For each call of a model it matters how many calls of another model came before it. Ranks can compare this when the
// model has met, since all of them have then made the model's calls. They cannot compare later calls of the other
// model: a rank may not have made these yet. So each of the two models compares its own calls.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace fsdp::engine {

class Runtime;

// A join is the gather of one more piece in the launch of the gather before it. A refresh of whole weights and an
// exchange of values on a library stream are compared only with calls of other models.
enum class CallKind : uint32_t { gather, reduce, replay, cancel, join, refresh, values };

struct SequencedCall {
  CallKind kind;
  // For a gather, the slot's number; for a reduce, the part's number; for a replay or the cancel of one, the capture's
  // number; for a refresh, the group's number.
  uint32_t number;
  bool operator==(const SequencedCall &) const = default;
};

constexpr uint64_t mix_calls(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return (x ^ x >> 31) + 0x9E3779B97F4A7C15ull;
}

class ModelCalls;

// The open models of a context, and their last calls. Models may be destroyed by any thread.
class CallLog {
 public:
  // The number of calls that are kept. If ranks differ in an older call, the report names only the models.
  static constexpr uint64_t max_kept = 8192;

 private:
  friend class ModelCalls;
  struct Entry {
    const ModelCalls *model;
    SequencedCall call;
  };

  std::mutex mutex_;
  std::vector<ModelCalls *> models_;
  std::vector<Entry> entries_;  // a ring; empty until two models are compared
  uint64_t count_ = 0;          // number of entries ever added
};

// The calls of one model among those of the others.
class ModelCalls {
 public:
  // `key` names the model alike on all of its ranks. `ranks` are the ranks of the job with which this rank exchanges
  // messages over inner axes of this model, this rank included.
  ModelCalls(CallLog &log, const Runtime &model, uint64_t key, std::vector<uint32_t> ranks);
  ~ModelCalls();
  ModelCalls(const ModelCalls &) = delete;
  ModelCalls &operator=(const ModelCalls &) = delete;

  void add(SequencedCall call);
  // Called when the model's ranks have met and their calls do not differ. Models that were discarded since the previous
  // meeting are compared again from here on.
  void settle();
  // Called when the model's ranks have met to discard its step, in which they may have made different calls. Models
  // that were interleaved with it do not compare their calls before their own next meeting.
  void restart();

  // A hash of how this model's calls are interleaved with those of the model `key`. Only ranks with the same `first`
  // are compared: the lowest rank with which they exchange messages in the other model.
  struct OrderHash {
    uint64_t key, hash, first;
  };
  std::vector<OrderHash> hashes() const;
  // Combines the hashes of all other models, without the keys. It is 0 if no other model was called between calls of
  // this one.
  uint64_t hash() const;
  // For each kept call of this model since its last meeting: how many calls of the other model came before it. `first`
  // is the number of the first such call, counted from 1.
  struct CountsBefore {
    uint64_t first = 1;
    std::vector<uint64_t> counts;
  };
  CountsBefore counts_before(uint64_t key) const;
  // Visits the call with this number, of this model or of the other one, if the log still keeps it. No model ends
  // during the visit.
  template <class Visit>
  void visit_own(uint64_t number, Visit &&visit) const {
    const std::lock_guard lock(log_.mutex_);
    if (const auto call = find(*this, number)) visit(model_, *call);
  }
  template <class Visit>
  void visit_other(uint64_t key, uint64_t number, Visit &&visit) const {
    const std::lock_guard lock(log_.mutex_);
    const Pair *pair = find_pair(key);
    if (!pair) return;
    if (const auto call = find(*pair->other, number)) visit(pair->other->model_, *call);
  }

 private:
  struct Pair {
    ModelCalls *other;
    uint64_t hash = 0;
    uint64_t seen = 0;     // the other model's calls before this model's last call
    bool skipped = false;  // not compared until this model's next meeting, because the other was discarded
  };

  void keep(SequencedCall call);
  const Pair *find_pair(uint64_t key) const;
  std::optional<SequencedCall> find(const ModelCalls &of, uint64_t number) const;

  CallLog &log_;
  const Runtime &model_;
  const uint64_t key_;
  const std::vector<uint32_t> ranks_;  // sorted
  uint64_t total_ = 0;                 // calls since the last discard
  uint64_t settled_ = 0;               // calls up to the last meeting
  std::vector<Pair> pairs_;            // guarded by the log's mutex, like the numbers of calls
};

}  // namespace fsdp::engine
