// SPDX-License-Identifier: Apache-2.0
// Processes that try to form a job, each of which leaves a report of how that ended in memory that outlives it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "shm_ranks.h"

namespace fsdp::comm::test {

// Report has at least `status`, atomic, and `text`.
template <class Report>
class ReportedProcesses : public testing::Test {
 protected:
  void SetUp() override {
    void *memory = ::mmap(nullptr, most * sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    reports = static_cast<Report *>(memory);
  }
  void TearDown() override {
    await_processes(processes);
    ::munmap(reports, most * sizeof(Report));
  }

  // Returns the index of its report.
  template <class Body>
  size_t run(Body &&body) {
    const size_t index = processes.size();
    const pid_t process = ::fork();
    if (process == 0) {
      body(reports[index]);
      ::_exit(0);
    }
    processes.push_back(process);
    return index;
  }
  void finish() {
    await_processes(processes);
    processes.clear();
  }
  void expect(size_t index, fsdp_status status, const std::string &text = "") {
    EXPECT_EQ(reports[index].status, status) << "process " << index << ": " << reports[index].text;
    EXPECT_NE(std::string(reports[index].text).find(text), std::string::npos) << reports[index].text;
  }

  Report *reports = nullptr;
  std::vector<pid_t> processes;

 private:
  static constexpr size_t most = 16;
};

}  // namespace fsdp::comm::test
