// SPDX-License-Identifier: Apache-2.0
// The library's machine code as memory.
#pragma once

namespace fsdp {

// Brings all of the library's machine code into the process's memory. The kernel maps a file's pages when they are
// first run: a path that is taken seldom, such as that of a wait that lasts, would meet its page fault in some later
// step. Code that is linked into a program of more than 64 MiB of code is left as it is: the rest is not the library's.
void populate_machine_code();

}  // namespace fsdp
