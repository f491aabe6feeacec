// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process: what they share, and their links. No rank waits for another to be constructed.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "membership/job.h"
#include "membership/liveness/links.h"

namespace fsdp::membership {

class LocalJob {
 public:
  explicit LocalJob(uint32_t size);

  uint32_t size() const noexcept { return size_; }
  const Fd &control() const noexcept { return control_; }
  // Each rank once.
  void claim(uint32_t rank);

  void send(uint32_t to_rank, Parcel parcel, Fd file);
  std::optional<Fd> take(uint32_t rank, Parcel parcel);
  void sleep(uint32_t ms);
  Fd meet(Parcel parcel, size_t rank_count, const std::function<Fd()> &create);

 private:
  struct Handover {
    Parcel parcel;
    Fd file;
    size_t taken = 0;
  };
  const uint32_t size_;
  Fd control_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<bool> claimed_;
  std::vector<std::vector<std::pair<Parcel, Fd>>> mailboxes_;
  std::vector<Handover> meetings_;
};

class LocalLinks final : public Links {
 public:
  LocalLinks(std::shared_ptr<LocalJob> job, uint32_t rank) : job_(std::move(job)), rank_(rank) {}

  bool send(uint32_t to_rank, Parcel parcel, const Fd &file) override;
  std::optional<Fd> take(Parcel parcel) override { return job_->take(rank_, parcel); }
  void sleep(uint32_t ms) override { job_->sleep(ms); }
  // A thread does not die alone: one that ends its context without closing it says so in the control memory.
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel parcel, std::span<const uint32_t> ranks, const std::function<Fd()> &create) override {
    return job_->meet(parcel, ranks.size(), create);
  }

 private:
  std::shared_ptr<LocalJob> job_;
  uint32_t rank_;
};

}  // namespace fsdp::membership
