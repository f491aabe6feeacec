// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/shm/mapping.h"
#include "comm/shm/seat.h"
#include "comm/shm/words.h"
#include "comm/team.h"

namespace fsdp::comm {

class ShmGate final : public Gate {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Word); }
  ShmGate(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, Mapping memory);

  bool holds_back() const noexcept override { return true; }
  void arrive(uint64_t value) override;
  void arrive(uint64_t value, device::Stream &stream) override;
  bool reached(uint64_t value) const noexcept override { return words_.reached(value); }
  void await(uint64_t value, const char *what) override;

 private:
  std::shared_ptr<Seat> seat_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  Mapping memory_;
  Words words_;
};

}  // namespace fsdp::comm
