// SPDX-License-Identifier: Apache-2.0
#include "abi/boundary.h"
#include "abi/options.h"

using namespace fsdp;
using namespace fsdp::abi;

extern "C" {

fsdp_status fsdp_write_trace(const fsdp_context *context, const char *path) {
  constexpr auto call = "fsdp_write_trace";
  return call_beside(context, call, [&](const engine::Context &impl) {
    if (*check_pointer(path, call, "path") == 0) fail(FSDP_INVALID_ARGUMENT, "{}: path is empty", call);
    impl.write_trace(path);
  });
}

fsdp_status fsdp_write_flight_record(const fsdp_context *context, const char *path) {
  constexpr auto call = "fsdp_write_flight_record";
  return call_beside(context, call, [&](const engine::Context &impl) {
    if (*check_pointer(path, call, "path") == 0) fail(FSDP_INVALID_ARGUMENT, "{}: path is empty", call);
    impl.write_flight_record(path);
  });
}

fsdp_status fsdp_begin_span(fsdp_context *context, const char *name) {
  constexpr auto call = "fsdp_begin_span";
  return call_context(context, call, [&](auto &impl) {
    check_pointer(name, call, "name");
    trace::CallerSpans *spans = impl->caller_spans();
    if (!spans) return;
    const char *known = spans->find(name);
    spans->begin(known ? known : spans->add(read_name(name, 255, call, "name")));
  });
}

fsdp_status fsdp_end_span(fsdp_context *context) {
  return call_context(context, "fsdp_end_span", [](auto &impl) {
    if (trace::CallerSpans *spans = impl->caller_spans()) spans->end();
  });
}

}  // extern "C"
