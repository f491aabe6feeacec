// SPDX-License-Identifier: Apache-2.0
// Tests which visit of the schedule an unshard begins, for a whole group and for its pieces.
#include "engine/weights/gather_buffers.h"

#include <gtest/gtest.h>

namespace fsdp::engine {
namespace {

constexpr uint32_t whole = VisitCursor::whole_group, nowhere = VisitCursor::no_position;

// Group 0 has the pieces 0 and 1; group 1 has one piece.
memory::VisitOrder order_of(std::vector<fsdp_visit> visits) {
  memory::ScheduleSpec spec;
  spec.kind = FSDP_SCHEDULE_VISITS;
  spec.visits = std::move(visits);
  spec.groups.resize(2);
  spec.groups[0].piece_count = 2;
  spec.groups[0].buffers.resize(2);
  return build_visit_order(spec);
}

memory::VisitOrder order_of_pieces() {
  return order_of({{0, FSDP_FORWARD, FSDP_PIECE(0)},
                   {0, FSDP_FORWARD, FSDP_PIECE(1)},
                   {1, FSDP_FORWARD, 0},
                   {0, FSDP_FORWARD, FSDP_PIECE(0)},
                   {1, FSDP_BACKWARD, 0},
                   {0, FSDP_BACKWARD, FSDP_PIECE(1)},
                   {0, FSDP_BACKWARD, FSDP_PIECE(0)}});
}

TEST(VisitCursor, APieceBeginsTheNextVisitOfItsOwn) {
  const memory::VisitOrder order = order_of_pieces();
  VisitCursor cursor(order, 2);
  EXPECT_EQ(cursor.advance(0, 1, FSDP_FORWARD, 0), 1u);  // piece 0 was left out
  EXPECT_EQ(cursor.advance(0, 0, FSDP_FORWARD, 0), 3u);
  EXPECT_EQ(cursor.advance(0, 1, FSDP_FORWARD, 1), 1u);  // there is no later one
  EXPECT_EQ(cursor.advance(0, 0, FSDP_BACKWARD, 3), 6u);
  EXPECT_EQ(cursor.positions().train, 0u);  // the pass has ended
  EXPECT_EQ(cursor.advance(0, 0, FSDP_EVAL, 0), 0u);
  EXPECT_EQ(cursor.advance(0, 0, FSDP_EVAL, 0), 3u);
  EXPECT_EQ(cursor.advance(1, whole, FSDP_RECOMPUTE, 0), nowhere);
}

TEST(VisitCursor, UnshardingTheWholeGroupMovesPastAllVisitsOfItsPieces) {
  const memory::VisitOrder order = order_of_pieces();
  VisitCursor cursor(order, 2);
  EXPECT_EQ(cursor.advance(0, whole, FSDP_FORWARD, 0), 1u);
  EXPECT_EQ(cursor.advance(1, whole, FSDP_FORWARD, 0), 2u);
  EXPECT_EQ(cursor.advance(0, whole, FSDP_FORWARD, 1), 3u);
  EXPECT_EQ(cursor.advance(0, whole, FSDP_BACKWARD, 3), 6u);
}

TEST(VisitCursor, PiecesStayInAVisitOfTheWholeGroupUntilOneComesAgain) {
  const memory::VisitOrder order = order_of(
      {{0, FSDP_FORWARD, 0}, {1, FSDP_FORWARD, 0}, {0, FSDP_FORWARD, 0}, {0, FSDP_BACKWARD, 0}, {1, FSDP_BACKWARD, 0}});
  VisitCursor cursor(order, 2);
  EXPECT_EQ(cursor.advance(0, 0, FSDP_FORWARD, nowhere), 0u);
  EXPECT_EQ(cursor.advance(0, 1, FSDP_FORWARD, nowhere), 0u);
  EXPECT_EQ(cursor.advance(0, 0, FSDP_FORWARD, 0), 2u);
  EXPECT_EQ(cursor.advance(0, 1, FSDP_FORWARD, 0), 2u);
}

}  // namespace
}  // namespace fsdp::engine
