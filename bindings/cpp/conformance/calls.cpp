// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "rank.h"

std::uint32_t crc32_of(std::uint32_t before, const void *data, std::size_t size_bytes) {
  std::uint32_t crc = ~before;
  for (std::size_t i = 0; i < size_bytes; ++i) {
    crc ^= static_cast<const unsigned char *>(data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

std::string hex(std::uint64_t value, int digits) {
  char text[20];
  std::snprintf(text, sizeof text, "%0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}

namespace {

std::string hex_of_double(double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return hex(bits, 16);
}
template <typename T>
std::string crc_of(const std::vector<T> &values) {
  return hex(crc32_of(0, values.data(), values.size() * sizeof(T)), 8);
}

/** The bits in T of an fp32 number that is exact in T, and normal or zero. */
template <typename T>
std::uint32_t narrow(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (std::is_same<T, fsdp::bfloat16>::value) return bits >> 16;
  return (bits >> 16 & 0x8000U) | (magnitude != 0 ? (magnitude >> 13) - (112U << 10) : 0);
}

template <typename T>
std::vector<T> halves_of(const std::vector<float> &values) {
  std::vector<T> halves;
  for (const float value : values) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    halves.push_back({static_cast<std::uint16_t>(narrow<T>(bits))});
  }
  return halves;
}

template <typename T>
void write_halves(const fsdp::Grad &grad, const std::vector<float> &values) {
  const std::vector<T> halves = halves_of<T>(values);
  std::copy(halves.begin(), halves.end(), grad.as<T>().begin());
}

/** Integers with commas between them. */
std::vector<std::uint64_t> splits_of(const Line &line) {
  std::vector<std::uint64_t> splits;
  if (!line.has("splits")) return splits;
  std::istringstream text(line.keys.at("splits"));
  for (std::string rows; std::getline(text, rows, ',');) splits.push_back(std::stoull(rows));
  return splits;
}

fsdp::MatrixOptions matrix_options(const Line &line) {
  fsdp::MatrixOptions options;
  if (line.has("source")) options.source = line.keys.at("source").c_str();
  if (line.has("target")) options.target = line.keys.at("target").c_str();
  options.dtype = static_cast<fsdp_dtype>(line.key_or("dtype", 0));
  return options;
}

void scale(float &number, float factor) { number *= factor; }
/** By a power of two, so that the number stays exact. */
void scale(fsdp::bfloat16 &number, float factor) {
  std::uint32_t bits = static_cast<std::uint32_t>(number.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  value *= factor;
  std::memcpy(&bits, &value, sizeof bits);
  number.bits = static_cast<std::uint16_t>(bits >> 16);
}

template <typename T>
void change_matrix(const fsdp::Matrix &matrices, std::uint64_t number) {
  const fsdp::span<T> matrix = matrices.as<T>(number);
  const std::vector<T> before(matrix.begin(), matrix.end());
  const auto rows = static_cast<std::size_t>(matrices.rows()), columns = static_cast<std::size_t>(matrices.columns());
  const std::uint64_t exponent = matrices.raw().param_index + 2 * matrices.split_index() + matrices.batch_index();
  for (std::size_t i = 0; i < matrix.size(); ++i) {
    matrix[i] = before[(rows - 1 - i / columns) * columns + i % columns];
    scale(matrix[i], static_cast<float>(1 << (exponent + number) % 4));
  }
}

fsdp::AdamwOptions adamw_options(const Line &line) {
  fsdp::AdamwOptions options;
  options.beta1 = line.key_number("beta1");
  options.beta2 = line.key_number("beta2");
  options.epsilon = line.key_number("epsilon");
  options.weight_decay = line.key_number("weight_decay");
  options.step = static_cast<std::uint64_t>(line.key_or("step", 0));
  options.flags = static_cast<std::uint32_t>(line.key_or("flags", 0));
  return options;
}

}  // namespace

std::uint64_t Rank::element_count(const NamedGroup &group, std::uint64_t index) const {
  if (index >= group.params.size()) return 1;
  std::uint64_t count = 1;
  for (const std::uint64_t size : group.params[static_cast<std::size_t>(index)].own_shape) count *= size;
  return count;
}

double Rank::value_at(const Line &line, std::size_t first, std::int64_t shift, std::uint64_t i) const {
  const std::int64_t a = line.integer(first), b = line.integer(first + 1) + shift, c = line.integer(first + 2);
  const std::int64_t m = line.integer(first + 3), k = line.integer(first + 4);
  const std::int64_t numerator = (a * static_cast<std::int64_t>(i) + b + c * rank) % m - m / 2;
  return static_cast<double>(numerator) / static_cast<double>(std::int64_t{1} << k);
}

std::vector<float> Rank::make_array(const Line &line, std::size_t first, std::int64_t shift,
                                    std::uint64_t count) const {
  std::vector<float> values;
  for (std::uint64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(value_at(line, first, shift, i)));
  return values;
}

// ---- declaring ---------------------------------------------------------------------------------------------------

void Rank::create_model(const Line &line) {
  fsdp::ModelOptions options;
  if (line.has("mesh")) options.mesh = meshes_.at(line.keys.at("mesh")).get();
  const auto set = [&](auto &field, const char *name) {
    field = static_cast<std::remove_reference_t<decltype(field)>>(line.key_or(name, 0));
  };
  set(options.flags, "flags");
  set(options.strategy, "strategy");
  set(options.outer_strategy, "outer_strategy");
  set(options.unshard_mode, "unshard_mode");
  set(options.view_kind, "view_kind");
  set(options.grad_dtype, "grad_dtype");
  set(options.reduce_dtype, "reduce_dtype");
  set(options.grad_op, "grad_op");
  set(options.reduce_policy, "reduce_policy");
  set(options.optimizer, "optimizer");
  set(options.max_pending_groups, "max_pending_groups");
  set(options.max_pending_bytes, "max_pending_bytes");
  set(options.prefetch_depth, "prefetch_depth");
  set(options.main_storage, "main_storage");
  set(options.rounding_seed, "rounding_seed");
  set(options.matrix_bytes, "matrix_bytes");
  options.grad_factor = line.key_number("grad_factor");
  models_.insert_or_assign(line.word(1), fsdp::Model(context, options));
}

void Rank::create_group(const Line &line) {
  fsdp::GroupOptions options;
  options.flags = static_cast<std::uint32_t>(line.key_or("flags", 0));
  options.strategy = static_cast<fsdp_strategy>(line.key_or("strategy", 0));
  options.grad_dtype = static_cast<fsdp_dtype>(line.key_or("grad_dtype", 0));
  options.reduce_dtype = static_cast<fsdp_dtype>(line.key_or("reduce_dtype", 0));
  options.main_storage = static_cast<fsdp_main_storage>(line.key_or("main_storage", 0));
  options.backward_weights = static_cast<fsdp_backward_weights>(line.key_or("backward_weights", 0));
  if (line.has("mesh")) options.mesh = meshes_.at(line.keys.at("mesh")).get();
  options.grad_op = static_cast<fsdp_grad_op>(line.key_or("grad_op", 0));
  options.outer_strategy = static_cast<fsdp_outer_strategy>(line.key_or("outer_strategy", 0));
  options.grad_factor = line.key_number("grad_factor");
  const std::vector<fsdp::Param> params = std::move(declared_);
  declared_.clear();
  const bool is_new = groups_.count(line.word(2)) == 0;
  if (is_new) groups_[line.word(2)].params = params;
  groups_[line.word(2)] = {model(line).create_group(line.word(2), params, options), params};
  group_order_.push_back(line.word(2));
}

void Rank::visit(const Line &line) {
  const std::uint32_t group = groups_.at(line.word(1)).group.info().group_index;
  const auto phase = static_cast<fsdp::Phase>(line.integer(2));
  if (line.has("piece"))
    visits_.emplace_back(group, phase, static_cast<std::uint32_t>(line.key_or("piece", 0)));
  else
    visits_.emplace_back(group, phase);
}

std::string Rank::declare(const Line &line) {
  const std::string call = line.word(0);
  if (call == "param") {
    std::vector<std::uint64_t> shape;
    for (std::size_t i = 2; i < line.words.size(); ++i) shape.push_back(static_cast<std::uint64_t>(line.integer(i)));
    fsdp::Param param(line.word(1), shape, static_cast<fsdp::DType>(line.key_or("dtype", 0)),
                      static_cast<std::uint32_t>(line.key_or("flags", 0)));
    param.lr_scale = line.key_number("lr_scale");
    param.quantization = static_cast<fsdp_quantization>(line.key_or("quantization", 0));
    param.missing_grad = static_cast<fsdp_missing_grad>(line.key_or("missing_grad", 0));
    param.updated_by(static_cast<fsdp::Optimizer>(line.key_or("optimizer", 0)));
    if (line.has("matrix")) param.with_matrices(splits_of(line));
    param.rows_in(static_cast<std::uint32_t>(line.key_or("row_dimensions", 0)));
    declared_.push_back(param.in_piece(static_cast<std::uint32_t>(line.key_or("piece", 0))));
  } else if (call == "visit") {
    visit(line);
  } else if (call == "create_mesh") {
    fsdp::MeshOptions options;
    options.replicate_size = static_cast<std::uint32_t>(line.key_or("replicate_size", 0));
    options.shard_size = static_cast<std::uint32_t>(line.key_or("shard_size", 0));
    std::vector<std::uint32_t> ranks;
    for (std::size_t i = 2; i < line.words.size(); ++i) ranks.push_back(static_cast<std::uint32_t>(line.integer(i)));
    if (!ranks.empty()) options.ranks = ranks.data();
    options.rank_count = static_cast<std::uint32_t>(ranks.size());
    meshes_.insert_or_assign(line.word(1), fsdp::Mesh(context, options));
  } else if (call == "create_model") {
    create_model(line);
  } else if (call == "create_group") {
    create_group(line);
  } else if (call == "set_schedule") {
    model(line).set_schedule(static_cast<fsdp::ScheduleKind>(line.integer(2)), std::exchange(visits_, {}),
                             static_cast<std::uint32_t>(line.key_or("held_groups", 0)));
  } else if (call == "seal_model") {
    model(line).seal();
  } else if (call == "find_group") {
    model(line).group(line.word(2));
  } else if (call == "destroy_model") {
    const fsdp::Model ended = std::move(model(line));  // what is left under the name is a handle that names nothing
  } else if (call == "destroy_mesh") {
    meshes_.erase(line.word(1));
  } else if (call == "close_context") {
    context.close();
  } else if (call == "abort_context") {
    context.abort("conformance");
  } else {
    return "";
  }
  return "-";
}

// ---- values ------------------------------------------------------------------------------------------------------

/** Loads by the C handle where the types of fsdp.hpp do not allow such a call. */
void Rank::load_param(const Line &line) {
  NamedGroup &to = group(line);
  const auto index = static_cast<std::uint64_t>(line.integer(2));
  const std::vector<float> values = make_array(line, 3, 0, element_count(to, index));
  if (!line.has("dtype") && !line.has("element_count") && !line.has("flags"))
    return to.group.load_param(index, values, static_cast<int>(line.key_or("root", FSDP_EVERY_RANK)));
  fsdp::detail::check(fsdp_load_param(
      to.group.get(), index, values.data(), static_cast<fsdp_dtype>(line.key_or("dtype", FSDP_FLOAT32)),
      static_cast<std::uint64_t>(line.key_or("element_count", static_cast<std::int64_t>(values.size()))),
      static_cast<std::int32_t>(line.key_or("root", FSDP_EVERY_RANK)),
      static_cast<std::uint32_t>(line.key_or("flags", 0))));
}

std::string Rank::move_values(const Line &line) {
  const std::string call = line.word(0);
  const auto index = static_cast<std::uint64_t>(line.integer(2));
  if (call == "load_param") {
    load_param(line);
  } else if (call == "read_param") {
    const std::int64_t dtype = line.key_or("dtype", FSDP_FLOAT32);
    if (dtype == FSDP_BFLOAT16) return crc_of(group(line).group.read_param<fsdp::bfloat16>(index));
    if (dtype == FSDP_FLOAT16) return crc_of(group(line).group.read_param<fsdp::float16>(index));
    return crc_of(group(line).group.read_param<float>(index));
  } else if (call == "load_state") {
    group(line).group.load_state(index, line.word(3), make_array(line, 4, 0, element_count(group(line), index)));
  } else if (call == "read_state") {
    return crc_of(group(line).group.read_state<float>(index, line.word(3)));
  } else if (call == "load_grad") {
    group(line).group.load_grad(index, make_array(line, 3, 0, element_count(group(line), index)),
                                static_cast<int>(line.key_or("root", FSDP_EVERY_RANK)));
  } else if (call == "read_grad") {
    const std::int64_t dtype = line.key_or("dtype", FSDP_FLOAT32);
    if (dtype == FSDP_BFLOAT16) return crc_of(group(line).group.read_grad<fsdp::bfloat16>(index));
    return crc_of(group(line).group.read_grad<float>(index));
  } else if (call == "set_param_lr_scale") {
    group(line).group.set_param_lr_scale(index, line.number(3));
  } else if (call == "set_param_trainable") {
    group(line).group.set_param_trainable(index, line.integer(3) != 0);
  } else {
    return "";
  }
  return "-";
}

// ---- weights and gradients ---------------------------------------------------------------------------------------

std::string Rank::plane(const Line &line) {
  const fsdp::Group &of = group(line).group;
  const auto index = static_cast<std::uint64_t>(line.integer(2));
  const auto phase = static_cast<fsdp::Phase>(line.integer(3));
  const auto plane = static_cast<fsdp::Plane>(line.integer(4));
  if (line.word(0) == "get_plane") {
    const fsdp::Tensor view = of.get_plane(index, phase, plane);
    return hex(crc32_of(0, view.data(), static_cast<std::size_t>(view.element_count() * view.raw().element_size)), 8);
  }
  std::vector<std::uint8_t> bytes(of.swizzle_scales(index, phase, plane));
  of.swizzle_scales(index, phase, plane, bytes.data(), bytes.size());
  return hex(crc32_of(0, bytes.data(), bytes.size()), 8);
}

void Rank::unshard(const Line &line) {
  const auto phase = static_cast<fsdp::Phase>(line.integer(2));
  const std::int64_t piece = line.key_or("piece", -1);
  fsdp::Group &of = group(line).group;
  holds_[{line.word(1), line.integer(2), piece}].push_back(
      piece < 0 ? of.unshard(phase) : of.unshard_piece(static_cast<std::uint32_t>(piece), phase));
}

void Rank::reshard(const Line &line) {
  const std::int64_t piece = line.key_or("piece", -1);
  std::vector<fsdp::Weights> &holds = holds_[{line.word(1), line.integer(2), piece}];
  if (!holds.empty()) {
    fsdp::Weights last = std::move(holds.back());
    holds.pop_back();
    return last.reshard();
  }
  // A hold that does not exist.
  fsdp_group *const of = group(line).group.get();
  const auto phase = static_cast<fsdp_phase>(line.integer(2));
  fsdp::detail::check(piece < 0 ? fsdp_reshard(of, phase, 0, nullptr)
                                : fsdp_reshard_piece(of, static_cast<std::uint32_t>(piece), phase, 0, nullptr));
}

namespace {

std::uint32_t add_view(std::uint32_t crc, const fsdp::Tensor &view) {
  return crc32_of(crc, view.data(), static_cast<std::size_t>(view.element_count() * view.raw().element_size));
}

}  // namespace

std::string Rank::get_param(const Line &line) {
  const auto index = static_cast<std::size_t>(line.integer(2));
  const auto &held = holds_[{line.word(1), line.integer(3), group(line).params.at(index).piece}];
  if (!held.empty()) return hex(add_view(0, held.back()[index]), 8);
  return hex(add_view(0, group(line).group.get_param(index, static_cast<fsdp::Phase>(line.integer(3)))), 8);
}

std::string Rank::get_params(const Line &line) {
  const auto &held = holds_[{line.word(1), line.integer(2), -1}];
  const auto phase = static_cast<fsdp::Phase>(line.integer(2));
  std::uint32_t crc = 0;
  for (std::size_t p = 0; p < group(line).params.size(); ++p)
    crc = add_view(crc, held.empty() ? group(line).group.get_param(p, phase) : held.back()[p]);
  return hex(crc, 8);
}

std::string Rank::gather(const Line &line) {
  const std::string call = line.word(0);
  if (call == "get_plane" || call == "swizzle_scales") return plane(line);
  if (call == "get_param") return get_param(line);
  if (call == "get_params") return get_params(line);
  if (call == "restore_view")
    group(line).group.restore_view();
  else if (call == "unshard")
    unshard(line);
  else if (call == "reshard")
    reshard(line);
  else if (call == "prefetch")
    group(line).group.prefetch(static_cast<fsdp::Phase>(line.integer(2)));
  else
    return "";
  return "-";
}

void Rank::acquire_grad(const Line &line) {
  const fsdp::Grad grad = group(line).group.acquire_grad(line.integer(2));
  const std::vector<float> values = make_array(line, 3, 0, grad.tensor.element_count());
  if (grad.tensor.dtype() == fsdp::DType::bfloat16) return write_halves<fsdp::bfloat16>(grad, values);
  if (grad.tensor.dtype() == fsdp::DType::float16) return write_halves<fsdp::float16>(grad, values);
  const fsdp::span<float> to = grad;
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = grad.accumulate ? to[i] + values[i] : values[i];
}

void Rank::put_grad(const Line &line) {
  NamedGroup &to = group(line);
  const auto index = static_cast<std::uint64_t>(line.integer(2));
  if (line.word(3) == "none") return to.group.put_no_grad(index);
  const std::vector<float> values = make_array(line, 3, 0, element_count(to, index));
  const std::int64_t dtype = line.key_or("dtype", FSDP_FLOAT32);
  if (dtype == FSDP_BFLOAT16) return to.group.put_grad(index, halves_of<fsdp::bfloat16>(values));
  if (dtype == FSDP_FLOAT16) return to.group.put_grad(index, halves_of<fsdp::float16>(values));
  to.group.put_grad(index, values);
}

std::string Rank::write_grads(const Line &line) {
  const std::string call = line.word(0);
  if (call == "acquire_grad") {
    acquire_grad(line);
  } else if (call == "acquire_grads") {
    const std::vector<fsdp::Grad> grads = group(line).group.acquire_grads(FSDP_GRAD_ZEROED);
    for (std::size_t p = 0; p < grads.size(); ++p) {
      if (!grads[p].tensor) continue;
      const fsdp::span<float> to = grads[p];
      const std::vector<float> values = make_array(line, 2, static_cast<std::int64_t>(p), to.size());
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += values[i];
    }
  } else if (call == "put_grad") {
    put_grad(line);
  } else if (call == "complete_grad") {
    group(line).group.complete_grad(line.integer(2));
  } else if (call == "reduce_grad") {
    group(line).group.reduce_grad(static_cast<std::uint32_t>(line.key_or("flags", 0)));
  } else {
    return "";
  }
  return "-";
}

// ---- steps -------------------------------------------------------------------------------------------------------

std::string Rank::apply_grads(const Line &line) {
  std::vector<std::vector<float>> values;
  for (const std::string &name : group_order_)
    for (std::size_t p = 0; p < groups_.at(name).params.size(); ++p)
      if (!(groups_.at(name).params[p].flags & FSDP_PARAM_FROZEN))
        values.push_back(
            make_array(line, 4, static_cast<std::int64_t>(values.size()), element_count(groups_.at(name), p)));
  const std::vector<fsdp::FullGrad> grads(values.begin(), values.end());
  return hex_of_double(model(line).apply_grads(grads, line.number(2), line.number(3), adamw_options(line)));
}

void Rank::round_stochastic(const Line &line) {
  const fsdp_group *const group = groups_.at(line.word(2)).group.get();
  for (const fsdp::Shard &shard : model(line).shards()) {
    if (shard.raw().group != group || shard.raw().param_index != static_cast<std::uint64_t>(line.integer(3))) continue;
    const std::uint64_t first = shard.raw().element_offset;
    const std::vector<float> values = make_array(line, 5, 0, first + shard.element_count());
    shard.round_stochastic({values.data() + first, static_cast<std::size_t>(shard.element_count())},
                           static_cast<std::uint64_t>(line.integer(4)));
  }
}

void Rank::change_matrices(const Line &line) {
  fsdp::for_each_matrix(model(line), matrix_options(line), nullptr, [](const fsdp::Matrix &matrix) {
    for (std::uint64_t number = 0; number < matrix.count(); ++number)
      matrix.dtype() == fsdp::DType::bfloat16 ? change_matrix<fsdp::bfloat16>(matrix, number)
                                              : change_matrix<float>(matrix, number);
  });
}

std::string Rank::end_step(const Line &line) {
  const std::string call = line.word(0);
  if (call == "finish_grads")
    model(line).finish_grads(line.number(2), nullptr, static_cast<std::uint32_t>(line.key_or("flags", 0)));
  else if (call == "step_adamw")
    model(line).step_adamw(line.number(2), adamw_options(line));
  else if (call == "round_stochastic")
    round_stochastic(line);
  else if (call == "change_matrices")
    change_matrices(line);
  else if (call == "collect_matrices")
    model(line).collect_matrices(matrix_options(line));
  else if (call == "publish_weights")
    model(line).publish_weights();
  else if (call == "begin_update")
    model(line).begin_update();
  else if (call == "check_replicas")
    model(line).check_replicas();
  else if (call == "scale_grads")
    model(line).scale_grads(line.number(2));
  else if (call == "get_grad_norm")
    return hex_of_double(model(line).get_grad_norm());
  else if (call == "get_param_grad_norms")
    return crc_of(model(line).get_param_grad_norms());
  else if (call == "get_param_weight_norms")
    return crc_of(model(line).get_param_weight_norms());
  else if (call == "count_zero_grads")
    return std::to_string(model(line).count_zero_grads());
  else if (call == "clip_grads")
    return hex_of_double(model(line).clip_grads(line.number(2)));
  else if (call == "check_grads")
    return model(line).check_grads().empty() ? "0" : "1";
  else if (call == "apply_grads")
    return apply_grads(line);
  else if (call == "discard_step") {
    model(line).discard_step();
    holds_.clear();
  } else
    return "";
  return "-";
}

// ---- the rest ----------------------------------------------------------------------------------------------------

std::string Rank::all_reduce_values(const Line &line) {
  std::vector<double> values;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(line.integer(2)); ++i)
    values.push_back(value_at(line, 3, 0, i));
  context.all_reduce_values({values.data(), values.size()}, static_cast<fsdp::ValueOp>(line.integer(1)));
  return crc_of(values);
}

std::string Rank::ask(const Line &line) {
  const std::string call = line.word(0), field = line.word(2);
  if (call == "all_reduce_values") return all_reduce_values(line);
  if (call != "get_stats" && call != "get_model_info") return "";
  std::map<std::string, std::uint64_t> fields;
  if (call == "get_stats") {
    const fsdp_stats stats = model(line).stats();
    fields = {{"version", stats.version},
              {"step", stats.step},
              {"reduces", stats.reduces},
              {"gathered_groups", stats.gathered_groups},
              {"pending_grad_groups", stats.pending_grad_groups}};
  } else {
    const fsdp_model_info info = model(line).info();
    fields = {
        {"group_count", info.group_count}, {"param_count", info.param_count}, {"element_count", info.element_count}};
  }
  return std::to_string(fields.at(field));
}

std::string Rank::use_checkpoint(const Line &line) {
  const std::string call = line.word(0), name = line.word(1), last = line.word(3);
  fsdp::LoadOptions options;
  options.flags = static_cast<std::uint32_t>(line.key_or("flags", 0));
  const auto load_path = [&] { return load_folder_ + line.word(2) + "/" + last; };
  if (call == "save")
    model(line).save(save_folder_ + line.word(2));
  else if (call == "load") {
    const fsdp::Loaded loaded = model(line).load(load_path(), options);
    return std::to_string(loaded.step) + "/" + std::to_string(loaded.loaded_tensors);
  } else if (call == "begin_checkpoint")
    checkpoints_.insert_or_assign(name, fsdp::Checkpoint::begin(context, save_folder_ + line.word(2)));
  else if (call == "open_checkpoint")
    checkpoints_.insert_or_assign(name, fsdp::Checkpoint::open(context, load_path()));
  else if (call == "destroy_checkpoint")
    checkpoints_.erase(name);
  else if (call == "add_checkpoint_model")
    checkpoints_.at(name).add_model(line.word(2), models_.at(last));
  else if (call == "load_checkpoint_model")
    return std::to_string(checkpoints_.at(name).load_model(line.word(2), models_.at(last)).step);
  else if (call == "add_checkpoint_bytes") {
    const std::vector<float> values = make_array(line, 5, 0, static_cast<std::uint64_t>(line.integer(4)));
    checkpoints_.at(name).add_bytes(line.word(2), values.data(), values.size() * sizeof(float),
                                    static_cast<fsdp::BytesOwner>(line.integer(3)));
  } else if (call == "read_checkpoint_bytes")
    return crc_of(checkpoints_.at(name).read_bytes(line.word(2)));
  else if (call == "commit_checkpoint")
    checkpoints_.at(name).commit();
  else if (call == "wait_checkpoint")
    checkpoints_.at(name).wait();
  else
    return "";
  return "-";
}

std::string Rank::execute(const Line &line) {
  for (const auto kind : {&Rank::declare, &Rank::move_values, &Rank::gather, &Rank::write_grads, &Rank::end_step,
                          &Rank::ask, &Rank::use_checkpoint}) {
    const std::string gave = (this->*kind)(line);
    if (!gave.empty()) return gave;
  }
  throw std::logic_error("unknown call: " + line.text);
}
