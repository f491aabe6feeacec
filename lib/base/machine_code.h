// SPDX-License-Identifier: Apache-2.0
// The library's machine code as memory.
#pragma once

namespace fsdp {

// Brings all of the library's machine code into the process's memory. The kernel maps a file's pages when they are
// first run: a rarely taken path, such as that of a long wait, would take its page faults in some later step. Nothing
// is done if the library is linked into a program of more than 64 MiB of code, since most of that is not the library's.
void populate_machine_code();

}  // namespace fsdp
