// SPDX-License-Identifier: Apache-2.0
// Modules of libtorch whose weights, gradients and optimizer state libfsdp shards and owns.
#ifndef SHARDED_HPP
#define SHARDED_HPP

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <fsdp.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/** A module from one tensor to the next. */
struct Part : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

/**
 * A group, and the part of the network whose parameters it has. They are views of memory whose addresses are fixed from
 * the seal on, so what autograd keeps of them in the forward pass is there again in the backward pass.
 */
class Layer {
 public:
  Layer(fsdp::Model &model, std::string name, std::shared_ptr<Part> part) : part_(std::move(part)) {
    std::vector<fsdp::Param> declared;
    for (const auto &item : part_->named_parameters()) {
      params_.push_back(item.value());
      const auto sizes = item.value().sizes();
      declared.emplace_back(name + "." + item.key(), std::vector<std::uint64_t>(sizes.begin(), sizes.end()));
    }
    group_ = model.create_group(name, declared);
  }

  /** Loads the part's values as main weights, in the update window after the seal. */
  void load() {
    for (std::size_t i = 0; i < params_.size(); ++i) group_.load_param(i, floats(params_[i].detach()));
  }

  /** Makes the parameters views of the library's memory. Call it once weights are published. */
  void attach() {
    const fsdp::Weights weights = group_.unshard(fsdp::Phase::eval);
    for (std::size_t i = 0; i < params_.size(); ++i) {
      params_[i].set_data(torch::from_blob(weights[i].data(), params_[i].sizes()));
      torch::autograd::impl::set_post_acc_grad_hooks(params_[i], std::make_unique<Hook>(*this, i));
    }
  }

  torch::Tensor forward(const torch::Tensor &x) {
    const fsdp::Weights weights = group_.unshard(fsdp::Phase::forward);
    torch::Tensor y = part_->forward(x);
    // Runs when the gradient of y is known, before autograd goes into the part.
    y.register_hook([this](const torch::Tensor &) { held_.emplace(group_.unshard(fsdp::Phase::backward)); });
    return y;
  }

  const std::vector<torch::Tensor> &params() const { return params_; }
  torch::Tensor read(std::size_t index) const {
    return torch::tensor(group_.read_param<float>(index)).view(params_[index].sizes());
  }

 private:
  /** Runs when autograd has added up a parameter's gradient. */
  struct Hook : torch::autograd::PostAccumulateGradHook {
    Hook(Layer &layer, std::size_t index) : layer(layer), index(index) {}
    void operator()(const torch::Tensor &param) override { layer.give(index, param); }
    Layer &layer;
    std::size_t index;
  };

  /** libfsdp copies the gradient, so torch need not keep it. The last one completes the group. */
  void give(std::size_t index, const torch::Tensor &param) {
    group_.put_grad(index, floats(param.grad().contiguous()));
    param.mutable_grad().reset();
    if (++given_ < params_.size()) return;
    given_ = 0;
    held_.reset();
    group_.reduce_grad(FSDP_LAST);
  }

  static fsdp::span<const float> floats(const torch::Tensor &tensor) {
    return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
  }

  std::shared_ptr<Part> part_;
  std::vector<torch::Tensor> params_;
  fsdp::Group group_;
  std::optional<fsdp::Weights> held_;  // while the backward pass is in the part
  std::size_t given_ = 0;
};

/** A network of parts in a row. */
class Sharded {
 public:
  Sharded(const fsdp::Context &context, const std::vector<std::shared_ptr<Part>> &parts) : model_(context) {
    for (const auto &part : parts)
      layers_.push_back(std::make_unique<Layer>(model_, "part" + std::to_string(layers_.size()), part));
    model_.seal();
    for (const auto &layer : layers_) layer->load();
    model_.publish_weights();
    for (const auto &layer : layers_) layer->attach();
  }

  torch::Tensor forward(torch::Tensor x) {
    for (const auto &layer : layers_) x = layer->forward(x);
    return x;
  }

  /** Ends the step, after the backward pass. */
  void step_adamw(double lr, const fsdp::AdamwOptions &options) {
    model_.finish_grads();
    model_.step_adamw(lr, options);
  }

  const fsdp::Model &model() const { return model_; }
  const std::vector<std::unique_ptr<Layer>> &layers() const { return layers_; }

 private:
  fsdp::Model model_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

#endif
