# SPDX-License-Identifier: Apache-2.0
# Ranks are threads: start Julia with -t 2. FSDP_RUN names the launcher, without which ranks as processes are left out.
using FSDP, Test

include("helper.jl")
include("abi.jl")
include("training.jl")
include("pieces.jl")
include("group_mesh.jl")
include("matrices.jl")
include("shard_chunks.jl")
include("lifetime.jl")
include("waiting.jl")
