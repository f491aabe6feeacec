// SPDX-License-Identifier: Apache-2.0
// Puts the output of many ranks on one terminal or into one file without mixing their lines.
//
// A line is written whole, behind its prefix. "\r" marks a progress line, which rewrites itself. On a terminal rank 0's
// is shown in place and cleared before any other line, and other ranks' show only their last state. In a file every
// update becomes a line.
#pragma once

#include <string>
#include <string_view>

namespace run {

// fsdp-run's own stdout and stderr. They may be the same terminal, so they share the state of the progress line.
class Console {
 public:
  Console();
  bool is_terminal(int fd) const { return terminal_[fd == 2]; }
  void write_line(int fd, std::string_view text);
  void show_progress(int fd, std::string_view text);
  // Ends a progress line that still stands, so that the shell's prompt starts on a line of its own.
  void finish();
  // Output is collected until then, so that many short lines cost one system call.
  void flush();
  // The reader of fsdp-run's output has gone.
  bool closed() const { return closed_; }

 private:
  std::string &buffer(int fd);

  bool terminal_[2];
  std::string buffer_;
  int buffer_fd_ = 1;
  std::string progress_;
  int progress_fd_ = 0;  // 0: no progress line stands
  bool closed_ = false;
};

// Cuts one stream of one rank into lines.
class LineSplitter {
 public:
  LineSplitter(Console &console, int fd, std::string prefix, bool shows_progress)
      : console_(&console), fd_(fd), prefix_(std::move(prefix)), shows_progress_(shows_progress) {}
  void feed(std::string_view bytes);
  // The stream has ended: what is left becomes a line.
  void finish();

 private:
  void take(char byte);
  void end_line();
  void end_update();

  Console *console_;
  int fd_;
  std::string prefix_;
  bool shows_progress_;        // may this stream own the terminal's progress line
  std::string text_;           // the line or update that is growing
  bool after_return_ = false;  // the last byte was "\r": text_ is complete, and is a line if "\n" follows
  bool in_progress_ = false;   // a "\r" was seen since the last "\n"
};

}  // namespace run
