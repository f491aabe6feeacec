// SPDX-License-Identifier: Apache-2.0
// fsdp-ckpt consolidate and import.
#include "checkpoint/convert/convert.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "base/failure.h"
#include "ckpt/commands.h"
#include "ckpt/progress.h"
#include "device/device.h"

namespace ckpt {
namespace {

using fsdp::checkpoint::Converted;
using fsdp::checkpoint::ElementType;
using fsdp::checkpoint::Rename;
using Json = nlohmann::ordered_json;

// Casts by the host device's own arithmetic, as a load would.
class Caster {
 public:
  fsdp::checkpoint::CastElements function() {
    return [this](void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
      device_->transfer(to, to_dtype, from, from_dtype, count);
    };
  }

 private:
  fsdp::Failure failure_;
  fsdp::Waiter waiter_{failure_, nullptr, nullptr, 60'000};
  std::unique_ptr<fsdp::device::Device> device_ = fsdp::device::create_host_device({}, waiter_, failure_);
};

const ElementType *type_named(const std::string &dtype) {
  if (dtype.empty()) return nullptr;
  return fsdp::checkpoint::find_element_type(dtype == "float32" ? "F32" : dtype == "bfloat16" ? "BF16" : "F16");
}

std::vector<Rename> renames_of(const Request &request) {
  return request.renames.empty() ? std::vector<Rename>() : fsdp::checkpoint::read_renames(request.renames);
}

int report(const Request &request, const Converted &made) {
  if (request.json) {
    const Json json = {{"path", made.path},
                       {"tensors", made.tensors},
                       {"bytes", made.bytes},
                       {"files", made.files},
                       {"copied", made.copied}};
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
    return 0;
  }
  fmt::print("{}: {} tensors, {} in {} file{}\n", made.path, made.tensors, format_bytes(made.bytes), made.files.size(),
             made.files.size() == 1 ? "" : "s");
  if (!made.copied.empty()) fmt::print("copied: {}\n", fmt::join(made.copied, ", "));
  return 0;
}

}  // namespace

int consolidate(const Request &request) {
  Caster caster;
  const Converted made = [&] {
    ProgressLine line("written");
    return fsdp::checkpoint::consolidate(
        request.source, request.target,
        {renames_of(request), type_named(request.dtype), request.max_bytes, request.copy_folder}, caster.function(),
        line.callback());
  }();
  return report(request, made);
}

int import(const Request &request) {
  Caster caster;
  const Converted made = [&] {
    ProgressLine line("written");
    return fsdp::checkpoint::import_weights(request.source, request.target, renames_of(request), request.step,
                                            caster.function(), line.callback());
  }();
  return report(request, made);
}

}  // namespace ckpt
