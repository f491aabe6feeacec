// SPDX-License-Identifier: Apache-2.0
#include "run/console.h"

#include <unistd.h>

#include <cerrno>

namespace run {
namespace {

constexpr std::string_view clear_line = "\r\x1b[K";
// A line longer than this is written in pieces, so that a program that never ends its line cannot fill the memory.
constexpr size_t longest_line = 1 << 20;
constexpr size_t buffer_limit = 1 << 16;

}  // namespace

Console::Console() : terminal_{isatty(1) == 1, isatty(2) == 1} {}

std::string &Console::buffer(int fd) {
  if (fd != buffer_fd_) flush();  // keeps the order of stdout and stderr
  buffer_fd_ = fd;
  return buffer_;
}

void Console::write_line(int fd, std::string_view text) {
  auto &bytes = buffer(fd);
  if (progress_fd_ != 0 && is_terminal(fd)) {
    bytes += clear_line;
    progress_fd_ = 0;
  }
  bytes += text;
  bytes += '\n';
  if (bytes.size() >= buffer_limit) flush();
}

void Console::show_progress(int fd, std::string_view text) {
  if (progress_fd_ == fd && progress_ == text) return;
  auto &bytes = buffer(fd);
  bytes += clear_line;
  bytes += text;
  progress_fd_ = fd;
  progress_ = text;
}

void Console::finish() {
  if (progress_fd_ != 0) buffer(progress_fd_) += '\n';
  progress_fd_ = 0;
  flush();
}

void Console::flush() {
  std::string_view bytes = buffer_;
  while (!bytes.empty()) {
    const ssize_t written = ::write(buffer_fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      closed_ = closed_ || buffer_fd_ == 1;
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  buffer_.clear();
}

void LineSplitter::feed(std::string_view bytes) {
  for (const char byte : bytes) take(byte);
  // A program that starts its updates with "\r" leaves the newest one without an end.
  if (in_progress_ && !after_return_ && !text_.empty() && shows_progress_ && console_->is_terminal(fd_))
    console_->show_progress(fd_, prefix_ + text_);
}

void LineSplitter::take(char byte) {
  if (byte == '\n') return end_line();
  if (after_return_) end_update();
  if (byte == '\r') {
    after_return_ = true;
    in_progress_ = true;
    if (!text_.empty() && shows_progress_ && console_->is_terminal(fd_)) console_->show_progress(fd_, prefix_ + text_);
    return;
  }
  text_ += byte;
  if (text_.size() >= longest_line) end_line();
}

void LineSplitter::end_line() {
  console_->write_line(fd_, prefix_ + text_);
  text_.clear();
  after_return_ = in_progress_ = false;
}

void LineSplitter::end_update() {
  if (!text_.empty() && !console_->is_terminal(fd_)) console_->write_line(fd_, prefix_ + text_);
  text_.clear();
  after_return_ = false;
}

void LineSplitter::finish() {
  if (!text_.empty()) end_line();
}

}  // namespace run
