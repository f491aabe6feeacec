# SPDX-License-Identifier: Apache-2.0
"""
What fsdp.h declares, by its names in C: constants, structs as isbits types and its calls, whose docstrings are the
header's. Nothing here checks a status or keeps an argument alive longer than its call.
"""
module LibFSDP

using Libdl

# The name that the library has in itself: what was opened by a path is found by it.
const libfsdp = "libfsdp.so.1"

"The library that `FSDP_LIBRARY` names, else what the dynamic linker finds."
function open_library()
    path = get(ENV, "FSDP_LIBRARY", "")
    isempty(path) || dlopen(path)
    return nothing
end

macro returns(call)
    return esc(Expr(:macrocall, Symbol("@ccall"), __source__, call))
end

# Without gc_safe, which Julia has since 1.12, the interrupted hook is where garbage can be collected.
macro waits(call)
    safe = VERSION >= v"1.12-" ? Any[:(gc_safe = true)] : Any[]
    return esc(Expr(:macrocall, Symbol("@ccall"), __source__, safe..., call))
end

include("library/types.jl")
include("library/calls.jl")

for name in names(@__MODULE__; all = true)
    startswith(lowercase(string(name)), "fsdp_") && @eval export $name
end

end
