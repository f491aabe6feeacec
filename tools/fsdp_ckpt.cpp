// SPDX-License-Identifier: Apache-2.0
// fsdp-ckpt: what is in a folder of checkpoints, whether it is whole, and weights from there to Hugging Face and back.
// It reads and writes with the library's own rooms below the C ABI, so that there is one parser and one writer.
#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "ckpt/commands.h"
#include "ckpt/progress.h"
#include "cli.h"
#include "fsdp.h"

namespace {

constexpr const char *footer = R"(
A file of renames is a JSON array; rows are counted as fsdp_rename counts them, and all but the names may be left out:
  [{"theirs": "model.layers.*.q.weight", "ours": "layers.*.qkv.weight", "to_row": 0},
   {"theirs": "model.layers.*.k.weight", "ours": "layers.*.qkv.weight", "to_row": 4096},
   {"theirs": "h.*.mlp.c_fc.weight", "ours": "layers.*.up.weight", "transposed": true}]
import goes from theirs to ours, consolidate back: fused tensors are split again, transposed ones turned back.

Memory: 40 MiB, 72 where tensors are transposed, and what the files' headers say.
Exit status: 0; 1 if something is damaged or went wrong; 2 for a mistyped command; 128 and the signal that ended it.

Examples:
  fsdp-ckpt ls runs/a
  fsdp-ckpt verify runs/a/step-0000001200
  fsdp-ckpt consolidate runs/a llama-new --dtype bfloat16 --renames llama.json --copy-files llama
  fsdp-ckpt import llama runs/b --renames llama.json)";

void add_common(CLI::App &command, ckpt::Request &request) {
  command.add_flag("--json", request.json, "write JSON to stdout");
}

void add_renames(CLI::App &command, ckpt::Request &request) {
  command.add_option("--renames", request.renames, "a file that says what theirs are called here (names are the same)")
      ->check(CLI::ExistingFile);
}

CLI::App *add_consolidate(CLI::App &app, ckpt::Request &request) {
  CLI::App *command = app.add_subcommand("consolidate", "Write the weights of a checkpoint as a Hugging Face folder.");
  command->add_option("CHECKPOINT", request.source, "a checkpoint, or a folder whose newest one is meant")->required();
  command->add_option("OUT", request.target, "the folder to make, which is not there yet")->required();
  command->add_option("--dtype", request.dtype, "of all weights (as they are)")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}));
  command->add_option("--max-shard-size", request.max_bytes, "bytes of tensors in a file (5GB)")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::PositiveNumber);
  add_renames(*command, request);
  command->add_option("--copy-files", request.copy_folder, "a folder whose configuration and tokenizer are copied")
      ->check(CLI::ExistingDirectory);
  return command;
}

CLI::App *add_import(CLI::App &app, ckpt::Request &request) {
  CLI::App *command =
      app.add_subcommand("import", "Write another library's weights as a checkpoint, for FSDP_LOAD_WEIGHTS_ONLY.");
  command->add_option("WEIGHTS", request.source, "a safetensors file, or a folder of them")->required();
  command->add_option("FOLDER", request.target, "the folder of checkpoints")->required();
  add_renames(*command, request);
  command->add_option("--step", request.step, "the number in the checkpoint's name (0)")
      ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 53));
  return command;
}

CLI::App *add_inspection(CLI::App &app, ckpt::Request &request, const char *name, const char *what) {
  CLI::App *command = app.add_subcommand(name, what);
  command->add_option("FOLDER", request.source, "a folder of checkpoints, or one of them")->required();
  return command;
}

}  // namespace

int main(int argc, char **argv) {
  try {
    CLI::App app{"Look at checkpoints, verify them, and bring weights to Hugging Face's form and back.", "fsdp-ckpt"};
    app.set_version_flag("--version", std::string(fsdp_get_version()));
    app.require_subcommand(1);
    app.footer(footer);
    ckpt::Request request;
    CLI::App *ls = add_inspection(app, request, "ls", "List checkpoints, and say which are whole.");
    CLI::App *verify =
        add_inspection(app, request, "verify", "Read every byte, and say which differ from what was written.");
    CLI::App *consolidate = add_consolidate(app, request);
    CLI::App *import = add_import(app, request);
    for (CLI::App *command : {ls, verify, consolidate, import}) add_common(*command, request);
    if (const auto status = tools::parse_command_line(app, argc, argv)) return *status;
    if (*ls) return ckpt::list(request);
    if (*verify) return ckpt::verify(request);
    return *consolidate ? ckpt::consolidate(request) : ckpt::import(request);
  } catch (const std::exception &error) {
    fmt::print(stderr, "fsdp-ckpt: {}\n", error.what());
    return ckpt::interrupted_by() ? 128 + ckpt::interrupted_by() : 1;
  }
}
