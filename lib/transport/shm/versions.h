// SPDX-License-Identifier: Apache-2.0
// The version that each rank of a host has published: one word a rank, in memory that all of them map.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/mapping.h"
#include "membership/seat.h"
#include "transport/names.h"
#include "transport/shm/words.h"
#include "transport/versions.h"

namespace fsdp::transport {

class ShmVersions final : public Versions {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Word); }
  ShmVersions(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, Mapping memory);

  void publish(uint64_t version, device::Stream &writer) override;
  bool ready(uint64_t version) const noexcept override { return words_.reached(version); }
  void await(uint64_t version, device::Stream &reader, const char *what) override;

 private:
  void raise(uint64_t version);
  void wait(uint64_t version, const char *what);

  std::shared_ptr<Seat> seat_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  Mapping memory_;
  Words words_;
};

}  // namespace fsdp::transport
