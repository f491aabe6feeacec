// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/format/box.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>

namespace fsdp::checkpoint {
namespace {

using Shape = std::vector<uint64_t>;

uint64_t elements(const Shape &shape) {
  uint64_t count = 1;
  for (const uint64_t size : shape) count *= size;
  return count;
}

// Counts one by one which numbers in the tensor the elements of a box have, in the box's order.
Shape numbers_of(const Shape &tensor, const Box &box) {
  Shape numbers;
  std::function<void(size_t, uint64_t)> walk = [&](size_t d, uint64_t number) {
    if (d == tensor.size()) return numbers.push_back(number);
    for (uint64_t i = 0; i < box.shape[d]; ++i) walk(d + 1, number * tensor[d] + box.offset[d] + i);
  };
  walk(0, 0);
  return numbers;
}

Shape random_shape(std::minstd_rand &random, size_t most) {
  Shape shape(random() % (most + 1));
  for (uint64_t &size : shape) size = 1 + random() % 4;
  return shape;
}

TEST(SplitRange, GivesEveryElementOnceAndInOrder) {
#ifdef __SANITIZE_ADDRESS__  // only the plain build runs all
  const int trials = 60;
#else
  const int trials = 300;
#endif
  std::minstd_rand random(7);
  for (int trial = 0; trial < trials; ++trial) {
    const Shape shape = random_shape(random, 4);
    const uint64_t all = elements(shape);
    for (uint64_t first = 0; first <= all; ++first)
      for (uint64_t count = 0; count <= all - first; ++count) {
        Shape found, wanted;
        for (uint64_t i = 0; i < count; ++i) wanted.push_back(first + i);
        for (const Box &box : split_range(shape, first, count)) {
          const Shape some = numbers_of(shape, box);
          EXPECT_EQ(some.size(), box.count());
          found.insert(found.end(), some.begin(), some.end());
        }
        ASSERT_EQ(found, wanted);
      }
  }
}

TEST(SplitRange, NeedsFewBoxes) {
  const Shape stacked{8, 6, 10};
  EXPECT_EQ(split_range(stacked, 0, 480), (std::vector<Box>{{{0, 0, 0}, {8, 6, 10}}}));
  EXPECT_EQ(split_range(stacked, 60, 120), (std::vector<Box>{{{1, 0, 0}, {2, 6, 10}}}));
  // The part goes from a row inside expert 1 to one inside expert 4.
  EXPECT_EQ(split_range(stacked, 80, 180),
            (std::vector<Box>{{{1, 2, 0}, {1, 4, 10}}, {{2, 0, 0}, {2, 6, 10}}, {{4, 0, 0}, {1, 2, 10}}}));
  EXPECT_EQ(split_range(stacked, 81, 179).size(), 4u);  // and one from inside a row: one more
  EXPECT_EQ(split_range(stacked, 83, 5), (std::vector<Box>{{{1, 2, 3}, {1, 1, 5}}}));
  EXPECT_EQ(split_range({}, 0, 1), (std::vector<Box>{{{}, {}}}));
  EXPECT_TRUE(split_range({}, 0, 0).empty());
  EXPECT_TRUE(split_range(Shape{0, 5}, 0, 0).empty());
}

TEST(Intersect, IsWhatBothHave) {
  EXPECT_EQ(intersect({{0, 4}, {8, 4}}, {{6, 0}, {8, 6}}), (Box{{6, 4}, {2, 2}}));
  EXPECT_EQ(intersect({{0}, {4}}, {{4}, {4}}), std::nullopt);
  EXPECT_EQ(intersect({{0}, {4}}, {{2}, {0}}), std::nullopt);
  EXPECT_EQ(intersect({{}, {}}, {{}, {}}), (Box{{}, {}}));
}

Box random_box(std::minstd_rand &random, const Shape &tensor) {
  Box box = whole(tensor);
  for (size_t d = 0; d < tensor.size(); ++d) {
    box.offset[d] = random() % tensor[d];
    box.shape[d] = 1 + random() % (tensor[d] - box.offset[d]);
  }
  return box;
}

// Each element that two boxes share has a number in the tensor, which must be the same at both ends of a run.
TEST(RunWalk, MovesEveryCommonElementOnce) {
  std::minstd_rand random(11);
  int met = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    const Shape tensor = random_shape(random, 5);
    const Box from = random_box(random, tensor), to = random_box(random, tensor);
    const std::optional<Box> common = intersect(from, to);
    if (!common) continue;
    ++met;
    const Shape from_numbers = numbers_of(tensor, from), to_numbers = numbers_of(tensor, to);
    Shape moved;
    const RunWalk runs(*common, from, to);
    for (uint64_t i = 0; i < runs.run_count(); ++i) {
      const CopyRun run = runs[i];
      for (uint64_t e = 0; e < run.count; ++e) {
        ASSERT_EQ(from_numbers.at(run.from + e), to_numbers.at(run.to + e));
        moved.push_back(to_numbers[run.to + e]);
      }
    }
    ASSERT_EQ(moved, numbers_of(tensor, *common));
  }
  EXPECT_GT(met, 2000);
}

TEST(RunWalk, TakesWhatIsContiguousAtOnce) {
  const Box tensor = whole(Shape{64, 32, 16});
  const Box rows{{16, 0, 0}, {8, 32, 16}};
  EXPECT_EQ(RunWalk(rows, tensor, rows).run_count(), 1u);
  EXPECT_EQ(RunWalk(rows, tensor, rows)[0].count, 8u * 32 * 16);
  EXPECT_EQ(RunWalk(rows, tensor, rows)[0].from, 16u * 32 * 16);
  const Box columns{{0, 8, 0}, {64, 8, 16}};
  EXPECT_EQ(RunWalk(columns, tensor, columns).run_count(), 64u);
  EXPECT_EQ(RunWalk(columns, tensor, columns)[63].count, 8u * 16);
  EXPECT_EQ(RunWalk(columns, tensor, columns)[63].from, 63u * 32 * 16 + 8 * 16);
  EXPECT_EQ(RunWalk(columns, tensor, columns)[63].to, 63u * 8 * 16);
}

// Boxes that a random division makes, in any order, are disjoint; with one box more two of them overlap.
TEST(Boxes, ThatOverlapAreFoundInAnyDivision) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::vector<uint64_t> shape{1 + random() % 5, 1 + random() % 6, 1 + random() % 7};
    const uint64_t all = shape[0] * shape[1] * shape[2];
    std::vector<Box> boxes;
    for (uint64_t first = 0; first < all;) {
      const uint64_t count = std::min<uint64_t>(1 + random() % 40, all - first);
      for (const Box &box : split_range(shape, first, count)) boxes.push_back(box);
      first += count;
    }
    boxes.push_back({{0, 0, 0}, {1, 0, 1}});  // empty
    std::shuffle(boxes.begin(), boxes.end(), random);
    const auto overlap = [](const std::vector<Box> &given) {
      std::vector<const Box *> pointers;
      for (const Box &box : given) pointers.push_back(&box);
      size_t most = 100'000;
      return find_overlap(pointers, most);
    };
    ASSERT_FALSE(overlap(boxes)) << seed;
    const uint64_t first = random() % all;
    boxes.push_back(split_range(shape, first, 1 + random() % (all - first)).front());
    const auto found = overlap(boxes);
    ASSERT_TRUE(found && found->first) << seed;
    EXPECT_GT(common_count(*found->first, *found->second), 0u);
  }
}

// Boxes that cross each other in many places are compared in bounded time.
TEST(Boxes, ThatCannotBeComparedAreGivenUp) {
  std::vector<Box> boxes;
  for (uint64_t i = 0; i < 1000; ++i) boxes.push_back({{i, i}, {1000, 1}});
  std::vector<const Box *> pointers;
  for (const Box &box : boxes) pointers.push_back(&box);
  size_t most = 1000;
  const auto found = find_overlap(pointers, most);
  EXPECT_TRUE(found && !found->first);
}

}  // namespace
}  // namespace fsdp::checkpoint
