// SPDX-License-Identifier: Apache-2.0
#include "engine/context/model_calls.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace fsdp::engine {
namespace {

bool share_two(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  std::vector<uint32_t> common;
  std::ranges::set_intersection(a, b, std::back_inserter(common));
  return common.size() > 1;
}

std::vector<uint32_t> sorted(std::vector<uint32_t> ranks) {
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace

ModelCalls::ModelCalls(CallLog &log, const Runtime &model, uint64_t key, std::vector<uint32_t> ranks)
    : log_(log), model_(model), key_(key), ranks_(sorted(std::move(ranks))) {
  const std::lock_guard lock(log_.mutex_);
  for (ModelCalls *other : log_.models_)
    if (share_two(ranks_, other->ranks_)) pairs_.push_back({other});
  // Allocates everything before other models can see this one.
  log_.models_.reserve(log_.models_.size() + 1);
  if (log_.entries_.empty() && !pairs_.empty()) log_.entries_.resize(CallLog::max_kept);
  for (const Pair &pair : pairs_) pair.other->pairs_.reserve(pair.other->pairs_.size() + 1);
  for (const Pair &pair : pairs_) pair.other->pairs_.push_back({this});
  log_.models_.push_back(this);
}

ModelCalls::~ModelCalls() {
  const std::lock_guard lock(log_.mutex_);
  std::erase(log_.models_, this);
  for (const Pair &pair : pairs_)
    std::erase_if(pair.other->pairs_, [this](const Pair &one) { return one.other == this; });
}

void ModelCalls::add(SequencedCall call) {
  const std::lock_guard lock(log_.mutex_);
  ++total_;
  if (pairs_.empty()) return;
  for (Pair &pair : pairs_) {
    if (pair.other->total_ == pair.seen) continue;
    pair.seen = pair.other->total_;
    pair.hash = mix_calls(mix_calls(pair.hash ^ total_) ^ pair.seen);
  }
  keep(call);
}

void ModelCalls::keep(SequencedCall call) { log_.entries_[log_.count_++ % CallLog::max_kept] = {this, call}; }

void ModelCalls::settle() {
  const std::lock_guard lock(log_.mutex_);
  settled_ = total_;
  for (Pair &pair : pairs_)
    if (pair.skipped) pair = {pair.other};
}

void ModelCalls::restart() {
  const std::lock_guard lock(log_.mutex_);
  total_ = settled_ = 0;
  for (Pair &pair : pairs_) {
    pair = {pair.other};
    for (Pair &back : pair.other->pairs_)
      if (back.other == this) back.skipped = true;
  }
}

std::vector<ModelCalls::OrderHash> ModelCalls::hashes() const {
  const std::lock_guard lock(log_.mutex_);
  std::vector<OrderHash> hashes;
  for (const Pair &pair : pairs_)
    if (!pair.skipped) hashes.push_back({pair.other->key_, pair.hash, pair.other->ranks_.front()});
  return hashes;
}

uint64_t ModelCalls::hash() const {
  const std::lock_guard lock(log_.mutex_);
  uint64_t sum = 0;
  for (size_t i = 0; i < pairs_.size(); ++i)
    if (pairs_[i].hash && !pairs_[i].skipped) sum += mix_calls(pairs_[i].hash + i);
  return sum;
}

const ModelCalls::Pair *ModelCalls::find_pair(uint64_t key) const {
  const auto found = std::ranges::find_if(pairs_, [key](const Pair &pair) { return pair.other->key_ == key; });
  return found == pairs_.end() ? nullptr : &*found;
}

// Both models' calls are numbered backwards from the last one. Once the number is 0, the remaining entries belong to
// models that have ended or come from before a discard.
ModelCalls::CountsBefore ModelCalls::counts_before(uint64_t key) const {
  const std::lock_guard lock(log_.mutex_);
  const Pair *pair = find_pair(key);
  if (!pair) return {total_ + 1, {}};
  uint64_t own = total_, others = pair->other->total_;
  std::vector<uint64_t> counts;
  for (uint64_t e = log_.count_; e > 0 && e + CallLog::max_kept > log_.count_ && own > settled_; --e) {
    const ModelCalls *const model = log_.entries_[(e - 1) % CallLog::max_kept].model;
    if (model == pair->other && others > 0) --others;
    if (model != this) continue;
    counts.push_back(others);
    --own;
  }
  std::ranges::reverse(counts);
  return {own + 1, std::move(counts)};
}

std::optional<SequencedCall> ModelCalls::find(const ModelCalls &of, uint64_t number) const {
  uint64_t at = of.total_;
  for (uint64_t e = log_.count_; e > 0 && e + CallLog::max_kept > log_.count_ && at >= number; --e) {
    const CallLog::Entry &entry = log_.entries_[(e - 1) % CallLog::max_kept];
    if (entry.model == &of && at-- == number) return entry.call;
  }
  return std::nullopt;
}

}  // namespace fsdp::engine
