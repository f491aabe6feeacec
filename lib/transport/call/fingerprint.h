// SPDX-License-Identifier: Apache-2.0
// What a rank says its n-th collective is. Ranks compare them when they meet, so that ranks that call different things
// get an error that names both calls.
#pragma once

#include <cstdint>
#include <string>

#include "transport/collectives.h"

namespace fsdp::transport {

enum class Operation : uint32_t { all_gather = 1, reduce_scatter, all_reduce, broadcast, barrier };

const char *operation_name(Operation operation) noexcept;

// Lies in shared memory: of fixed layout, and no peer's copy is trusted.
struct Fingerprint {
  Operation operation;
  uint32_t what;
  uint64_t elements;  // bytes if dtype is 0
  uint64_t hash;      // of all that must agree, also each span's length
  uint64_t call;      // of a call made of several collectives: its number + 1; else 0
  fsdp_dtype dtype;
  char name[52];  // may be cut; with its note

  void start(Operation operation, const Tag &tag) noexcept;
  static Fingerprint of(Operation operation, const Tag &tag) noexcept {
    Fingerprint call{};
    call.start(operation, tag);
    return call;
  }
  void add_span(fsdp_dtype dtype, fsdp_dtype wire_dtype, uint64_t count) noexcept;
  // The collectives that this call is made of are named as it is.
  void number_call(uint64_t number) noexcept;
  // "reduce_scatter of 'a' (#3, float32, 1024 elements)". number: the collective's
  std::string text(uint64_t number) const;
};

}  // namespace fsdp::transport
