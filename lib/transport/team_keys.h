// SPDX-License-Identifier: Apache-2.0
// Numbers for teams, which all ranks of a team come to without a word: the n-th team of the same ranks has the same key
// on each of them, and no other team has it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace fsdp::transport {

class TeamKeys {
 public:
  uint64_t next(const std::vector<uint32_t> &ranks) {
    uint64_t key = 0xcbf29ce484222325;
    for (const uint32_t rank : ranks) key = mix(key, rank + 1);
    return mix(key, ++made_[ranks]);
  }
  // The n-th thing of a team.
  static uint64_t mix(uint64_t key, uint64_t n) { return (key ^ n) * 0x100000001b3; }  // FNV-1a

 private:
  std::map<std::vector<uint32_t>, uint64_t> made_;
};

}  // namespace fsdp::transport
