// SPDX-License-Identifier: Apache-2.0
#include "membership/join/local_job.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "membership/liveness/control.h"

namespace fsdp::membership {
namespace {

Fd duplicate(const Fd &file) {
  Fd copy = file.duplicate();
  if (!copy) fail_errno(errno, "passing shared memory to another rank");
  return copy;
}

}  // namespace

LocalJob::LocalJob(uint32_t size)
    : size_(size), control_(Control::create(size, {size, true})), claimed_(size), mailboxes_(size) {}

void LocalJob::claim(uint32_t rank) {
  if (rank >= size_) fail(FSDP_INVALID_ARGUMENT, "rank {} is outside [0, {})", rank, size_);
  std::lock_guard lock(mutex_);
  if (claimed_[rank]) fail(FSDP_INVALID_ARGUMENT, "rank {} of the local job has been made before", rank);
  claimed_[rank] = true;
}

void LocalJob::send(uint32_t to_rank, Parcel parcel, Fd file) {
  std::lock_guard lock(mutex_);
  mailboxes_[to_rank].emplace_back(parcel, std::move(file));
  arrived_.notify_all();
}

std::optional<Fd> LocalJob::take(uint32_t rank, Parcel parcel) {
  std::lock_guard lock(mutex_);
  auto &mailbox = mailboxes_[rank];
  const auto found =
      std::find_if(mailbox.begin(), mailbox.end(), [&](const auto &entry) { return entry.first == parcel; });
  if (found == mailbox.end()) return {};
  Fd file = std::move(found->second);
  mailbox.erase(found);
  return file;
}

// Something may have come between the look and this: the limit makes up for it.
void LocalJob::sleep(uint32_t ms) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, std::chrono::milliseconds(std::min(ms, 2U)));
}

// The first to come makes it, the last to come takes the job's own copy.
Fd LocalJob::meet(Parcel parcel, size_t rank_count, const std::function<Fd()> &create) {
  std::lock_guard lock(mutex_);
  auto found = std::find_if(meetings_.begin(), meetings_.end(), [&](const Handover &m) { return m.parcel == parcel; });
  if (found == meetings_.end()) {
    meetings_.push_back({parcel, create(), 0});
    found = meetings_.end() - 1;
  }
  if (found->taken + 1 < rank_count) {
    Fd file = duplicate(found->file);
    ++found->taken;
    return file;
  }
  Fd file = std::move(found->file);
  meetings_.erase(found);
  return file;
}

bool LocalLinks::send(uint32_t to_rank, Parcel parcel, const Fd &file) {
  job_->send(to_rank, parcel, duplicate(file));
  return true;
}

}  // namespace fsdp::membership
