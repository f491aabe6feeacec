// SPDX-License-Identifier: Apache-2.0
// Tests the meaning of each launcher's variables, which launcher counts, and the errors about variables that are
// missing.
#include "environment_fixture.h"
#include "membership/launch/launchers.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

const Variables torchrun = {{"RANK", "3"},        {"WORLD_SIZE", "4"},
                            {"LOCAL_RANK", "1"},  {"LOCAL_WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}};
const Variables open_mpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                            {"PMIX_NAMESPACE", "77"}};
const Variables slurm = {{"SLURM_PROCID", "3"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_JOB_ID", "9"},
                         {"SLURM_STEP_ID", "2"},
                         {"SLURM_STEP_NUM_NODES", "2"},
                         {"SLURM_STEP_NODELIST", "n[07-09]"}};
const Variables mpich = {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};

WorldOptions world_of(const Variables &variables, const Variables &change = {}) {
  const Environment environment(changed(variables, change));
  return read_launcher_environment();
}
std::string problem_of(const Variables &variables, const Variables &change) {
  const Error error = error_of([&] { world_of(variables, change); });
  EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT) << error.message;
  return error.message;
}
// Every variable is removed in turn, and is named in the error.
void expect_all_needed(const Variables &variables, std::initializer_list<const char *> names) {
  for (const char *name : names) {
    const std::string text = problem_of(variables, {{name, "-"}});
    EXPECT_NE(text.find(std::string("but ") + name + " is not"), std::string::npos) << text;
  }
}

TEST(Torchrun, HostsAndPorts) {
  WorldOptions world = world_of(torchrun);
  EXPECT_EQ(world.rank, 3U);
  EXPECT_EQ(world.size, 4U);
  EXPECT_EQ(world.rendezvous, "tcp://a:29500");
  EXPECT_NE(world.source.find("torchrun"), std::string::npos);
  EXPECT_EQ(world_of(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}}).rendezvous, "tcp://a:29501");
  EXPECT_EQ(world_of(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}).rendezvous, "tcp://a:29500");
  EXPECT_EQ(world_of(torchrun, {{"LOCAL_WORLD_SIZE", "4"}}).rendezvous, "a:29500");
  EXPECT_EQ(world_of(torchrun, {{"LOCAL_WORLD_SIZE", "-"}}).rendezvous, "tcp://a:29500");
  EXPECT_EQ(world_of(torchrun, {{"LOCAL_WORLD_SIZE", "-"}, {"MASTER_ADDR", "localhost"}}).rendezvous,
            "localhost:29500");
  EXPECT_EQ(world_of(torchrun, {{"MASTER_ADDR", "fe80::1"}}).rendezvous, "tcp://[fe80::1]:29500");
  EXPECT_EQ(world_of(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "2"}}).attempt, 2U);
  EXPECT_EQ(world_of(torchrun, {{"FSDP_RESTART_COUNT", "3"}}).attempt, 3U);
  expect_all_needed(torchrun, {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"});
}

TEST(Torchrun, RendezvousStandsForTheAddress) {
  const Variables change = {{"MASTER_ADDR", "-"}, {"MASTER_PORT", "-"}, {"FSDP_RENDEZVOUS", "file:///shared"}};
  EXPECT_EQ(world_of(torchrun, change).rendezvous, "file:///shared");
  EXPECT_EQ(world_of(torchrun, {{"FSDP_RENDEZVOUS", "tcp://b:1"}}).rendezvous, "tcp://b:1");
}

TEST(OpenMpi, OneHostNeedsNoAddress) {
  const WorldOptions world = world_of(open_mpi);
  EXPECT_EQ(world.rank, 3U);
  EXPECT_EQ(world.size, 4U);
  EXPECT_EQ(world.rendezvous, "openmpi-77");
  EXPECT_NE(world.source.find("Open MPI"), std::string::npos);
  EXPECT_EQ(world_of(open_mpi, {{"PMIX_NAMESPACE", "-"}, {"OMPI_MCA_ess_base_jobid", "5"}}).rendezvous, "openmpi-5");
  EXPECT_NE(problem_of(open_mpi, {{"PMIX_NAMESPACE", "-"}}).find("OMPI_MCA_ess_base_jobid"), std::string::npos);
  expect_all_needed(open_mpi, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE"});
}

TEST(OpenMpi, SeveralHostsNeedOne) {
  const Variables two = {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}};
  EXPECT_NE(problem_of(open_mpi, two).find("mpirun -x FSDP_RENDEZVOUS"), std::string::npos);
  EXPECT_EQ(world_of(open_mpi, changed(two, {{"FSDP_RENDEZVOUS", "tcp://b:1"}})).rendezvous, "tcp://b:1");
}

TEST(Slurm, FirstHostAndPort) {
  const WorldOptions world = world_of(slurm);
  EXPECT_EQ(world.rank, 3U);
  EXPECT_EQ(world.size, 4U);
  EXPECT_EQ(world.rendezvous, "tcp://n07:20155");
  EXPECT_EQ(world.job, "slurm-9.2");
  EXPECT_NE(world.source.find("Slurm"), std::string::npos);
  EXPECT_NE(world_of(slurm, {{"SLURM_STEP_ID", "3"}}).rendezvous, world.rendezvous);
  EXPECT_EQ(world_of(slurm, {{"SLURM_STEP_NUM_NODES", "1"}}).rendezvous, "slurm-9.2");
  EXPECT_EQ(world_of(slurm, {{"SLURM_STEP_NUM_NODES", "-"}, {"SLURM_NNODES", "1"}}).rendezvous, "slurm-9.2");
  expect_all_needed(slurm, {"SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID"});
  for (const char *name : {"SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"})
    EXPECT_NE(problem_of(slurm, {{name, "-"}}).find(name), std::string::npos);
}

TEST(Slurm, AShellOfSallocIsNoRank) {
  for (const char *name : {"SLURM_PROCID", "SLURM_STEP_ID"}) EXPECT_EQ(world_of(slurm, {{name, "-"}}).size, 1U);
}

TEST(Slurm, TheFirstNodeOfEachFormOfListIsFound) {
  const std::pair<const char *, const char *> good[] = {{"a", "a"},
                                                        {"a,b", "a"},
                                                        {"n[1-3]", "n1"},
                                                        {"n[007,9]", "n007"},
                                                        {"n[5]", "n5"},
                                                        {"r[1-2]n[3-4]x,b", "r1n3x"},
                                                        {"a-b.c,d[1-2]", "a-b.c"}};
  for (const auto &[list, host] : good) EXPECT_EQ(first_host(list), host);
  for (const char *wrong : {"", ",a", "n[", "n[]", "n[-3]", "n[1", "a b", "n]"})
    EXPECT_EQ(error_of([&] { first_host(wrong); }).status, FSDP_INVALID_ARGUMENT) << wrong;
}

TEST(Mpich, NeedsAProxyOrARendezvous) {
  const Variables one = {{"MPI_LOCALNRANKS", "4"}};
  EXPECT_NE(problem_of(mpich, one).find("hydra_pmi_proxy"), std::string::npos);
  EXPECT_EQ(world_of(mpich, changed(one, {{"FSDP_RENDEZVOUS", "mine"}})).rendezvous, "mine");
  EXPECT_NE(problem_of(mpich, {}).find("FSDP_RENDEZVOUS=tcp://HOST:PORT"), std::string::npos);
  const WorldOptions world = world_of(mpich, {{"FSDP_RENDEZVOUS", "file:///d"}});
  EXPECT_EQ(world.rank, 3U);
  EXPECT_EQ(world.size, 4U);
  EXPECT_NE(world.source.find("MPICH"), std::string::npos);
  expect_all_needed(mpich, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
}

// The launchers' order of precedence: each wins over the later ones.
TEST(Launchers, EachLauncherWinsOverThoseBehindIt) {
  Variables all;
  for (const auto &variables : {torchrun, open_mpi, slurm, mpich}) all.insert(variables.begin(), variables.end());
  EXPECT_NE(world_of(all).source.find("torchrun"), std::string::npos);
  // Addresses that a shell exports do not make a launcher.
  all = changed(all, {{"RANK", "-"}, {"WORLD_SIZE", "-"}});
  EXPECT_NE(world_of(all).source.find("Open MPI"), std::string::npos);
  all = changed(all, {{"OMPI_COMM_WORLD_RANK", "-"}, {"OMPI_COMM_WORLD_SIZE", "-"}});
  EXPECT_NE(world_of(all).source.find("Slurm"), std::string::npos);
  all = changed(all, {{"SLURM_PROCID", "-"}, {"FSDP_RENDEZVOUS", "tcp://b:1"}});
  EXPECT_NE(world_of(all).source.find("MPICH"), std::string::npos);
}

TEST(Launchers, ExplicitOptionsAreCompleted) {
  WorldOptions world;
  world.size = 2;
  {
    const Environment environment({{"FSDP_RENDEZVOUS", "tcp://b:1"}, {"FSDP_JOB_SECRET", "s"}});
    complete_world(world);
    EXPECT_EQ(world.rendezvous, "tcp://b:1");
    EXPECT_EQ(world.secret, "s");
    world.rendezvous = "mine";
    complete_world(world);
    EXPECT_EQ(world.rendezvous, "mine");
  }
  world.rendezvous.clear();
  const Environment none({});
  EXPECT_EQ(error_of([&] { complete_world(world); }).status, FSDP_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace fsdp::transport::test
