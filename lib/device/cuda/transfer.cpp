// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/transfer.h"

#include <algorithm>

#include "base/dtype.h"
#include "device/host/kernels.h"

namespace fsdp::device::cuda {
namespace {

constexpr uint64_t half_bytes = uint64_t{2} << 20;

// Calls work(piece, first, count) for pieces that fit into one half of the buffer.
template <class Work>
void for_each_piece(uint64_t count, fsdp_dtype dtype, const Work &work) {
  const uint64_t most = half_bytes / dtype_size(dtype);
  for (uint64_t first = 0, piece = 0; first < count; first += most, ++piece)
    work(piece, first, std::min(most, count - first));
}

}  // namespace

Transfer::Transfer(Core &core, CallerStreams &callers)
    : core_(core),
      callers_(callers),
      bounce_(core, 2 * half_bytes, "transfers of parameters"),
      before_(core),
      stream_(core, "transfer") {
  for (size_t i = 0; i < halves_.size(); ++i)
    halves_[i] = {bounce_.data() + i * half_bytes, std::make_unique<CudaEvent>(core)};
}

Transfer::TypedCopy Transfer::TypedCopy::part(uint64_t first, uint64_t elements) const {
  return {to + first * dtype_size(to_dtype), to_dtype, from + first * dtype_size(from_dtype), from_dtype, elements};
}

// Managed memory can be reached by both sides, and counts as the GPU's.
bool Transfer::on_gpu(const void *data, const char *what) const {
  const ObjectScope scope(core_);
  cudaPointerAttributes attributes{};
  core_.check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes", what);
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != core_.index)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is memory of GPU {}, and the context is on GPU {}", what, data,
         attributes.device, core_.index);
  return attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
}

void Transfer::operator()(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (count == 0) return;
  const DeviceScope scope(core_);
  callers_.at(nullptr).record(before_);
  await(before_);  // throws INVALID_STATE in a capture
  try {
    move({static_cast<std::byte *>(to), to_dtype, static_cast<const std::byte *>(from), from_dtype, count});
  } catch (...) {
    for (const StagingHalf &half : halves_)
      await_last(*half.copied, core_);  // no copy may still be running when the call returns
    throw;
  }
}

void Transfer::move(const TypedCopy &cast) {
  const bool to_is = on_gpu(cast.to, "where a transfer goes"),
             from_is = on_gpu(cast.from, "where a transfer comes from");
  if (!to_is && !from_is) return device::kernels::cast(cast.to, cast.to_dtype, cast.from, cast.from_dtype, cast.count);
  if (to_is && !from_is) return to_gpu(cast);
  if (!to_is) return from_gpu(cast);
  stream_.cast(cast.to, cast.to_dtype, cast.from, cast.from_dtype, cast.count);
  stream_.record(*halves_[0].copied);
  await(*halves_[0].copied);
}

void Transfer::clear(std::byte *data, uint64_t bytes) {
  if (bytes == 0) return;
  stream_.fill(data, 0, bytes);
  stream_.record(*halves_[0].copied);
  await(*halves_[0].copied);
}

void Transfer::to_gpu(const TypedCopy &cast) {
  for_each_piece(cast.count, cast.to_dtype, [&](uint64_t number, uint64_t first, uint64_t elements) {
    const TypedCopy part = cast.part(first, elements);
    const StagingHalf &half = halves_[number % 2];
    await(*half.copied);
    device::kernels::cast(half.data, part.to_dtype, part.from, part.from_dtype, elements);
    stream_.copy(part.to, half.data, elements * dtype_size(part.to_dtype));
    stream_.record(*half.copied);
  });
  for (const StagingHalf &half : halves_) await(*half.copied);
}

// The next piece is copied while one piece is cast.
void Transfer::from_gpu(const TypedCopy &cast) {
  TypedCopy arriving{};
  const auto unpack = [&](const StagingHalf &half) {
    await(*half.copied);
    device::kernels::cast(arriving.to, arriving.to_dtype, half.data, arriving.from_dtype, arriving.count);
  };
  uint64_t pieces = 0;
  for_each_piece(cast.count, cast.from_dtype, [&](uint64_t number, uint64_t first, uint64_t elements) {
    const TypedCopy part = cast.part(first, elements);
    const StagingHalf &half = halves_[number % 2];
    stream_.copy(half.data, part.from, elements * dtype_size(part.from_dtype));
    stream_.record(*half.copied);
    if (number > 0) unpack(halves_[(number - 1) % 2]);
    arriving = part;
    pieces = number + 1;
  });
  unpack(halves_[(pieces - 1) % 2]);
}

}  // namespace fsdp::device::cuda
