// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <new>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/dtype.h"
#include "base/settings.h"
#include "base/text.h"
#include "device/device.h"
#include "trace/nvtx.h"
#include "transport/net.h"
#include "transport/team.h"

namespace fsdp::abi {
namespace {

const ThreadErrors thread_errors;

// Do the ranks no longer agree on their calls after this error?
bool fails_context(const Error &error) {
  if (!error.ends_context) return false;
  switch (error.status) {
    case FSDP_PEER_FAILED:
    case FSDP_TIMEOUT:
    case FSDP_ABORTED:
    case FSDP_INTERRUPTED:
    case FSDP_INTERNAL: return true;
    default: return false;
  }
}

void fill(fsdp_error &error, const Error *from, bool context_failed) {
  error = FSDP_ERROR_INIT;
  error.origin = FSDP_ORIGIN_FSDP;
  error.rank = -1;
  error.context_failed = context_failed;
  if (!from) return;
  error.status = from->status;
  error.origin = from->origin;
  error.origin_code = from->origin_code;
  error.rank = from->rank;
  const size_t length = cut_length(from->message, sizeof error.message - 1);
  std::copy_n(from->message.data(), length, error.message);
}

// A shorter struct cuts the message, which still ends with NUL.
void write_error(fsdp_error *out, fsdp_error value) {
  write_output(out, value);
  if (out->struct_size < sizeof value) reinterpret_cast<char *>(out)[out->struct_size - 1] = 0;
}

}  // namespace

fsdp_status report(engine::Context *context, const Error &error, bool inside) noexcept {
  try {
    ThreadError *last = nullptr;
    try {
      last = &thread_errors.get();
      last->failed_context = false;
      last->error.emplace(error);
    } catch (const std::bad_alloc &) {  // no memory for the text, but the status reports the error
      if (last) last->error.reset();
    }
    if (context && !context->in_child()) {
      if (fails_context(error)) context->fail_for_good(error);
      context->remember(error);
      // After BUSY the call inside continues.
      if (inside && error.status != FSDP_BUSY) context->flight().leave_failed(error.status);
      const bool failed = context->failure().failed();
      if (last) last->failed_context = failed;
      if (failed) context->record_failure();
    }
  } catch (...) {  // all other ways would need memory, too
  }
  return error.status;
}

const Error *thread_error() noexcept {
  const ThreadError *last = thread_errors.find();
  return last && last->error ? &*last->error : nullptr;
}

void write_text(const std::string &text, char *buffer, uint64_t *size_bytes, const char *call) {
  if (!size_bytes) fail(FSDP_INVALID_ARGUMENT, "{}: size_bytes is NULL", call);
  const uint64_t needed = text.size() + 1, given = *size_bytes;
  *size_bytes = needed;
  if (!buffer) return;
  if (given < needed) fail(FSDP_INVALID_ARGUMENT, "{}: the buffer has {} bytes, {} are needed", call, given, needed);
  std::copy_n(text.c_str(), needed, buffer);
}

}  // namespace fsdp::abi

using namespace fsdp;
using namespace fsdp::abi;

extern "C" {

fsdp_status fsdp_get_last_error(const fsdp_context *context, fsdp_error *error) {
  return guard([&] {
    check_output(error, "fsdp_get_last_error", "fsdp_error");
    fsdp_error value = FSDP_ERROR_INIT;
    if (context) {
      const auto held = acquire(context, "fsdp_get_last_error");
      const engine::Context &impl = *held;
      const auto last = impl.last_error();
      fill(value, last ? &*last : nullptr, impl.look_for_failure());
    } else {
      const Error *last = thread_error();
      fill(value, last, last && thread_errors.find()->failed_context);
    }
    write_error(error, value);
  });
}

const char *fsdp_get_last_message(void) {
  const Error *last = thread_error();
  return last ? last->message.c_str() : "";
}

fsdp_status fsdp_get_context_error(const fsdp_context *context, fsdp_error *error) {
  return guard([&] {
    check_output(error, "fsdp_get_context_error", "fsdp_error");
    const auto held = acquire(context, "fsdp_get_context_error");
    const engine::Context &impl = *held;
    impl.look_for_failure();
    const auto failure = impl.failure().get();
    fsdp_error value = FSDP_ERROR_INIT;
    fill(value, failure ? &*failure : nullptr, failure.has_value());
    write_error(error, value);
  });
}

const char *fsdp_get_status_name(fsdp_status status) {
  static constexpr const char *names[] = {
      "FSDP_OK",          "FSDP_INVALID_ARGUMENT", "FSDP_INVALID_HANDLE", "FSDP_INVALID_STATE",
      "FSDP_UNSUPPORTED", "FSDP_OUT_OF_MEMORY",    "FSDP_BUSY",           "FSDP_MISMATCH",
      "FSDP_PEER_FAILED", "FSDP_TIMEOUT",          "FSDP_ABORTED",        "FSDP_INTERRUPTED",
      "FSDP_SYSTEM",      "FSDP_INTERNAL"};
  if (status < 0 || static_cast<size_t>(status) >= std::size(names)) return "unknown status";
  return names[status];
}

const char *fsdp_get_version(void) { return FSDP_VERSION_TEXT; }

uint64_t fsdp_get_dtype_size(fsdp_dtype dtype) { return dtype_size(dtype); }

fsdp_status fsdp_describe_build(char *buffer, uint64_t *size_bytes) {
  return guard([&] {
    const std::string at_run_time = device::cuda_at_run_time();
    const bool has_cuda = !at_run_time.empty();
    const std::string cuda =
        has_cuda ? format_text("{}; here: {}", device::cuda_description(), at_run_time) : device::cuda_description();
    const std::string text = format_text(
        "version: {}\ndevices: host{}\ncommunicators: shm, tcp{}\ncuda: {}\nnccl: {}\nucx: {}\nnvtx: {}\ninstruction "
        "set: "
        "{}\n"
        "compiler: {}\n{}",
        FSDP_VERSION_TEXT, has_cuda ? ", cuda" : "", has_cuda ? ", staging" : "", cuda, transport::nccl_description(),
        transport::net_description(), trace::has_ranges() ? "yes" : "no", device::host_instruction_set(), __VERSION__,
        describe_settings());
    write_text(text, buffer, size_bytes, "fsdp_describe_build");
  });
}

}  // extern "C"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

std::vector<uint32_t> failed_ranks(const engine::Context &context) {
  context.look_for_failure();
  const auto failure = context.failure().get();
  if (!failure) return {};
  if (failure->ranks.empty() && failure->rank >= 0) return {static_cast<uint32_t>(failure->rank)};
  return failure->ranks;
}

}  // namespace

extern "C" fsdp_status fsdp_get_failed_ranks(const fsdp_context *context, uint32_t *ranks, uint64_t *rank_count) {
  constexpr auto call = "fsdp_get_failed_ranks";
  return guard([&] {
    check_pointer(rank_count, call, "rank_count");
    const auto held = acquire(context, call);
    const std::vector<uint32_t> failed = failed_ranks(*held);
    const uint64_t room = std::exchange(*rank_count, failed.size());
    if (!ranks) return;
    if (room < failed.size())
      fail(FSDP_INVALID_ARGUMENT, "{}: there is room for {} ranks, {} have failed", call, room, failed.size());
    std::copy(failed.begin(), failed.end(), ranks);
  });
}
