// SPDX-License-Identifier: Apache-2.0
// Matrices that come whole to one rank inside the update window, and go back.
#include "ranks.h"

#include <atomic>

namespace {

/** "qkv" is cut into splits of 4, 1 and 1 rows, "stack" has three matrices of 3 x 5, and "bias" has none. */
struct Net {
  explicit Net(const fsdp::Context &context, fsdp::ModelOptions options = {}) : model(context, options) {
    std::vector<fsdp::Param> params = {fsdp::Param("qkv", {6, 2}), fsdp::Param("bias", {6}),
                                       fsdp::Param("stack", {3, 3, 5})};
    params[0].with_matrices({4, 1, 1});
    params[2].with_matrices();
    group = model.create_group("net", params);
    if (options.optimizer == FSDP_OPTIMIZER_CALLER) model.add_optimizer_state("momentum", fsdp::DType::float32);
    model.seal();
    model.publish_weights();
  }
  static std::vector<float> grad_of(std::size_t param) { return ramp(sizes[param]); }
  // The mean of all ranks is grad_of().
  void finish_grads() {
    for (std::size_t p = 0; p < 3; ++p) group.put_grad(p, grad_of(p));
    group.reduce_grad(FSDP_LAST);
    model.finish_grads();
  }
  static constexpr std::size_t sizes[] = {12, 6, 45};

  fsdp::Model model;
  fsdp::Group group;
};
constexpr std::size_t Net::sizes[];

/** Of a matrix of `rows` rows, the last row comes first, and numbers are multiplied. */
template <typename T>
void change(fsdp::span<T> matrix, std::size_t rows, float factor) {
  const std::size_t columns = matrix.size() / rows;
  const std::vector<T> before(matrix.begin(), matrix.end());
  for (std::size_t i = 0; i < matrix.size(); ++i)
    matrix[i] = factor * before[(rows - 1 - i / columns) * columns + i % columns];
}
void change_all(const fsdp::Matrix &matrices) {
  for (std::uint64_t m = 0; m < matrices.count(); ++m)
    change(matrices.as<float>(m), static_cast<std::size_t>(matrices.rows()),
           static_cast<float>(1 + matrices.split_index() + 2 * (matrices.batch_index() + m)));
}
/** What change_all() makes of all matrices. */
std::vector<float> changed(std::size_t param) {
  std::vector<float> all = Net::grad_of(param);
  const std::vector<std::size_t> rows = param == 0 ? std::vector<std::size_t>{4, 1, 1} : std::vector<std::size_t>{3};
  const std::size_t columns = param == 0 ? 2 : 5, batches = param == 0 ? 1 : 3;
  float *at = all.data();
  for (std::size_t batch = 0; batch < batches; ++batch)
    for (std::size_t split = 0; split < rows.size(); at += columns * rows[split++])
      change(fsdp::span<float>(at, columns * rows[split]), rows[split], static_cast<float>(1 + split + 2 * batch));
  return all;
}

TEST(Matrices, AreWholeOnOneRankAndTheirRowsComeBack) {
  for (const std::uint32_t ranks : {1u, 2u, 3u}) {
    std::atomic<std::uint64_t> elements{0};
    run_ranks(ranks, [&](fsdp::Context &context) {
      Net net(context);
      net.finish_grads();
      fsdp::for_each_matrix(net.model, [&](const fsdp::Matrix &matrix) {
        EXPECT_EQ(matrix.dtype(), fsdp::DType::float32);
        const std::vector<float> whole = Net::grad_of(matrix.name() == "qkv" ? 0 : 2);
        const std::uint64_t first = (matrix.batch_index() * 3 + matrix.row_offset()) * matrix.columns();
        EXPECT_EQ(matrix.as<float>()[0], whole[static_cast<std::size_t>(first)]);
        elements += matrix.count() * matrix.rows() * matrix.columns();
        change_all(matrix);
      });
      EXPECT_EQ(net.group.read_grad<float>("qkv"), changed(0));
      EXPECT_EQ(net.group.read_grad<float>("bias"), Net::grad_of(1));
      EXPECT_EQ(net.group.read_grad<float>("stack"), changed(2));
      net.model.step_adamw(0.1);
      context.close();
    });
    EXPECT_EQ(elements, 12u + 45) << ranks << " ranks";
  }
}

TEST(Matrices, GoFromOneStateToAnother) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::ModelOptions model_options;
    model_options.optimizer = FSDP_OPTIMIZER_CALLER;
    Net net(context, model_options);
    net.finish_grads();
    fsdp::MatrixOptions options;
    options.target = "momentum";
    options.dtype = FSDP_BFLOAT16;
    fsdp::Matrices matrices = net.model.collect_matrices(options);
    while (const std::optional<fsdp::Matrix> matrix = matrices.next()) {
      EXPECT_EQ(matrix->dtype(), fsdp::DType::bfloat16);
      EXPECT_EQ(matrix->as<fsdp::bfloat16>().size(), matrix->rows() * matrix->columns());
      EXPECT_EQ(status_of([&] { matrix->as<float>(); }), fsdp::Status::invalid_argument);
      EXPECT_EQ(status_of([&] { matrix->as<fsdp::bfloat16>(matrix->count()); }), fsdp::Status::invalid_argument);
    }
    matrices.give_back();
    EXPECT_EQ(net.group.read_state<float>("stack", "momentum"), Net::grad_of(2));  // exact in bf16
    EXPECT_EQ(net.group.read_state<float>("bias", "momentum"), std::vector<float>(6));
    options = {};
    options.source = "momentum";
    options.target = "main_weight";
    fsdp::for_each_matrix(net.model, options, nullptr, change_all);
    EXPECT_EQ(net.group.read_param<float>("qkv"), changed(0));
    net.model.publish_weights();
    context.close();
  });
}

TEST(Matrices, OfAnExceptionAreDiscarded) {
  run_ranks(2, [](fsdp::Context &context) {
    Net net(context);
    net.finish_grads();
    EXPECT_THROW(
        fsdp::for_each_matrix(net.model, [](const fsdp::Matrix &) { throw std::runtime_error("the math has failed"); }),
        std::runtime_error);
    EXPECT_EQ(status_of([&] { net.model.step_adamw(0.1); }), fsdp::Status::invalid_state);
    EXPECT_NE(fsdp::get_last_message().find("fsdp_return_matrices"), std::string::npos);
    net.model.discard_step();
    net.finish_grads();
    fsdp::for_each_matrix(net.model, change_all);
    EXPECT_EQ(net.group.read_grad<float>("stack"), changed(2));
    net.model.step_adamw(0.1);
    context.close();
  });
}

TEST(Matrices, HaveAPlanAndMemory) {
  run_ranks(2, [](fsdp::Context &context) {
    fsdp::ModelOptions options;
    Net large(context, options);
    EXPECT_NE(large.model.matrix_plan().find(R"("name": "stack", "batch": 2)"), std::string::npos);
    options.matrix_bytes = 256;  // one matrix, with its padding
    Net small(context, options);
    EXPECT_GT(small.model.role_bytes(fsdp::Role::matrix, 0), 0u);
    EXPECT_NE(small.model.matrix_plan().find(R"("matrix_bytes": 256,)"), std::string::npos);
    EXPECT_EQ(large.model.matrix_plan().find(R"("matrix_bytes": 256,)"), std::string::npos);
    context.close();
  });
}

TEST(Matrices, OfSplitsThatDoNotAddUpAreRefused) {
  run_ranks(1, [](fsdp::Context &context) {
    fsdp::Model model(context);
    fsdp::Param param("w", {6, 2});
    param.with_matrices({4, 1});
    EXPECT_EQ(status_of([&] { model.create_group("g", {param}); }), fsdp::Status::invalid_argument);
    EXPECT_NE(fsdp::get_last_message().find("add up to 5 rows"), std::string::npos);
  });
}

}  // namespace
