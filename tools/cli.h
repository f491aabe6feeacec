// SPDX-License-Identifier: Apache-2.0
// What the tools' command lines have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace tools {

// The options and commands that are known, for the error about an unknown one.
inline std::string known_words(const CLI::App &app) {
  const CLI::App *command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  std::string words;
  for (const CLI::App *one : command->get_subcommands([](const CLI::App *) { return true; }))
    words += " " + one->get_name();
  for (const CLI::Option *option : command->get_options())
    if (!option->get_positional()) words += " " + option->get_name();
  return words;
}

// Parses, or returns the status to exit with: 0 after --help, 2 after a usage error that was explained.
inline std::optional<int> parse_command_line(CLI::App &app, int argc, char **argv) {
  app.failure_message([](const CLI::App *failed, const CLI::Error &error) {
    const auto &name = failed->get_name();
    const int code = error.get_exit_code();
    const bool unknown = code == static_cast<int>(CLI::ExitCodes::ExtrasError) ||
                         (code == static_cast<int>(CLI::ExitCodes::RequiredError) && failed->get_subcommands().empty());
    return name + ": " + error.what() + "\n" + (unknown ? name + ": known are" + known_words(*failed) + "\n" : "") +
           name + ": try " + name + " --help\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError &error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace tools
