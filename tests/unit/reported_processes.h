// SPDX-License-Identifier: Apache-2.0
// Runs processes that try to form a job. Each leaves a report of the outcome in memory that outlives it.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "shm_ranks.h"

namespace fsdp::transport::test {

// Text that does not fit is cut off.
template <size_t size>
void append(char (&to)[size], const std::string &text) {
  std::strncat(to, text.c_str(), size - 1 - std::strlen(to));
}

// Outcome must have at least `status` and `ended_ns`, which are atomic, and `text`. All zeros are an empty outcome.
template <class Outcome>
class ReportedProcesses : public testing::Test {
 protected:
  void SetUp() override {
    void *memory = ::mmap(nullptr, most * sizeof(Outcome), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    reports = static_cast<Outcome *>(memory);
  }
  void TearDown() override {
    await_processes(processes);
    ::munmap(reports, most * sizeof(Outcome));
  }

  // Returns the index of its report.
  template <class Body>
  size_t run(Body &&body) {
    const size_t index = processes.size();
    // Clears the report of a process that had this number before. A process that ends without a word has not succeeded.
    std::memset(static_cast<void *>(&reports[index]), 0, sizeof(Outcome));
    reports[index].status = no_word;
    const pid_t process = ::fork();
    if (process == 0) {
      body(reports[index]);
      ::_exit(0);
    }
    processes.push_back(process);
    return index;
  }
  void finish() {
    codes = await_processes(processes);
    processes.clear();
  }
  // Waits at most twenty seconds until that process knows its outcome.
  void await_end(size_t index) {
    for (int ms = 0; reports[index].ended_ns == 0 && ms < 20'000; ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_NE(reports[index].ended_ns, 0) << "process " << index << " has not ended";
  }
  void expect(size_t index, fsdp_status status, const std::string &text = "") {
    EXPECT_EQ(reports[index].status, status) << "process " << index << ": " << reports[index].text;
    if (index < codes.size()) {
      EXPECT_EQ(codes[index], 0) << "process " << index << " has ended otherwise than by itself";
    }
    EXPECT_NE(std::string(reports[index].text).find(text), std::string::npos) << reports[index].text;
  }

  Outcome *reports = nullptr;
  std::vector<pid_t> processes;
  std::vector<int> codes;  // outcomes of processes that have finished

 private:
  static constexpr int32_t no_word = -1;
  static constexpr size_t most = 16;
};

}  // namespace fsdp::transport::test
