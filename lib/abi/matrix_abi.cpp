// SPDX-License-Identifier: Apache-2.0
#include "abi/boundary.h"
#include "abi/options.h"
#include "memory/matrix_plan.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

fsdp_matrix_options read_matrix_options(const fsdp_matrix_options *given, const char *call) {
  auto options = read_options(given, call, "fsdp_matrix_options");
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_matrix_options.reserved is {}, it must be 0", call, options.reserved);
  options.dtype = read_enum(options.dtype, FSDP_FLOAT32 + 0, FSDP_FLOAT16 + 0, call, "fsdp_matrix_options.dtype");
  return options;
}

// A matrix without data says that there are no more.
fsdp_matrix matrix_of(HandledModel &model, const engine::GivenMatrices &given) {
  const memory::Matrix &first = *given.first;
  fsdp_matrix view = FSDP_MATRIX_INIT;
  view.group = model.group_handle(first.group);
  view.name = model.spec().groups[first.group].params[first.param].name.c_str();
  view.param_index = first.param;
  view.batch_index = first.batch;
  view.split_index = first.split;
  view.row_offset = first.row_offset;
  view.rows = first.rows;
  view.columns = first.columns;
  view.count = given.count;
  view.stride_bytes = given.stride_bytes;
  view.data = given.data;
  view.dtype = given.dtype;
  return view;
}

}  // namespace

extern "C" {

fsdp_status fsdp_collect_matrices(fsdp_model *model, const fsdp_matrix_options *options, fsdp_stream stream) {
  constexpr auto call = "fsdp_collect_matrices";
  return in_model(model, call, [&](engine::Model &impl) {
    const fsdp_matrix_options given = read_matrix_options(options, call);
    impl.update(call).collect_matrices(given.source, given.target, given.dtype, stream);
  });
}

fsdp_status fsdp_next_matrix(fsdp_model *model, fsdp_stream stream, fsdp_matrix *matrix) {
  constexpr auto call = "fsdp_next_matrix";
  return in_model(model, call, [&](HandledModel &impl) {
    check_output(matrix, call, "fsdp_matrix");
    const auto given = impl.update(call).next_matrix(stream);
    fsdp_matrix none = FSDP_MATRIX_INIT;
    write_output(matrix, given ? matrix_of(impl, *given) : none);
  });
}

fsdp_status fsdp_return_matrices(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_return_matrices";
  return in_model(model, call, [&](engine::Model &impl) { impl.update(call).return_matrices(stream); });
}

fsdp_status fsdp_get_matrix_plan(const fsdp_model *model, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_get_matrix_plan";
  return in_model(model, call, [&](engine::Model &impl) {
    write_text(memory::describe_matrices(impl.spec(), impl.plan(call)), buffer, size_bytes, call);
  });
}

}  // extern "C"
