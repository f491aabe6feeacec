// SPDX-License-Identifier: Apache-2.0
// The memory that calls get: structs with readable bytes behind them, and outputs. Afterwards each byte of an output
// that the call may not write is checked.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "rank.h"

namespace fuzz {

template <class T>
concept Grows = requires(T value) {
  value.struct_size;
};

// An options struct with the given fields, and the bytes behind it up to the largest struct_size that a call looks
// into.
template <class T>
class Input {
 public:
  Input(Rank &rank, const T &value) : bytes_(8192), null_(rank.random.one_in(8)) {
    auto *const first = reinterpret_cast<T *>(bytes_.data());
    *first = value;
    if constexpr (Grows<T>) first->struct_size = rank.number(sizeof(T));
    if (rank.wild()) bytes_[sizeof(T) + rank.random.below(256)] = 1;
  }
  const T *pointer() const { return null_ ? nullptr : reinterpret_cast<const T *>(bytes_.data()); }

 private:
  std::vector<unsigned char> bytes_;
  bool null_;
};

template <class T>
class Output {
 public:
  explicit Output(Rank &rank) : null_(rank.wild()) {
    std::memset(bytes_, 0xA5, sizeof bytes_);
    if constexpr (Grows<T>) value().struct_size = room_ = rank.number(sizeof(T));
    std::memcpy(before_, bytes_, sizeof bytes_);
  }
  T *pointer() { return null_ ? nullptr : &value(); }
  T &value() { return *reinterpret_cast<T *>(bytes_); }
  fsdp_status operator()(fsdp_status status) const {
    const uint64_t may_write = status == FSDP_OK && !null_ ? std::min<uint64_t>(room_, sizeof(T)) : 0;
    require(!std::memcmp(bytes_ + may_write, before_ + may_write, sizeof bytes_ - may_write),
            status == FSDP_OK ? "bytes behind an output were written" : "an output of a call that failed was written");
    return status;
  }
  bool whole() const { return !null_ && room_ >= sizeof(T); }

 private:
  alignas(16) unsigned char bytes_[sizeof(T) + 64], before_[sizeof(T) + 64];
  uint64_t room_ = sizeof(T);
  bool null_;
};

// Calls must refuse every other stride, whatever the array's count.
template <class T>
bool is_stride(uint64_t stride, uint64_t first_size = sizeof(T)) {
  return stride >= first_size && stride <= 4096 && stride % alignof(T) == 0;
}

// Views of all parameters of a group, one every `stride` bytes.
class Tensors {
 public:
  explicit Tensors(Rank &rank)
      : count_(rank.number(rank.param_count())),
        stride_(rank.number(sizeof(fsdp_tensor) + (rank.random.one_in(4) ? 8 * rank.random.below(8) : 0))),
        null_(rank.wild()) {
    std::fill(std::begin(bytes_), std::end(bytes_), static_cast<unsigned char>(0xA5));
  }
  fsdp_tensor *pointer() { return null_ ? nullptr : reinterpret_cast<fsdp_tensor *>(bytes_); }
  uint64_t count() const { return count_; }
  uint64_t stride() const { return stride_; }
  fsdp_tensor at(uint64_t i) const {
    fsdp_tensor tensor;
    std::memcpy(&tensor, bytes_ + i * stride_, sizeof tensor);
    return tensor;
  }

  fsdp_status operator()(fsdp_status status) const {
    const uint64_t written = status == FSDP_OK ? count_ : 0;
    require(status != FSDP_OK || (is_stride<fsdp_tensor>(stride_) && count_ <= most),
            "a stride or count that cannot be was taken");
    for (uint64_t i = 0; i < written; ++i)
      require(at(i).struct_size == sizeof(fsdp_tensor), "an element without its struct_size");
    for (uint64_t byte = 0; byte < sizeof bytes_; ++byte) {
      const bool may_write = written && byte / stride_ < written && byte % stride_ < sizeof(fsdp_tensor);
      require(may_write || bytes_[byte] == 0xA5, "bytes of an array of outputs were written that may not be");
    }
    return status;
  }

 private:
  static constexpr uint64_t most = 4;
  alignas(16) unsigned char bytes_[most * 4096 + 64];
  uint64_t count_, stride_;
  bool null_;
};

// A call that makes a handle.
template <class Handle, class Call>
fsdp_status make(Rank &rank, Kind kind, Call &&make_it, Handle **made = nullptr) {
  auto *out = reinterpret_cast<Handle *>(uintptr_t{0xA5A5A5A5});
  const bool null = rank.wild();
  const fsdp_status status = make_it(null ? nullptr : &out);
  require(!null || status != FSDP_OK, "no error without a place for the handle");
  if (null) return status;
  require((status == FSDP_OK) == (out != nullptr), "a handle, though the call failed, or none, though it did not");
  if (status == FSDP_OK) rank.add(kind, out);
  if (made) *made = out;
  return status;
}

// A text into a buffer, with its size.
template <class Call>
fsdp_status describe(Rank &rank, Call &&call_it) {
  uint64_t size = rank.random.one_in(2) ? rank.random.below(64) : buffer_bytes;
  char *const buffer = rank.random.one_in(3) ? nullptr : reinterpret_cast<char *>(rank.buffer);
  const fsdp_status status = call_it(buffer, rank.or_null(&size));
  if (status == FSDP_OK && buffer) require(std::memchr(buffer, 0, buffer_bytes), "a text without an end");
  return status;
}

// Reads memory that the library has returned, so that the sanitizer checks it.
inline void read_all(const void *data, uint64_t size) {
  const auto *bytes = static_cast<const volatile unsigned char *>(data);
  for (uint64_t i = 0; data && i < size; i += 16) static_cast<void>(bytes[i]);
  if (data && size) static_cast<void>(bytes[size - 1]);
}

}  // namespace fuzz
