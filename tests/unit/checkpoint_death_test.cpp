// SPDX-License-Identifier: Apache-2.0
// Tests ranks as processes that save together while one dies or has a disk that hangs, and models of boxes of tensors.
#include "checkpoint_ranks.h"

namespace fsdp::checkpoint {
namespace {

// ---- ranks as processes ----

// A rank ends at one of its calls. The others learn which rank died. Either the previous checkpoint or the new one is
// whole, and another job can save and load in the folder.
TEST_F(CheckpointJob, OfARankThatDiesIsWholeOrNotThere) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  int deaths = 0;
  for (const uint32_t victim : {0u, 2u})
    for (int at = 0, dies = 1; dies; at += step_of(7)) {
      const std::vector<int> codes =
          transport::test::await_processes(transport::test::start_processes(3, [&](Rank &rank) {
            Part part(stacked(three), rank.rank());
            part.fill(2);
            rank.meet();
            std::optional<FaultScope> fault;
            if (rank.rank() == victim) fault.emplace(SystemFault{SystemFault::Way::kills_before, at, 0, ""});
            const Error error = transport::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
            if (error.status == FSDP_OK) return rank.leave();
            require(error.status == FSDP_PEER_FAILED && error.rank == static_cast<int32_t>(victim), error.message);
          }));
      dies = codes[victim] == 99;
      deaths += dies;
      for (uint32_t r = 0; r < 3; ++r) EXPECT_EQ(codes[r], r == victim && dies ? 99 : 0) << victim << " " << at;
      expect_well(load_on(three, fs::exists(path + "/" + step_name(2)) ? 2 : 1));
      save_on(three, 3);
      expect_well(load_on(three, 3));
      for (const uint64_t step : {2, 3}) fs::remove_all(path + "/" + step_name(step));
      // If a job dies before it makes its folder's lock, the folder stays for a day, and each later save checks it.
      for (const std::string &name : names()) {
        EXPECT_TRUE(name == step_name(1) || name.starts_with(".new-")) << name;
        if (name != step_name(1)) fs::remove_all(path + "/" + name);
      }
    }
  EXPECT_GT(deaths, 5);
}

// Runs three ranks as processes, which may not be silent for longer than a second. Returns their exit codes.
std::vector<int> run_processes(const std::function<void(Rank &)> &body) {
  const std::string rendezvous = transport::test::unique_rendezvous();
  std::vector<pid_t> processes;
  for (uint32_t r = 0; r < 3; ++r) {
    const pid_t process = ::fork();
    if (process == 0) {
      membership::WorldOptions world{r, 3, rendezvous, "secret"};
      world.heartbeat_timeout_ms = 1000;
      transport::test::act_as_process(world, body, {});
    }
    processes.push_back(process);
  }
  return transport::test::await_processes(processes);
}

// All ranks have written, and one dies before the first rank has committed. That changes nothing.
TEST_F(CheckpointJob, OfARankThatDiesAfterAllHaveWrittenIsThere) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const auto commits = [](const Rank &rank) {
    SaveWord word;
    return rank.world->read_post(0, std::as_writable_bytes(std::span(&word, 1)), {}) &&
           word.state == SaveState::committing;
  };
  const std::vector<int> codes = run_processes([&](Rank &rank) {
    Part part(stacked(three), rank.rank());
    part.fill(2);
    std::optional<FaultScope> slow;
    if (rank.rank() == 0) slow.emplace(SystemFault{SystemFault::Way::waits, -1, 2000, "renameat2"});
    Save one(ranks_of(rank), part.saved(path, 2));
    if (rank.rank() == 2) {
      while (!commits(rank)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ::_exit(99);
    }
    // Neither rank waits for a peer before the death is known.
    while (transport::test::error_of([&] { rank.world->check(); }).status != FSDP_PEER_FAILED)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    require(!one.progress().ended, "the commit was not slow enough");
    while (!one.progress().ended) one.await_end(std::chrono::milliseconds(20));
    require(one.result().name == step_name(2), "another name");
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 99}));
  expect_well(load_on(three, 2));
}

// A disk holds up a rank for three times as long as a rank may be silent. The rank's heartbeats continue, and the save
// succeeds.
TEST_F(CheckpointJob, OfADiskThatHangsIsNoDeath) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const std::vector<int> codes = run_processes([&](Rank &rank) {
    Part part(stacked(three), rank.rank());
    part.fill(2);
    std::optional<FaultScope> slow;
    if (rank.rank() == 1) slow.emplace(SystemFault{SystemFault::Way::waits, 0, 3000, "pwrite"});
    save(ranks_of(rank), part.saved(path, 2));
    rank.leave();
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 0}));
  expect_well(load_on(three, 2));
}

// ---- boxes ----

// Makes a model with a box of a tensor of [40, 6], and a tensor that each model has whole.
memory::ModelSpec boxed(uint32_t ranks, const Box &box) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  spec.states = {{"exp_avg", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].params = {param("w", box.shape), param("b", {5})};
  spec.groups[0].params[0].global_shape = {40, 6};
  spec.groups[0].params[0].global_offset = box.offset;
  return spec;
}

// Two models of two ranks each save their boxes together. Models with other boxes, and a model with the whole tensor,
// load them.
TEST_F(CheckpointJob, OfSeveralBoxesIsLoadedByAnyOther) {
  const std::vector<Box> ways[] = {{{{0, 0}, {40, 2}}, {{0, 2}, {40, 4}}}, {{{0, 0}, {17, 6}}, {{17, 0}, {23, 6}}}};
  uint64_t step = 0;
  for (const std::vector<Box> &saved : ways) {
    ++step;
    expect_well(run_threads(4, [&](Rank &rank) {
      const uint32_t model = rank.rank() / 2;
      Part part(boxed(2, saved[model]), rank.rank() % 2);
      part.fill(step);
      SaveOrder order = part.saved(path, step);
      order.models[0].ranks = {2 * model, 2 * model + 1};
      save(ranks_of(rank), std::move(order));
    }));
    const Manifest manifest = Folder(path).read_manifest(step_name(step));
    EXPECT_EQ(std::ranges::find(manifest.tensors, "w", &ManifestTensor::name)->parts.size(), 2u);
    EXPECT_EQ(std::ranges::find(manifest.tensors, "b", &ManifestTensor::name)->parts.size(), 1u);
    for (const Box &wanted : {Box{{0, 0}, {40, 6}}, {{0, 0}, {40, 2}}, {{17, 0}, {23, 6}}, {{9, 1}, {20, 3}}})
      expect_well(run_threads(3, [&](Rank &rank) {
        Part part(boxed(3, wanted), rank.rank());
        load(*rank.team, rank.waiter, path, part.loaded());
        require(part.difference(step).empty(), part.difference(step));
      }));
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
