// SPDX-License-Identifier: Apache-2.0
// What one rank has to say about its part of something that ranks make together, in words that travel as they are.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "base/error.h"

namespace fsdp::transport {

struct Outcome {
  fsdp_status status;
  fsdp_origin origin;
  int64_t code;
  uint64_t bytes;  // of memory, where some is made
  char text[488];

  template <class Step>
  static Outcome of(Step &&step) noexcept {
    Outcome outcome{};
    try {
      step();
    } catch (const Error &error) {
      outcome.set(error.status, error.origin, error.origin_code, error.what());
    } catch (const std::bad_alloc &) {
      outcome.set(FSDP_OUT_OF_MEMORY, FSDP_ORIGIN_FSDP, 0, "out of memory");
    } catch (const std::exception &error) {
      outcome.set(FSDP_INTERNAL, FSDP_ORIGIN_FSDP, 0, error.what());
    }
    return outcome;
  }

  // Of a peer: its text may lack its end.
  void check(uint32_t world_rank) const {
    if (status != FSDP_OK)
      throw Error(status, format_text("rank {}: {}", world_rank, std::string(text, ::strnlen(text, sizeof text))),
                  static_cast<int32_t>(world_rank), origin, code);
  }

 private:
  void set(fsdp_status as, fsdp_origin from, int64_t origin_code, const char *what) noexcept {
    status = as;
    origin = from;
    code = origin_code;
    std::strncpy(text, what, sizeof text - 1);
  }
};

}  // namespace fsdp::transport
