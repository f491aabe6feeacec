// SPDX-License-Identifier: Apache-2.0
// Tests how a rank interleaves the calls of its models, and which part of that order is compared with other ranks.
#include "engine/context/model_calls.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::engine {
namespace {

constexpr uint64_t dense_key = 11, expert_key = 12;

// The model is not accessed here, only its address is used.
const Runtime &no_model() {
  alignas(64) static const char bytes[64] = {};
  return *reinterpret_cast<const Runtime *>(bytes);
}

// One rank with two models. In a text of its calls "d" is a call of the dense model, "e" one of the experts, "D" and
// "E" are their meetings, and "x" and "y" their discards.
struct TwoModels {
  explicit TwoModels(const std::string &calls = {}, uint64_t key = expert_key, std::vector<uint32_t> ranks = {2, 0})
      : dense(log, no_model(), dense_key, {0, 1, 2, 3}), expert(log, no_model(), key, std::move(ranks)) {
    call(calls);
  }
  void call(const std::string &calls) {
    for (const char c : calls) {
      if (c == 'd') dense.add({CallKind::gather, ++made});
      if (c == 'e') expert.add({CallKind::reduce, ++made});
      if (c == 'D') dense.settle();
      if (c == 'E') expert.settle();
      if (c == 'x') dense.restart();
      if (c == 'y') expert.restart();
    }
  }
  CallLog log;
  uint32_t made = 0;
  ModelCalls dense, expert;
};

bool agree_on_dense(const std::string &a, const std::string &b) {
  return TwoModels(a).dense.hash() == TwoModels(b).dense.hash();
}

TEST(ModelCalls, OtherOrdersDiffer) {
  EXPECT_FALSE(agree_on_dense("de", "ed"));
  EXPECT_FALSE(agree_on_dense("eed", "ede"));
  EXPECT_FALSE(agree_on_dense("edede", "eedde"));
  EXPECT_FALSE(agree_on_dense("edded", "eddde"));
  EXPECT_FALSE(agree_on_dense("dedDd", "ddeDd"));
  EXPECT_TRUE(agree_on_dense("dedded", "dedded"));
}

// Another rank may not have made them yet, whether or not one of the models has met since.
TEST(ModelCalls, LaterCallsOfTheOtherModelDoNotCount) {
  EXPECT_TRUE(agree_on_dense("deedee", "deed"));
  EXPECT_TRUE(agree_on_dense("deeDd", "deDed"));
  EXPECT_TRUE(agree_on_dense("deEd", "dedE"));
  EXPECT_TRUE(agree_on_dense("ddd", "ddde"));
  EXPECT_EQ(TwoModels("dddeee").dense.hash(), 0u);
  EXPECT_NE(TwoModels("dddeee").expert.hash(), 0u);
}

// Messages between the dense model's other ranks do not wait for the experts of these.
TEST(ModelCalls, OnlyModelsThatShareTwoRanksAreCompared) {
  EXPECT_TRUE(TwoModels("ed", expert_key, {2, 4}).dense.hashes().empty());
  EXPECT_EQ(TwoModels("ed", expert_key, {2, 4}).dense.hash(), 0u);
  const TwoModels both("ed");
  ASSERT_EQ(both.dense.hashes().size(), 1u);
  EXPECT_EQ(both.dense.hashes()[0].key, expert_key);
  EXPECT_EQ(both.expert.hashes()[0].key, dense_key);
}

// Ranks with experts of their own need compare nothing but this hash.
TEST(ModelCalls, HashDoesNotDependOnTheOtherModel) {
  const TwoModels one("dedde", 20, {0, 2}), other("dedde", 21, {1, 3});
  EXPECT_EQ(one.dense.hash(), other.dense.hash());
  CallLog log;
  ModelCalls dense(log, no_model(), dense_key, {0, 1}), first(log, no_model(), 20, {0, 1}),
      second(log, no_model(), 21, {0, 1});
  first.add({CallKind::gather, 0});
  dense.add({CallKind::gather, 0});
  const uint64_t after_first = dense.hash();
  dense.restart();
  for (ModelCalls *model : {&dense, &first, &second}) model->restart();
  dense.settle();
  second.add({CallKind::gather, 0});
  dense.add({CallKind::gather, 0});
  EXPECT_NE(dense.hash(), after_first);
  // A discard concerns only one of the models.
  first.restart();
  ASSERT_EQ(dense.hashes().size(), 1u);
  EXPECT_EQ(dense.hashes()[0].key, 21u);
}

// Ranks may have made different calls of a step that is discarded.
TEST(ModelCalls, ADiscardIsForgottenByTheNextMeeting) {
  TwoModels one("edy"), other("deeey");
  EXPECT_TRUE(one.dense.hashes().empty());
  EXPECT_EQ(one.dense.hash(), 0u);
  EXPECT_EQ(other.dense.hash(), 0u);
  for (TwoModels *rank : {&one, &other}) rank->call("eddD");
  EXPECT_EQ(one.dense.hash(), 0u);
  EXPECT_EQ(one.dense.hashes().size(), 1u);
  for (TwoModels *rank : {&one, &other}) rank->call("ed");
  EXPECT_NE(one.dense.hash(), 0u);
  EXPECT_EQ(one.dense.hash(), other.dense.hash());
  // Nothing is left of the model's own discarded step either.
  TwoModels third("dedx"), fourth("eddeddx");
  EXPECT_EQ(third.dense.hash(), 0u);
  for (TwoModels *rank : {&third, &fourth}) rank->call("Ex");
  third.call("ye"), fourth.call("ye");
  for (TwoModels *rank : {&third, &fourth}) rank->call("Ddd");
  EXPECT_NE(third.dense.hash(), 0u);
  EXPECT_EQ(third.dense.hash(), fourth.dense.hash());
}

TEST(ModelCalls, TheOtherModelsCallsBeforeEachAreCounted) {
  const TwoModels rank("deDededdee");
  const auto counts = rank.dense.counts_before(expert_key);
  EXPECT_EQ(counts.first, 2u);
  EXPECT_EQ(counts.counts, (std::vector<uint64_t>{2, 3, 3}));
  EXPECT_TRUE(rank.dense.counts_before(99).counts.empty());
  EXPECT_EQ(TwoModels("edydeD").dense.counts_before(expert_key).counts, std::vector<uint64_t>());
  const auto after = TwoModels("eedyDed").dense.counts_before(expert_key);
  EXPECT_EQ(after.first, 2u);
  EXPECT_EQ(after.counts, std::vector<uint64_t>{1});
  EXPECT_EQ(TwoModels("edeyded").dense.counts_before(expert_key).counts, (std::vector<uint64_t>{0, 0, 1}));
  EXPECT_EQ(TwoModels("ddDxed").dense.counts_before(expert_key).counts, std::vector<uint64_t>{1});
}

uint32_t find_own(const ModelCalls &of, uint64_t number) {
  uint32_t found = 0;
  of.visit_own(number, [&](const Runtime &, const SequencedCall &call) { found = call.number; });
  return found;
}

uint32_t find_other(const ModelCalls &of, uint64_t key, uint64_t number) {
  uint32_t found = 0;
  of.visit_other(key, number, [&](const Runtime &, const SequencedCall &call) { found = call.number; });
  return found;
}

TEST(ModelCalls, CallsAreFoundByTheirNumbers) {
  const TwoModels rank("dededd");
  EXPECT_EQ(find_own(rank.dense, 1), 1u);
  EXPECT_EQ(find_own(rank.dense, 4), 6u);
  EXPECT_EQ(find_own(rank.dense, 5), 0u);
  EXPECT_EQ(find_other(rank.dense, expert_key, 2), 4u);
  EXPECT_EQ(find_other(rank.dense, expert_key, 3), 0u);
  EXPECT_EQ(find_other(rank.dense, 99, 1), 0u);
  EXPECT_EQ(find_own(TwoModels("ddxed").dense, 1), 4u);
  EXPECT_EQ(find_own(TwoModels("ddxe").dense, 1), 0u);
}

TEST(ModelCalls, OldCallsAreNotKept) {
  TwoModels rank("ed");
  for (uint64_t i = 0; i < CallLog::max_kept - 2; ++i) rank.dense.add({CallKind::gather, 7});
  EXPECT_EQ(rank.dense.counts_before(expert_key).first, 1u);
  EXPECT_EQ(find_other(rank.dense, expert_key, 1), 1u);
  rank.call("e");
  EXPECT_EQ(rank.dense.counts_before(expert_key).first, 1u);
  EXPECT_EQ(rank.dense.counts_before(expert_key).counts[0], 1u);
  EXPECT_EQ(find_other(rank.dense, expert_key, 1), 0u);
  rank.call("d");
  EXPECT_EQ(rank.dense.counts_before(expert_key).first, 2u);
  EXPECT_EQ(find_own(rank.dense, 1), 0u);
  EXPECT_EQ(find_own(rank.dense, 2), 7u);
}

// Calls of a destroyed model do not count as calls of a later one, even at the same address.
TEST(ModelCalls, EndedModelIsNotCompared) {
  CallLog log;
  std::optional<ModelCalls> expert;
  ModelCalls dense(log, no_model(), dense_key, {0, 1});
  for (uint64_t key = 20; key < 23; ++key) {
    expert.emplace(log, no_model(), key, std::vector<uint32_t>{0, 1});
    EXPECT_EQ(dense.hash(), 0u);
    expert->add({CallKind::gather, 1});
    dense.add({CallKind::gather, 2});
    EXPECT_NE(dense.hash(), 0u);
    ASSERT_EQ(dense.hashes().size(), 1u);
    EXPECT_EQ(dense.hashes()[0].key, key);
    EXPECT_EQ(expert->hashes().size(), 1u);
    EXPECT_EQ(dense.counts_before(key).counts.back(), 1u);
  }
  expert.reset();
  EXPECT_EQ(dense.hash(), 0u);
  EXPECT_TRUE(dense.hashes().empty());
  dense.add({CallKind::gather, 3});
}

}  // namespace
}  // namespace fsdp::engine
