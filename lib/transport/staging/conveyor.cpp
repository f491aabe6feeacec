// SPDX-License-Identifier: Apache-2.0
#include "transport/staging/conveyor.h"

#include "transport/call/fingerprint.h"

namespace fsdp::transport::staging {

Conveyor::Conveyor(device::Device &device, const std::string &name) : device_(device), turn_(device.create_event()) {
  for (auto *events : {&brought_, &taken_})
    for (auto &event : *events) event = device.create_event();
  for (auto &event : paces_) event = device.create_event();
  down_ = device.create_stream(name + "-down");
  up_ = device.create_stream(name + "-up");
  lane_ = device.create_host_lane(name);
}

void Conveyor::begin(device::Stream &stream) {
  stream.record(*turn_);
  down_->wait(*turn_);
}

void Conveyor::end(device::Stream &stream, device::Event &done) {
  up_->record(done);
  stream.wait(done);
}

void Conveyor::turn() {
  up_->record(*turn_);
  down_->wait(*turn_);
}

void Conveyor::pace(uint64_t chunk) {
  if (chunk % stride) return;
  const device::Event &before = *paces_[chunk / stride % 2];
  if (!before.done()) device_.synchronize(before);
}

void Conveyor::mark_taken(uint64_t chunk) {
  up_->record(*taken_[chunk % slots]);
  if (chunk % stride == stride - 1) up_->record(*paces_[chunk / stride % 2]);
}

void refuse_capture(const device::Stream &stream, const Fingerprint &call) {
  if (stream.capture_id() == 0) return;
  fail(FSDP_UNSUPPORTED,
       "{} cannot be part of a graph: these ranks exchange memory of GPUs through memory of the host (staging, UCX); "
       "use NCCL "
       "for what is captured, or leave gathers and reduces outside of the capture",
       call.name);
}

}  // namespace fsdp::transport::staging
