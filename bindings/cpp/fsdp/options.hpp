// SPDX-License-Identifier: Apache-2.0
// Options, and the enums of arguments. Included by fsdp.hpp.
#ifndef FSDP_OPTIONS_HPP
#define FSDP_OPTIONS_HPP

#include <fsdp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "error.hpp"

namespace fsdp {

/** An options struct of the header: all zero, which is the defaults, and its size. */
template <typename Struct>
struct Options : Struct {
  Options() : Struct(detail::sized<Struct>()) {}
};
using MeshOptions = Options<fsdp_mesh_options>;
using ModelOptions = Options<fsdp_model_options>;
using GroupOptions = Options<fsdp_group_options>;
using AdamwOptions = Options<fsdp_adamw_options>;
using MatrixOptions = Options<fsdp_matrix_options>;
using SaveOptions = Options<fsdp_save_options>;
using LoadOptions = Options<fsdp_load_options>;

enum class LogLevel : fsdp_log_level {
  error = FSDP_LOG_ERROR,
  warning = FSDP_LOG_WARNING,
  info = FSDP_LOG_INFO,
  debug = FSDP_LOG_DEBUG
};
enum class ValueOp : fsdp_value_op {
  sum = FSDP_VALUE_SUM,
  min = FSDP_VALUE_MIN,
  max = FSDP_VALUE_MAX,
  mean = FSDP_VALUE_MEAN
};
enum class Phase : fsdp_phase {
  forward = FSDP_FORWARD,
  backward = FSDP_BACKWARD,
  recompute = FSDP_RECOMPUTE,
  eval = FSDP_EVAL
};
enum class Quantization : fsdp_quantization {
  fp8 = FSDP_QUANTIZE_FP8,
  mxfp8 = FSDP_QUANTIZE_MXFP8,
  fp8_block = FSDP_QUANTIZE_FP8_BLOCK
};
enum class Optimizer : fsdp_optimizer {
  adamw = FSDP_OPTIMIZER_ADAMW,
  caller = FSDP_OPTIMIZER_CALLER,
  adamw_8bit = FSDP_OPTIMIZER_ADAMW_8BIT
};
enum class MainStorage : fsdp_main_storage {
  float32 = FSDP_MAIN_FLOAT32,
  split16 = FSDP_MAIN_SPLIT16,
  none = FSDP_MAIN_NONE
};
enum class Home : fsdp_home { device = FSDP_HOME_DEVICE, host = FSDP_HOME_HOST, file = FSDP_HOME_FILE };
enum class MissingGrad : fsdp_missing_grad { zeros = FSDP_MISSING_GRAD_ZEROS, skip = FSDP_MISSING_GRAD_SKIP };
enum class ScaleRounding : fsdp_scale_rounding { exact = FSDP_SCALE_EXACT, power_of_two = FSDP_SCALE_POWER_OF_TWO };
enum class ScaleRule : fsdp_scale_rule { round_up = FSDP_SCALE_ROUND_UP, floor = FSDP_SCALE_FLOOR };
enum class PlanePolicy : fsdp_plane_policy {
  by_phase = FSDP_PLANES_BY_PHASE,
  by_phase_and_recompute = FSDP_PLANES_BY_PHASE_AND_RECOMPUTE,
  both = FSDP_PLANES_BOTH
};
enum class Plane : fsdp_plane {
  row = FSDP_PLANE_ROW,
  row_scale = FSDP_PLANE_ROW_SCALE,
  column = FSDP_PLANE_COLUMN,
  column_scale = FSDP_PLANE_COLUMN_SCALE
};
enum class ScheduleKind : fsdp_schedule_kind {
  sequential = FSDP_SCHEDULE_SEQUENTIAL,
  interleaved = FSDP_SCHEDULE_INTERLEAVED,
  visits = FSDP_SCHEDULE_VISITS,
  any = FSDP_SCHEDULE_ANY
};
enum class Role : fsdp_role {
  all = FSDP_ROLE_ALL,
  compute = FSDP_ROLE_COMPUTE,
  main = FSDP_ROLE_MAIN,
  grad = FSDP_ROLE_GRAD,
  optimizer = FSDP_ROLE_OPTIMIZER,
  gather = FSDP_ROLE_GATHER,
  reduce = FSDP_ROLE_REDUCE,
  staging = FSDP_ROLE_STAGING,
  matrix = FSDP_ROLE_MATRIX,
  home = FSDP_ROLE_HOME
};
enum class BytesOwner : fsdp_bytes_owner { once = FSDP_BYTES_ONCE, per_rank = FSDP_BYTES_PER_RANK };

/** fsdp_context_options, with hooks that are any function. What a hook throws comes out of the call in which it ran. */
struct ContextOptions : Options<fsdp_context_options> {
  std::function<void(LogLevel, std::string_view)> on_log;
  std::function<bool()> on_interrupted;
};

namespace detail {

/** The hooks of a context. Each of its handles keeps them, since any call on a handle may run them. */
struct Hooks {
  std::function<void(LogLevel, std::string_view)> on_log;
  std::function<bool()> on_interrupted;
};

/** The hooks of a handle, which may still run while the handle is destroyed. A move assignment swaps: the old hooks
 * live on in the other object until the handle beside it is destroyed. */
class KeptHooks {
 public:
  KeptHooks() = default;
  KeptHooks(std::shared_ptr<Hooks> hooks) noexcept : hooks_(std::move(hooks)) {}  // NOLINT: they are the same
  KeptHooks(const KeptHooks &) = default;
  KeptHooks(KeptHooks &&) noexcept = default;
  KeptHooks &operator=(KeptHooks &&other) noexcept {
    std::swap(hooks_, other.hooks_);
    return *this;
  }
  KeptHooks &operator=(const KeptHooks &) = delete;

 private:
  std::shared_ptr<Hooks> hooks_;
};

extern "C" inline void fsdp_hpp_log(void *data, fsdp_log_level level, const char *message) {
  try {
    static_cast<Hooks *>(data)->on_log(static_cast<LogLevel>(level), message);
  } catch (...) {
    keep_exception();
  }
}
extern "C" inline std::int32_t fsdp_hpp_interrupted(void *data) {
  try {
    return static_cast<Hooks *>(data)->on_interrupted();
  } catch (...) {
    keep_exception();
    return 1;
  }
}

inline std::shared_ptr<Hooks> hand_over(const ContextOptions &options, fsdp_context_options &raw) {
  auto hooks = std::make_shared<Hooks>(Hooks{options.on_log, options.on_interrupted});
  raw = options;
  if (hooks->on_log) {
    raw.log = fsdp_hpp_log;
    raw.log_data = hooks.get();
  }
  if (hooks->on_interrupted) {
    raw.interrupted = fsdp_hpp_interrupted;
    raw.interrupted_data = hooks.get();
  }
  return hooks;
}

}  // namespace detail

}  // namespace fsdp

#endif
