# SPDX-License-Identifier: Apache-2.0
# Written by bindings/julia/generate.py from bindings/abi/abi.json: do not edit.
# The calls of fsdp.h. @waits is for those that may take long.

raw"""
```text
The detail of the last failing call: with a context, of that context (whichever thread made the call); with NULL, of
the calling thread (any context, or none). status is FSDP_OK if there was none.
Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_get_last_error(context, error) =
    @returns libfsdp.fsdp_get_last_error(context::Ptr{fsdp_context}, error::Ptr{fsdp_error})::Int32

raw"""
```text
The message of the last failing call of the calling thread, on whichever context, or "". It lives until that thread's
next failing call. Threads: any. Since 0.2.
```
"""
@inline fsdp_get_last_message() =
    @returns libfsdp.fsdp_get_last_message()::Cstring

raw"""
A short English name of a status, such as "FSDP_TIMEOUT"; static, never NULL. Threads: any. Since 0.2.
"""
@inline fsdp_get_status_name(status) =
    @returns libfsdp.fsdp_get_status_name(status::Int32)::Cstring

raw"""
The library's version, "0.2.0"; static. Threads: any. Since 0.2.
"""
@inline fsdp_get_version() =
    @returns libfsdp.fsdp_get_version()::Cstring

raw"""
```text
What this build contains and what it was told, as text lines of "key: value". First come the version, the backends
and the instruction set in use; then each environment variable of the library with its value and, in parentheses,
"environment" or "default". Of FSDP_JOB_SECRET it shows only that it is set. buffer/size_bytes: see
fsdp_describe_model. Threads: any. Since 0.2.
```
"""
@inline fsdp_describe_build(buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_build(buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
Bytes of one element, 0 for an unknown dtype. Threads: any. Since 0.2.
"""
@inline fsdp_get_dtype_size(dtype) =
    @returns libfsdp.fsdp_get_dtype_size(dtype::Int32)::UInt64

raw"""
```text
Join the job. Without a world_size in the options the launcher's variables decide, the first of these that are set:
  torchrun, fsdp-run  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE; the port is
                      MASTER_PORT + 1 where TORCHELASTIC_USE_AGENT_STORE is True, since torch's store has the other
  Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
  Slurm               SLURM_PROCID and SLURM_STEP_ID, with SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID
  MPICH (Hydra)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
None of them set: a world of one. Some variables of a launcher without the others: INVALID_ARGUMENT, and the message
names what is missing. FSDP_RENDEZVOUS (as rendezvous in the options) says where to meet instead of MASTER_ADDR and
MASTER_PORT; ranks of several hosts need it under Open MPI and MPICH, which give no address. Ranks with different
FSDP_RESTART_COUNT (fsdp-run --max-restarts) do not meet. The log line at FSDP_LOG_INFO says what was used.

Ranks that the launcher says are all on one host meet on a unix socket. They must have the same user, and the same
job secret if FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE is set. The file is a regular one of 1 to 4,096 bytes, of the
user's or root's, and no other user may read it. Otherwise they meet by TCP: rank 0 listens at the rendezvous until
all have come. Both ends of a connection prove the job secret before anything else is read; without a secret only
loopback addresses are served. At most 16,384 ranks, 1,024 on one host. See docs/guides/launchers.md.
Collective: the job. Blocks: peers. Threads: any. Since 0.2.
Between hosts messages go over TCP, whose connections prove the job secret as well, or by UCX where every rank has an
RDMA device; FSDP_NET (auto, tcp, ucx; the same on every rank) chooses. See docs/guides/network.md.
Errors: INVALID_ARGUMENT, MISMATCH (FSDP_NET differs), TIMEOUT, PEER_FAILED, SYSTEM, OUT_OF_MEMORY, UNSUPPORTED
(FSDP_NET is ucx, and a rank has no UCX, or one that may use TCP while FSDP_UCX_TCP=trusted is not set on every
rank). Over TCP any process that reaches UCX's port can write the memory of that rank.
```
"""
@inline fsdp_create_context(options, context) =
    @waits libfsdp.fsdp_create_context(options::Ptr{fsdp_context_options}, context::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Make world_size contexts in this process, one for each thread that will act as a rank. contexts is an array of
world_size, which is at most 1,024. Each context is then used by one thread at a time, and collective calls must be
made from different threads. world_size and rank in the options are ignored. On failure all entries are NULL, but
where world_size is beyond 16,384: then none is touched.
Collective: no. Blocks: local work. Threads: any. Errors: INVALID_ARGUMENT, SYSTEM, OUT_OF_MEMORY. Since 0.2.
```
"""
@inline fsdp_create_local_contexts(world_size, options, contexts) =
    @waits libfsdp.fsdp_create_local_contexts(world_size::UInt32, options::Ptr{fsdp_context_options},
        contexts::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Make a context that only plans: rank `rank` of an imagined world. Meshes, models and groups are declared and sealed
by the very calls of a real run, but nothing is allocated and no peer is contacted. fsdp_get_role_bytes (but see
there), fsdp_get_model_info, fsdp_get_chunk and fsdp_describe_model answer as they would in that run, to the byte.
Calls that would touch data return INVALID_STATE. Good for a job of 16,384 ranks, which is the most, on a laptop.
Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_create_plan_context(world_size, rank, options, context) =
    @returns libfsdp.fsdp_create_plan_context(world_size::UInt32, rank::UInt32, options::Ptr{fsdp_context_options},
        context::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Leave the job in good order: waits until every rank has called it. Destroy the context afterwards, also on failure.
A checkpoint that is being saved is waited for; if that fails, so does this call, and the context is closed all the
same. Collective: the job. Blocks: peers. Errors: INVALID_STATE (a model has unfinished work), PEER_FAILED, TIMEOUT,
those of fsdp_wait_checkpoint. Since 0.2.
```
"""
@inline fsdp_close_context(context) =
    @waits libfsdp.fsdp_close_context(context::Ptr{fsdp_context})::Int32

raw"""
```text
Fail the context for good and wake its waiting calls, here and on the other ranks of the job. Sets a flag and
returns. A second later at the latest every call of the other ranks that does work fails with PEER_FAILED, also on
ranks that wait for no peer; fsdp_get_context_error and fsdp_get_failed_ranks then tell which rank has aborted.
reason may be NULL.
Collective: no. Blocks: no. Threads: any, also while another call runs. Since 0.2.
```
"""
@inline fsdp_abort_context(context, reason) =
    @returns libfsdp.fsdp_abort_context(context::Ptr{fsdp_context}, reason::Cstring)::Int32

raw"""
```text
Give the handle back. Never waits for peers. From then on calls on models, groups, meshes, captures and checkpoints
of the context return INVALID_HANDLE; these handles must still be destroyed, in any order. NULL is allowed. If a rank
leaves without fsdp_close_context, peers that wait for it get PEER_FAILED; the others go on.
Collective: no. Blocks: local work. Threads: any, also while another call runs. Since 0.2.
```
"""
@inline fsdp_destroy_context(context) =
    @waits libfsdp.fsdp_destroy_context(context::Ptr{fsdp_context})::Cvoid

raw"""
This context's rank, from 0. Threads: any. Since 0.2.
"""
@inline fsdp_get_rank(context, rank) =
    @returns libfsdp.fsdp_get_rank(context::Ptr{fsdp_context}, rank::Ptr{UInt32})::Int32

raw"""
The number of ranks of the job. Threads: any. Since 0.2.
"""
@inline fsdp_get_world_size(context, world_size) =
    @returns libfsdp.fsdp_get_world_size(context::Ptr{fsdp_context}, world_size::Ptr{UInt32})::Int32

raw"""
The error that failed the context for good, or status FSDP_OK. Threads: any. Since 0.2.
"""
@inline fsdp_get_context_error(context, error) =
    @returns libfsdp.fsdp_get_context_error(context::Ptr{fsdp_context}, error::Ptr{fsdp_error})::Int32

raw"""
```text
The ranks that the error of fsdp_get_context_error blames, ascending: all that died at the same time, stopped, or did
not come in time; fsdp_error.rank is one of them. *rank_count: in, the room in ranks; out, how many they are. 0 if
the context has not failed or no rank is to blame (a network that is cut, a wait that was interrupted). With ranks
NULL only the number is given.
Collective: no. Blocks: no. Threads: any, also while another call runs.
Errors: INVALID_ARGUMENT (too little room: *rank_count says what is needed, and nothing else is written). Since 0.2.
```
"""
@inline fsdp_get_failed_ranks(context, ranks, rank_count) =
    @returns libfsdp.fsdp_get_failed_ranks(context::Ptr{fsdp_context}, ranks::Ptr{UInt32},
        rank_count::Ptr{UInt64})::Int32

raw"""
```text
Reduce a few doubles (at most 512) over the ranks of a mesh, in its order, or with NULL over all ranks of the job, in
rank order, in place: say, the global loss. A value that is NaN on any rank is NaN in the end.
Collective: the mesh, or the job. Blocks: peers. Errors: INVALID_ARGUMENT, MISMATCH (counts or ops differ),
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_all_reduce_values(context, mesh, values, value_count, op) =
    @waits libfsdp.fsdp_all_reduce_values(context::Ptr{fsdp_context}, mesh::Ptr{fsdp_mesh}, values::Ptr{Float64},
        value_count::UInt64, op::Int32)::Int32

raw"""
```text
Wait until all that the stream was given before this call is done: the program's work and the library's. Like
cudaStreamSynchronize, but it ends: after a time, when the interrupted hook or flag says so, and when the context
fails, with that failure. timeout_ms is the caller's own limit: TIMEOUT then ends this call alone, since a long
kernel is no failure. 0: the context's timeout_ms, whose TIMEOUT fails the context as in every other wait. On
the host, where stream must be NULL, it returns at once. It makes and ends a CUDA event.
Collective: no. Blocks: the GPU, and so the peers that its work waits for. Stream: any of the context's GPU that is
not being captured. Errors: INVALID_ARGUMENT (host device: stream is not NULL), INVALID_STATE (a planning context, a
capture), TIMEOUT, INTERRUPTED, PEER_FAILED, SYSTEM. Since 0.2.
```
"""
@inline fsdp_wait_stream(context, stream, timeout_ms) =
    @waits libfsdp.fsdp_wait_stream(context::Ptr{fsdp_context}, stream::Ptr{Cvoid}, timeout_ms::UInt32)::Int32

raw"""
```text
Arrange ranks as replicate x shard; rank r of the mesh is replica r / shard_size, shard r % shard_size. With a list
of ranks every rank of it passes the same list, and a rank may be in several meshes (say, one for dense and one for
expert parameters).

Replicas are joined by sums of gradients alone (HSDP; see fsdp_outer_strategy): they may be on different hosts, while
each one's shard axis shares a host. A mesh of one replica may lie on several hosts, with the same number of
neighbouring ranks on each. Every host then keeps one copy of the compute weights, which are gathered over hosts once
a step; everything else is sharded over all ranks.

Gradients of the shard axis are added in rank order. With reduction_block_size B, a divisor of shard_size, ranks [0,
B) are added and scaled, then [B, 2 B), ...; then the blocks' sums in order. An axis over hosts is added so, a host
being a block; an axis on one host that declares the same blocks gets the same bits. Over hosts B must be the ranks
of a host, or 0; any other B is UNSUPPORTED.

Collective: the ranks of the mesh. Blocks: no.
Errors: INVALID_ARGUMENT (sizes do not multiply to the ranks), UNSUPPORTED (hosts cut an axis unevenly). Since 0.2.
```
"""
@inline fsdp_create_mesh(context, options, mesh) =
    @returns libfsdp.fsdp_create_mesh(context::Ptr{fsdp_context}, options::Ptr{fsdp_mesh_options},
        mesh::Ptr{Ptr{fsdp_mesh}})::Int32

raw"""
Give the handle back; models made from it keep what they need. NULL is allowed. Threads: any. Since 0.2.
"""
@inline fsdp_destroy_mesh(mesh) =
    @returns libfsdp.fsdp_destroy_mesh(mesh::Ptr{fsdp_mesh})::Cvoid

raw"""
```text
An empty model. Collective: the mesh. Blocks: no. Memory: none until the seal.
Errors: INVALID_ARGUMENT, INVALID_HANDLE, UNSUPPORTED. Since 0.2.
```
"""
@inline fsdp_create_model(context, options, model) =
    @returns libfsdp.fsdp_create_model(context::Ptr{fsdp_context}, options::Ptr{fsdp_model_options},
        model::Ptr{Ptr{fsdp_model}})::Int32

raw"""
```text
Give the handle back, with its groups and memory. NULL is allowed. Never waits for peers; peers that are in a
collective of this model, or enter one, get TIMEOUT naming this rank unless they destroy theirs too. Threads: any.
Since 0.2.
```
"""
@inline fsdp_destroy_model(model) =
    @returns libfsdp.fsdp_destroy_model(model::Ptr{fsdp_model})::Cvoid

raw"""
```text
The order in which groups will be visited. It decides prefetch and plans the buffers; the default is SEQUENTIAL.
A training step may deviate from it: an unused prefetch is dropped, and a hold that does not fit is an error that
names both groups. With ANY this error names held_groups and the groups that hold the buffers. Collective: the mesh.
Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (sealed). Since 0.2.
```
"""
@inline fsdp_set_schedule(model, kind, options) =
    @returns libfsdp.fsdp_set_schedule(model::Ptr{fsdp_model}, kind::Int32, options::Ptr{fsdp_schedule_options})::Int32

raw"""
```text
Add a named state tensor for the caller's own optimizer, or to the states of AdamW (say a moving average of the
weights). It is as long as each main weight shard, zeroed at the seal, and saved and loaded with the other states.
Collective: the mesh. Blocks: no.
Errors: INVALID_ARGUMENT (name taken, with AdamW also "step" and its states' names; or not UTF-8 of 1-63 bytes),
INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_add_optimizer_state(model, name, dtype) =
    @returns libfsdp.fsdp_add_optimizer_state(model::Ptr{fsdp_model}, name::Cstring, dtype::Int32)::Int32

raw"""
```text
Hand in the memory of a role, aligned to 4096 bytes and at least as large as fsdp_get_role_bytes of a planning
context says. Only roles that peers do not read can be handed in: MAIN, OPTIMIZER, GATHER, and GRAD where no group is
NO_SHARD or reduced once a step. Others are UNSUPPORTED. On a CUDA device it must be memory of that device. The
memory must outlive the model: one that a save still holds, or that another thread is inside of, has not ended when
fsdp_destroy_model returns. Collective: no. Blocks: no.
Errors: INVALID_ARGUMENT, INVALID_STATE (sealed), UNSUPPORTED. A size too small is found by the seal. Since 0.2.
```
"""
@inline fsdp_set_arena(model, role, data, size_bytes) =
    @returns libfsdp.fsdp_set_arena(model::Ptr{fsdp_model}, role::Int32, data::Ptr{Cvoid}, size_bytes::UInt64)::Int32

raw"""
```text
All that fsdp_seal_model would refuse of what was declared on this rank, as text, one violation a line; empty if
nothing. Sizes and arenas are looked at once groups and visits are right. What only shows when ranks are compared, or
memory is allocated, is not in it. buffer/size_bytes: see fsdp_describe_model.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (sealed). Since
0.2.
```
"""
@inline fsdp_check_model(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_check_model(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Fix the layout, plan and allocate all memory, and compare what every rank declared (names, order, shapes, dtypes,
flags, policy, layout hash). A model needs a group, though not one with parameters. The first difference is reported
on every rank with both ranks' values. Afterwards the model is in its update window: load parameters, then
fsdp_publish_weights.
Collective: the mesh. Blocks: peers. Memory: all that the model will ever use.
Errors: MISMATCH, INVALID_STATE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. INVALID_ARGUMENT
is also a size beyond 64 bits, or two tensors that would have one name in a checkpoint. OUT_OF_MEMORY comes before
anything is allocated where ranks that share a memory cgroup need more than it has free. What fails one rank fails
all of them with its status. Since 0.2.
```
"""
@inline fsdp_seal_model(model) =
    @waits libfsdp.fsdp_seal_model(model::Ptr{fsdp_model})::Int32

raw"""
```text
The bytes of a role, or of FSDP_ROLE_ALL, that a rank of a sealed model's mesh holds: what the plan says, for any
rank. With a planning context on a GPU whose options name no transport, STAGING is the most that the seal may choose.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_role_bytes(model, role, rank, bytes) =
    @returns libfsdp.fsdp_get_role_bytes(model::Ptr{fsdp_model}, role::Int32, rank::UInt32, bytes::Ptr{UInt64})::Int32

raw"""
```text
The bytes of a role, or of FSDP_ROLE_ALL, that this rank has allocated, as the allocator counted them: those of
fsdp_get_role_bytes. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or only
planned). Since 0.2.
```
"""
@inline fsdp_get_allocated_bytes(model, role, bytes) =
    @returns libfsdp.fsdp_get_allocated_bytes(model::Ptr{fsdp_model}, role::Int32, bytes::Ptr{UInt64})::Int32

raw"""
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
"""
@inline fsdp_get_model_info(model, info) =
    @returns libfsdp.fsdp_get_model_info(model::Ptr{fsdp_model}, info::Ptr{fsdp_model_info})::Int32

raw"""
Counters since the seal. Collective: no. Blocks: no. Errors: INVALID_STATE (not sealed). Since 0.2.
"""
@inline fsdp_get_stats(model, stats) =
    @returns libfsdp.fsdp_get_stats(model::Ptr{fsdp_model}, stats::Ptr{fsdp_stats})::Int32

raw"""
```text
The layout of a sealed model as JSON: groups, buckets, parameters with offsets, padding, pool slots, hash.
*size_bytes is the buffer's size on entry and the size needed (with the final NUL) on return; buffer may be NULL to
ask.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_describe_model(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_model(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Declare a group: param_count descriptors, each param_stride bytes after the one before (sizeof(fsdp_param)). The name
is UTF-8 of 1-255 bytes, unique among the model's groups. Parameters of different dtypes, row sizes and trainability
may mix; the group is split inside. A group without parameters is legal. Collective: the mesh (compared at the seal).
Blocks: no. Memory: none until the seal.
Errors: INVALID_ARGUMENT (naming the parameter and field), INVALID_STATE (sealed). Since 0.2.
```
"""
@inline fsdp_create_group(model, name, params, param_count, param_stride, options, group) =
    @returns libfsdp.fsdp_create_group(model::Ptr{fsdp_model}, name::Cstring, params::Ptr{fsdp_param},
        param_count::UInt64, param_stride::UInt64, options::Ptr{fsdp_group_options}, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
The number of groups that were created. Threads: any, once sealed. Since 0.2.
"""
@inline fsdp_get_group_count(model, group_count) =
    @returns libfsdp.fsdp_get_group_count(model::Ptr{fsdp_model}, group_count::Ptr{UInt64})::Int32

raw"""
```text
The group of that number, in the order of creation: the handle that fsdp_create_group gave. Threads: any, once
 sealed. Since 0.2.
```
"""
@inline fsdp_get_group(model, group_index, group) =
    @returns libfsdp.fsdp_get_group(model::Ptr{fsdp_model}, group_index::UInt64, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
The group of that name. Threads: any, once sealed. Errors: INVALID_ARGUMENT (no such group). Since 0.2.
"""
@inline fsdp_find_group(model, name, group) =
    @returns libfsdp.fsdp_find_group(model::Ptr{fsdp_model}, name::Cstring, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
Strings live as long as the model. Threads: any, once sealed. Since 0.2.
"""
@inline fsdp_get_group_info(group, info) =
    @returns libfsdp.fsdp_get_group_info(group::Ptr{fsdp_group}, info::Ptr{fsdp_group_info})::Int32

raw"""
```text
The parameter of that name, which is unique in the model. Threads: any, once sealed. Errors: INVALID_ARGUMENT (no
 such parameter). Since 0.2.
```
"""
@inline fsdp_find_param(model, name, group, param_index) =
    @returns libfsdp.fsdp_find_param(model::Ptr{fsdp_model}, name::Cstring, group::Ptr{Ptr{fsdp_group}},
        param_index::Ptr{UInt64})::Int32

raw"""
```text
The descriptor as declared, with defaults filled in and the lr_scale of now: fsdp_create_group takes it. Threads:
 any, once sealed. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_get_param_info(group, param_index, param) =
    @returns libfsdp.fsdp_get_param_info(group::Ptr{fsdp_group}, param_index::UInt64, param::Ptr{fsdp_param})::Int32

raw"""
```text
Load a parameter from full data: element_count elements of dtype, in C order. With root FSDP_EVERY_RANK every rank
passes the same data and nothing is communicated. Else rank `root` passes it, and data should be NULL elsewhere: with
NULL there, dtype and element_count may be anything; data that is not NULL is checked as the root's is. The data may
be freed at return. flags must be 0.
Collective: the mesh. Blocks: peers, if there is a root. Window: inside. Memory: of a FROZEN quantized parameter 4
bytes for each element of this rank's part while it runs, since planes are made when all has come.
Errors: INVALID_ARGUMENT, INVALID_STATE (window closed), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. INVALID_ARGUMENT is on
all ranks where the root's data, dtype or element_count is wrong. Another wrong argument is an error of its rank
alone, and the others wait for it. OUT_OF_MEMORY leaves the planes as they were, on all ranks if there is a root,
else on this one: load the parameter again before the next publish. Since 0.2.
```
"""
@inline fsdp_load_param(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_param(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Copy a whole parameter out: the main weights (compute weights of a frozen one), converted to dtype. With root
FSDP_EVERY_RANK every rank gets it; else rank `root` does, and data may be NULL elsewhere. flags must be 0. It is
copied part by part as peers show theirs: where a peer fails meanwhile, some of data has been written.
Collective: the mesh. Blocks: peers. Window: either; while it is open the caller must not write on any rank.
Memory: of a FROZEN quantized parameter its codes and scales, whole, while it runs on a rank that gets it, of a GPU
page-locked. Errors: INVALID_ARGUMENT, INVALID_STATE, OUT_OF_MEMORY (on all ranks that exchange parts), PEER_FAILED,
TIMEOUT. Since 0.2.
```
"""
@inline fsdp_read_param(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_param(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
The full compute weights: a read-only view, legal to read while the group is unsharded, or at any time outside the
update window where the strategy keeps them whole. With SEQUENTIAL and VISITS schedules the address is the same from
the seal on, in every phase. With INTERLEAVED, and in a group with planes by phase (fsdp_plane_policy), it is the one
of the phase given: BACKWARD has one address, and FORWARD and EVAL have another. RECOMPUTE has BACKWARD's with
INTERLEAVED, but FORWARD's where planes are by phase. With ANY the address is valid while the group is held, and may
differ at the next hold. phase may be any.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (also: the parameter is quantized, see fsdp_get_plane),
INVALID_STATE (not sealed; not unsharded). Since 0.2.
```
"""
@inline fsdp_get_param(group, param_index, phase, tensor) =
    @returns libfsdp.fsdp_get_param(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32,
        tensor::Ptr{fsdp_tensor})::Int32

raw"""
```text
The views of all parameters of a group, as fsdp_get_param gives each: for bindings, which may keep them where
addresses are fixed. Where a parameter is quantized, data is NULL. tensors is an array of tensor_count, the group's
number of parameters; the call sets each struct_size to the stride, or to what it knows if that is less. Collective:
no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_get_params(group, phase, tensors, tensor_count, tensor_stride) =
    @returns libfsdp.fsdp_get_params(group::Ptr{fsdp_group}, phase::Int32, tensors::Ptr{fsdp_tensor},
        tensor_count::UInt64, tensor_stride::UInt64)::Int32

raw"""
```text
A whole plane of a quantized parameter's compute weights: a read-only view, legal to read as that of fsdp_get_param
is, at addresses that follow the same rules. Where planes are gathered by phase it is legal while a hold of the phase
given lasts, and ROW planes of a group have other addresses than its COLUMN planes. Collective: no. Blocks: no.
Errors: INVALID_ARGUMENT (no such plane; the parameter is not quantized), INVALID_STATE (not sealed; not unsharded;
the phase has other planes). Since 0.2.
```
"""
@inline fsdp_get_plane(group, param_index, phase, plane, tensor) =
    @returns libfsdp.fsdp_get_plane(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32, plane::Int32,
        tensor::Ptr{fsdp_tensor})::Int32

raw"""
```text
Load a whole plane of a FROZEN quantized parameter as it is, bit for bit: element_count codes or scales of the
plane's shape and dtype (see fsdp_plane), in C order. So a quantized checkpoint of others is loaded without a
rounding. root and flags as in fsdp_load_param.
What belongs together must be loaded together, in the same window: codes and scales, and of MXFP8 both forms. That is
not checked.
Collective: the mesh. Blocks: peers, if there is a root. Window: inside. Errors: INVALID_ARGUMENT (no such plane;
another dtype or count; the parameter is not quantized), INVALID_STATE (not FROZEN: planes are made of main weights;
window closed), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_load_plane(group, param_index, plane, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_plane(group::Ptr{fsdp_group}, param_index::UInt64, plane::Int32, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Write the scales of an MXFP8 plane, ROW_SCALE or COLUMN_SCALE, in the order in which block-scaled GEMMs read them
(VEC32_UE8M0 of cuBLASLt); of a parameter of three or more dimensions, matrices follow each other. The scales of ROW
planes are a matrix of R x C/32, those of COLUMN planes are taken as their transpose, C x R/32. Both sizes are
rounded up, to multiples of 128 and of 4, and tiles of 128 x 4, of 512 bytes each, follow each other in rows of
tiles. In a tile scale (r, c) is byte r % 32 * 16 + r / 32 * 4 + c; what is beyond the scales is 0.
data is memory of the model's device, *size_bytes its size on entry and the size needed on return; data may be NULL
to ask, at any time after the seal. Else the plane must be legal to read as that of fsdp_get_plane is, and its hold
is to be given back in the order of this stream. Collective: no. Blocks: local work on the host device, else no.
Errors: as fsdp_get_plane, and INVALID_ARGUMENT (no scales of MXFP8; too small: *size_bytes is set). Since 0.2.
```
"""
@inline fsdp_swizzle_scales(group, param_index, phase, plane, data, size_bytes, stream) =
    @waits libfsdp.fsdp_swizzle_scales(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32, plane::Int32,
        data::Ptr{Cvoid}, size_bytes::Ptr{UInt64}, stream::Ptr{Cvoid})::Int32

raw"""
```text
The part of a parameter that rank `rank` stores: what fsdp_load_chunk takes there and, of parameters that are not
FROZEN, what fsdp_get_shard shows. All of it where every rank has the whole (FSDP_STRATEGY_NO_SHARD); the same part
on each replica.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_chunk(group, param_index, rank, chunk) =
    @returns libfsdp.fsdp_get_chunk(group::Ptr{fsdp_group}, param_index::UInt64, rank::UInt32,
        chunk::Ptr{fsdp_chunk})::Int32

raw"""
```text
Load rows of a parameter that this rank owns: row_count rows from row_offset on, in C order, say those of
fsdp_get_chunk. They must lie in this rank's chunk; where the strategy keeps main weights whole that is all of them.
Every rank, replicas too, loads its own. flags must be 0. Of a FROZEN quantized parameter they must be whole blocks:
of a matrix 32 rows (MXFP8) or 128 (FP8_BLOCK; the last block may be shorter). FP8, whose scale is made of all rows,
is loaded by fsdp_load_param. Collective: no. Blocks: local work. Window: inside. Memory: as fsdp_load_param.
Errors: INVALID_ARGUMENT (rows of another rank, or parts of blocks), INVALID_STATE (window closed), UNSUPPORTED (FP8
of a FROZEN parameter), OUT_OF_MEMORY (the planes are as before). Since 0.2.
```
"""
@inline fsdp_load_chunk(group, param_index, data, dtype, row_offset, row_count, flags) =
    @waits libfsdp.fsdp_load_chunk(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        row_offset::UInt64, row_count::UInt64, flags::UInt32)::Int32

raw"""
```text
Load a named optimizer state of a parameter from full data, as fsdp_load_param does its weights: "exp_avg" and
"exp_avg_sq" of AdamW, or one of the caller's own. The number of AdamW's steps is not part of it:
fsdp_adamw_options.step sets it once, later steps count on, and no load changes it. flags must be 0. Collective: the
mesh. Blocks: peers, if there is a root. Window: inside.
Errors: as fsdp_load_param, and INVALID_ARGUMENT (no such state), INVALID_STATE (frozen). Since 0.2.
```
"""
@inline fsdp_load_state(group, param_index, name, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_state(group::Ptr{fsdp_group}, param_index::UInt64, name::Cstring, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Copy a whole optimizer state of a parameter out, as fsdp_read_param does its weights. flags must be 0. Collective:
the mesh.
Blocks: peers. Window: either. Errors: as fsdp_read_param, and INVALID_ARGUMENT (no such state), INVALID_STATE
(frozen). Since 0.2.
```
"""
@inline fsdp_read_state(group, param_index, name, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_state(group::Ptr{fsdp_group}, param_index::UInt64, name::Cstring, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Give a parameter another lr_scale from the next step on; 0 leaves its weights alone, and sets FSDP_PARAM_LR_ZERO in
the descriptor, which another value clears. Call it alike on every rank: the next meeting compares the lr_scales that
parameters have then, and its MISMATCH names the parameter and both values; ranks that make them equal again go on.
The value that is there already is no change. A capture with a step of AdamW is not replayed while the lr_scales are
not those of the capture.
Collective: the mesh, though ranks meet only later. Blocks: no. Window: either.
Errors: INVALID_ARGUMENT (negative or not finite in fp32), INVALID_STATE (not sealed; frozen; a capture is under
way), OUT_OF_MEMORY (nothing has changed). Since 0.2.
```
"""
@inline fsdp_set_param_lr_scale(group, param_index, lr_scale) =
    @returns libfsdp.fsdp_set_param_lr_scale(group::Ptr{fsdp_group}, param_index::UInt64, lr_scale::Float64)::Int32

raw"""
```text
Stop training a parameter, or train it again. An untrained parameter has no gradient: fsdp_put_grad and
fsdp_acquire_grad refuse it as a FROZEN one, fsdp_acquire_grads lends none, fsdp_reduce_grad does not require one. In
a group without trained parameters fsdp_reduce_grad does nothing and need not be called. fsdp_apply_grads still has
an entry for the parameter, with data NULL. Steps, weight decay included, leave its weights and states unchanged.
fsdp_shard.flags have FROZEN, and its main gradient is zeros, also in norms. fsdp_get_param_info shows it as
declared. The planned memory does not change. A parameter that was declared FROZEN cannot be trained.
Collective: no, but train the same on every rank. The model's next meeting, at the latest the end of the step,
compares which parameters are trained. If before that a rank reduces another group than its peers, the collective
fails at once with MISMATCH, and the contexts have failed. Blocks: no.
Window: either, between steps: no gradient may have been acquired since the last publish, and the window must have no
gradients. An earlier graph can be replayed only while the same parameters are trained as at its capture.
Errors: INVALID_ARGUMENT (trainable is neither 0 nor 1), INVALID_STATE (FROZEN; within a step; captured). Since 0.2.
```
"""
@inline fsdp_set_param_trainable(group, param_index, trainable) =
    @returns libfsdp.fsdp_set_param_trainable(group::Ptr{fsdp_group}, param_index::UInt64, trainable::Int32)::Int32

raw"""
```text
Start gathering a group ahead of its unshard. The schedule does this on its own; call it when the order differs. Free
if the group is gathered; nothing happens if no buffer is free, nor with FSDP_CONTEXT_DEBUG. Collective: no (pulls
what peers published); on a CUDA device the shard axis. flags must be 0. Blocks: no. Window: outside. Errors:
INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_prefetch(group, phase, flags, stream) =
    @returns libfsdp.fsdp_prefetch(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Make the full compute weights readable for work that follows on the stream, and take a hold. Gathers once per version
and release; costs nothing if the group is gathered already. A RECOMPUTE hold while a BACKWARD one is pending is
free, but where planes are gathered by phase (fsdp_plane_policy). flags must be 0.
Collective: no; on a CUDA device the shard axis. Blocks: peers on the host device (until every rank has published
this version). Window: outside.
Errors: INVALID_STATE (window open; no buffer free, naming both groups; RECOMPUTE and BACKWARD at once, with planes
by phase), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_unshard(group, phase, flags, stream) =
    @waits libfsdp.fsdp_unshard(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Return a hold of that phase. When the last hold is returned the group lets go of its buffer, once the work of all
returning streams is done. flags must be 0. Collective: no; on a CUDA device the shard axis. Blocks: no. Errors:
INVALID_STATE (no such hold). So it is after fsdp_discard_step, which has forgotten the holds: a scope that ends late
may pass over that error, which changes nothing. Since 0.2.
```
"""
@inline fsdp_reshard(group, phase, flags, stream) =
    @returns libfsdp.fsdp_reshard(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Show the true weights of a group again after a write through its views. Every publish and fsdp_discard_step do so for
all groups. Weights that are mapped or that the strategy keeps whole need FSDP_VIEWS_PRIVATE: the written pages show
the compute weights again, whether the group is held or not. Copied weights, with either view_kind, are gathered
again at the next unshard, so the group must have no hold. (One rank copies nothing, unless it is made to
communicate.)
Collective: no; for copied weights on a CUDA device the shard axis, because the next unshard gathers there. Blocks:
local work. Window: either. Memory: the copies of written pages are freed.
Errors: INVALID_STATE (copied weights that are held; others with FSDP_VIEWS_READ_ONLY), SYSTEM. Since 0.2.
```
"""
@inline fsdp_restore_view(group) =
    @waits libfsdp.fsdp_restore_view(group::Ptr{fsdp_group})::Int32

raw"""
```text
Borrow the full gradient of a parameter to write into, in grad_dtype. *accumulate is 0: overwrite it all, or 1: add
to it; with FSDP_GRAD_ZEROED it is always 1, and accumulate may be NULL. Asking again before fsdp_reduce_grad (a tied
or twice-used parameter) gives 1, and orders the second stream after the first. The view ends with
fsdp_complete_grad, else with fsdp_reduce_grad.
Collective: no. Blocks: peers on the host device, if a buffer must be drained.
Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; completed; reduced with LAST; no buffer free, naming both groups),
BUSY (FSDP_GRAD_NO_WAIT); of the reduce that is drained MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_acquire_grad(group, param_index, flags, stream, grad, accumulate) =
    @waits libfsdp.fsdp_acquire_grad(group::Ptr{fsdp_group}, param_index::UInt64, flags::UInt32, stream::Ptr{Cvoid},
        grad::Ptr{fsdp_tensor}, accumulate::Ptr{Int32})::Int32

raw"""
```text
fsdp_acquire_grad for all trainable parameters of a group at once. grads is an array of grad_count, the group's
number of parameters, and accumulate one of as many, or NULL with FSDP_GRAD_ZEROED. A parameter that is frozen or not
trained has data NULL and accumulate 0. struct_size: as fsdp_get_params. Collective: no. Blocks: peers on the host
device, if a buffer must be drained. Errors: as fsdp_acquire_grad, and INVALID_STATE if max_pending_bytes has no room
for all gradients at once. Since 0.2.
```
"""
@inline fsdp_acquire_grads(group, flags, stream, grads, grad_count, grad_stride, accumulate) =
    @waits libfsdp.fsdp_acquire_grads(group::Ptr{fsdp_group}, flags::UInt32, stream::Ptr{Cvoid},
        grads::Ptr{fsdp_tensor}, grad_count::UInt64, grad_stride::UInt64, accumulate::Ptr{Int32})::Int32

raw"""
```text
Hand in the caller's own full gradient: element_count elements of dtype, copied (or added, as acquire would say)
before the call returns on the host device, in stream order on a GPU. data NULL means "no gradient": it counts as
zeros (but see fsdp_missing_grad). flags: FSDP_GRAD_NO_WAIT. Collective: no. Blocks: as fsdp_acquire_grad. Errors:
as fsdp_acquire_grad. Since 0.2.
```
"""
@inline fsdp_put_grad(group, param_index, data, dtype, element_count, flags, stream) =
    @waits libfsdp.fsdp_put_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
This parameter's gradient of this contribution is complete: nothing is written into it, or put, until
fsdp_reduce_grad, which the group still needs. A group may be reduced in parts (max_pending_bytes). A part, or the
group, is reduced as soon as all of its trainable parameters are complete. Its buffer can then be lent while the rest
of the group is written. Complete parameters from the last to the first, as a backward pass comes to them. Ranks may
complete those of a part in different orders, but must reduce parts in the same one; a rank may leave parts to
fsdp_reduce_grad, which takes them from the last to the first. With FSDP_REDUCE_POLICY_LAST nothing is reduced before
fsdp_reduce_grad. stream orders nothing: streams that wrote are known. flags must be 0.
Collective: the mesh. Blocks: no. Window: outside. Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; no gradient yet;
completed already; reduced with LAST), MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_complete_grad(group, param_index, flags, stream) =
    @returns libfsdp.fsdp_complete_grad(group::Ptr{fsdp_group}, param_index::UInt64, flags::UInt32,
        stream::Ptr{Cvoid})::Int32

raw"""
```text
The group's gradients of one contribution (micro-batch) are complete: reduce into the main grads what
fsdp_complete_grad has not. Every trainable parameter must have been acquired or put. With FSDP_REDUCE_POLICY_LAST
only the call with FSDP_LAST communicates. Buffers are drained when others need them.
Collective: the mesh. Blocks: no. Window: outside.
Errors: INVALID_ARGUMENT, INVALID_STATE (a parameter without gradient, named; LAST twice), MISMATCH, PEER_FAILED,
TIMEOUT. Since 0.2.
```
"""
@inline fsdp_reduce_grad(group, flags, stream) =
    @returns libfsdp.fsdp_reduce_grad(group::Ptr{fsdp_group}, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
End the step's gradients. The call checks that every trainable group was reduced with LAST and that no hold of any
phase is left. It waits for all reduces, multiplies main grads by scale (1: leave as they are), and opens the update
window once every rank has come here. What is missing anywhere is listed on every rank. With the flag FSDP_LAST, on
all ranks, groups need not have been reduced with LAST: this call ends the contributions of each such group, in
reverse declared order, with the same bits. A group without a contribution is reduced as zeros, as if each parameter
had been put NULL. Groups that were reduced with LAST stay as they are. After a failure that leaves the context alive
the way out is fsdp_discard_step on every rank. Until then getters, traces, fsdp_reshard of what is held and
destroying may be called too; fsdp_close_context and every other call of the step say INVALID_STATE.
Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since
0.2.
```
"""
@inline fsdp_finish_grads(model, scale, flags, stream) =
    @waits libfsdp.fsdp_finish_grads(model::Ptr{fsdp_model}, scale::Float64, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Copy a whole main gradient out, converted to dtype: the reduced and scaled gradient of the step, as the optimizer
will see it. Otherwise as fsdp_read_param. Collective: the mesh. Blocks: peers. Window: inside, with
gradients. Errors: as fsdp_read_param, and INVALID_STATE (FROZEN; no gradients in this window). Since 0.2.
```
"""
@inline fsdp_read_grad(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Replace a main gradient by full data, as fsdp_load_param replaces weights, say after a transformation of the whole
gradient. Collective: the mesh. Blocks: peers, if there is a root. Window: inside, with gradients. Errors: as
fsdp_load_param, and INVALID_STATE (FROZEN or not trained; no gradients in this window). Since 0.2.
```
"""
@inline fsdp_load_grad(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
How many shards this rank owns; fixed from the seal on. Collective: no. Errors: INVALID_STATE (not sealed, or only
 planned). Since 0.2.
```
"""
@inline fsdp_get_shard_count(model, shard_count) =
    @waits libfsdp.fsdp_get_shard_count(model::Ptr{fsdp_model}, shard_count::Ptr{UInt64})::Int32

raw"""
```text
One of this rank's shards, in declaration order. Addresses are fixed from the seal on; lr_scale and flags are those
of now.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_shard(model, shard_index, shard) =
    @returns libfsdp.fsdp_get_shard(model::Ptr{fsdp_model}, shard_index::UInt64, shard::Ptr{fsdp_shard})::Int32

raw"""
```text
The address of a named optimizer state of a shard; element_count elements of the state's dtype. Collective: no.
Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or only planned). Since 0.2.
```
"""
@inline fsdp_get_shard_state(model, shard_index, name, state) =
    @returns libfsdp.fsdp_get_shard_state(model::Ptr{fsdp_model}, shard_index::UInt64, name::Cstring,
        state::Ptr{fsdp_tensor})::Int32

raw"""
```text
The L2 norm of all main grads of the model, the same double on every rank: fp64 partial sums, added in a fixed order,
padding and copies not counted. With a mesh, the squares of the norms of its ranks' models are added in the mesh's
order. Its ranks hold different parts of one network (pipeline stages, tensor parallel parts), and no two of them are
of one model. NULL: the model alone. norm may be NULL, also on some ranks only: fsdp_get_last_norm tells it later.
Then, without a mesh, nothing waits for a GPU: ranks meet to compare what they ask for, and the norm is found in the
order of the stream. On the host the calling thread is the stream. Collective: the model's mesh, and the one given.
Blocks: peers; for the stream too if norm is not NULL, or with a mesh. Window: inside.
Errors: INVALID_ARGUMENT, INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_get_grad_norm(model, mesh, stream, norm) =
    @waits libfsdp.fsdp_get_grad_norm(model::Ptr{fsdp_model}, mesh::Ptr{fsdp_mesh}, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
The norm that the last fsdp_get_grad_norm, fsdp_clip_grads or fsdp_apply_grads of the model found, before clipping, a
replay's too. Collective: no. Blocks: until it is known on this rank. Errors: INVALID_STATE (there was none yet),
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_get_last_norm(model, norm) =
    @waits libfsdp.fsdp_get_last_norm(model::Ptr{fsdp_model}, norm::Ptr{Float64})::Int32

raw"""
```text
The L2 norm of each parameter's main grad, group by group in declaration order; norm_count must be the number of
parameters of the model. Frozen ones give 0. Collective: the mesh. Blocks: peers. Window: inside. Since 0.2.
```
"""
@inline fsdp_get_param_grad_norms(model, stream, norms, norm_count) =
    @waits libfsdp.fsdp_get_param_grad_norms(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, norms::Ptr{Float64},
        norm_count::UInt64)::Int32

raw"""
```text
Multiply this rank's main grads. Every rank must give the same factors in the same order: the next norm, clip or end
of the step compares them (MISMATCH). Collective: no, but call it alike on every rank. Blocks: local work. Window:
inside. Since 0.2.
```
"""
@inline fsdp_scale_grads(model, factor, stream) =
    @waits libfsdp.fsdp_scale_grads(model::Ptr{fsdp_model}, factor::Float64, stream::Ptr{Cvoid})::Int32

raw"""
```text
Scale all main grads by max_norm / norm if norm > max_norm. A norm that is not finite leaves them alone and returns
OK: test the norm. mesh and a norm of NULL: as for fsdp_get_grad_norm; what follows on the stream then works on
scaled gradients. Collective: the model's mesh, and the one given. Blocks: as fsdp_get_grad_norm.
Window: inside. Errors: INVALID_ARGUMENT (max_norm <= 0), INVALID_STATE, MISMATCH (on all ranks of both meshes:
another max_norm, or a rank that only asks for the norm; nothing was scaled, and all can clip again), PEER_FAILED,
TIMEOUT. Since 0.2.
```
"""
@inline fsdp_clip_grads(model, mesh, max_norm, stream, norm) =
    @waits libfsdp.fsdp_clip_grads(model::Ptr{fsdp_model}, mesh::Ptr{fsdp_mesh}, max_norm::Float64, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
Look for Inf and NaN in the main grads of all ranks. *found is 0 or 1, the same on every rank; *name (may be NULL)
becomes the first such parameter's name, or NULL. Collective: the mesh. Blocks: peers. Window: inside. Since 0.2.
```
"""
@inline fsdp_check_grads(model, stream, found, name) =
    @waits libfsdp.fsdp_check_grads(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, found::Ptr{Int32},
        name::Ptr{Ptr{UInt8}})::Int32

raw"""
```text
One step of AdamW (Loshchilov and Hutter 2019, decoupled weight decay) in fp32 on this rank's shards, then publish.
  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g;  w = w - lr s wd w - lr s (m / c1) / (sqrt(v / c2) +
  eps)
with s the parameter's lr_scale, c = 1 - beta^step computed in double and rounded to fp32. Collective: the mesh.
Window: closes it.
Blocks: peers: ranks agree to step before a weight is touched, so one that discards instead is an error here and all
can discard. Errors: INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another lr, beta, epsilon, weight_decay, step,
lr_scale, or scaling of the gradients, which includes the norm that was clipped). Since 0.2.
```
"""
@inline fsdp_step_adamw(model, lr, options, stream) =
    @waits libfsdp.fsdp_step_adamw(model::Ptr{fsdp_model}, lr::Float64, options::Ptr{fsdp_adamw_options},
        stream::Ptr{Cvoid})::Int32

raw"""
```text
Publish the main weights: cast them to compute weights, raise the version, close the update window. Whole weights
are refreshed before the call returns. Where the scales of a quantized parameter show that its main weights have Inf
or NaN, a line of FSDP_LOG_WARNING names it, once a version, on the rank that has them. It comes in this call on the
host device, and on a GPU at the end of the first call in the context that finds the work done. There is no line if a
graph has published, nor while what was published before has not been told of.
Collective: the mesh. Blocks: peers.
Window: closes it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. MISMATCH: a rank does something else
instead, or numbers differ. It is fatal on all ranks, since weights were written here. Before the first publish
nothing is lost: make it the same and publish again. Since 0.2.
```
"""
@inline fsdp_publish_weights(model, stream) =
    @waits libfsdp.fsdp_publish_weights(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Open the update window outside a training step, to load or edit weights. No hold may be left and no gradient pending:
where a rank has some, all get INVALID_STATE, and fsdp_discard_step on all of them goes on.
Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_begin_update(model, stream) =
    @waits libfsdp.fsdp_begin_update(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Forget this step: holds, lent and pending gradients, whatever was reduced so far. From any state between two
publishes, also after an exception in the middle of a pass. Inside the window it closes it, and the version stays as
it is: main weights must not have been written, nor FROZEN parameters loaded, which readers see at once. Over NCCL,
where ranks have enqueued different collectives, communicators are made anew, which graphs that captured theirs do
not survive: the context then fails. Collective: the mesh. Blocks: peers. Errors: INVALID_STATE (nothing was
published yet), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_discard_step(model, stream) =
    @waits libfsdp.fsdp_discard_step(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Compare what several ranks store alike, to find a replica that has drifted: a bit that flipped, a load or an edit
that was not the same everywhere. Main weights, optimizer states and compute weights of each parameter are hashed as
they lie in memory, padding left out. They are compared among the ranks that have the same elements: replicas of a
mesh, and all ranks where each has the whole. What one rank alone has is not looked at. MISMATCH, with one text on
all ranks, names the first such parameter, what differs, both ranks and hashes; fsdp_error.rank is the rank that
fewer agree with, or the higher one. The model can be used as before. It reads that memory once, on a GPU through 1
MiB of host memory. flags: 0. Collective: the mesh. Blocks: peers, and the GPU.
Window: outside. Errors: INVALID_ARGUMENT (flags), INVALID_STATE (inside the window, or captured), MISMATCH,
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_check_replicas(model, flags, stream) =
    @waits libfsdp.fsdp_check_replicas(model::Ptr{fsdp_model}, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
A whole step in one call, for array frameworks: full gradients in, AdamW, published weights out. grads has one entry
for each parameter of the model that was not declared FROZEN, group by group in declaration order. A parameter that
is not trained now (fsdp_set_param_trainable) must have data NULL. Same bits as put, reduce, finish and step. If
max_norm > 0 the gradients are clipped to it first; 0 leaves them. *norm (may be NULL) is the norm before clipping;
gradients that are not finite are stepped with: to skip such a step, use the single calls. max_norm, and with 0
whether norm is NULL, must be alike on every rank.
Collective: the mesh. Blocks: peers. Window: outside, and it ends outside. Errors: as the calls it stands for. Since
0.2.
```
"""
@inline fsdp_apply_grads(model, grads, grad_count, grad_stride, lr, max_norm, options, stream, norm) =
    @waits libfsdp.fsdp_apply_grads(model::Ptr{fsdp_model}, grads::Ptr{fsdp_grad}, grad_count::UInt64,
        grad_stride::UInt64, lr::Float64, max_norm::Float64, options::Ptr{fsdp_adamw_options}, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
Save main weights (of frozen parameters the compute weights), optimizer states and AdamW's number of steps as a
checkpoint of the folder, which is made if it is not there. A checkpoint is DIR/step-0000001200/ with safetensors
files as PyTorch's distributed checkpoint writes them, and a manifest with sums of all (docs/guides/checkpoints.md).
It has its name when it is whole and on the disk, or does not exist: whatever fails or is killed meanwhile, the
checkpoints from before stay as they are. With COMMIT_MANIFEST the folder has its name from the start and is a
checkpoint once its manifest is written. A save that is killed before then leaves no checkpoint, and a checkpoint
that loses its manifest later is damaged. A save succeeds even if another checkpoint of the folder cannot be read.
Main weights and states must not be written while it runs. Every rank must see the folder.

What is saved is the version published last, also in the middle of a step. Ranks that have the same bytes share the
writing, or one of them does it. A save takes 32 MiB of memory a rank while it runs, or the model's
save_staging_bytes. One that is under way in the background (fsdp_commit_checkpoint) is waited for first.
Collective: the mesh. Blocks: the disk, and peers: a rank that is still writing after timeout_ms has not failed; one
whose disk takes nothing for that long has, with errno ETIMEDOUT. Window: outside.
Errors, the same on all ranks: SYSTEM, INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another step, keep or flag),
UNSUPPORTED (REPLACE where the file system cannot exchange two names), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. SYSTEM
names the rank, the file, what was done and errno. Nothing of this checkpoint is left, the job can go on, and the
next save may succeed. INVALID_STATE: the folder has this step; another host does not see what rank 0 has made in the
folder; the window is open; or a capture is under way. INVALID_ARGUMENT: REPLACE with COMMIT_MANIFEST, or a parameter
named state.NAME.step, under which AdamW's number of steps of the parameter NAME is saved. Other names that two
tensors would share are refused by fsdp_seal_model already. Since 0.2.
```
"""
@inline fsdp_save(model, folder, options) =
    @waits libfsdp.fsdp_save(model::Ptr{fsdp_model}, folder::Cstring, options::Ptr{fsdp_save_options})::Int32

raw"""
```text
Load the folder's newest whole checkpoint (the last one saved there, whatever its step), or the checkpoint that the
folder is itself: onto any number of ranks, mesh, strategy and unshard mode. Each rank reads the
rows that it keeps and verifies what it reads, with 8 MiB of memory. Publish then. *loaded (may be NULL) tells what
it was, and the log at INFO how many tensors were loaded, missing and unexpected.

If a checkpoint that is damaged or cannot be read may be the newest, the load fails and names it; with FALLBACK it
takes the newest whole one instead. If it is certainly older than the one loaded, a WARNING in the log names it.

All or nothing: on failure no rank has loaded it, and the window stays open. Main weights may have been written in
part, so another load, or the caller's own values, must come before the next publish.
Collective: the mesh. Blocks: the disk and peers. Window: inside; the step's gradients, if any, stay.
Errors, the same on all ranks: INVALID_ARGUMENT, SYSTEM, INVALID_STATE, UNSUPPORTED (written by a newer release),
MISMATCH (another model, other flags, or hosts that see different checkpoints), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT.
INVALID_ARGUMENT: no checkpoint in the folder; none of the model's tensors, without IF_ANY; or a damaged file, with
the range of bytes and the tensors. It also lists all tensors that are missing, unexpected, of another shape, or of a
dtype that does not become the parameter's. SYSTEM names the rank, the file, what was done and errno: ENOENT for a
folder that is not there. Since 0.2.
```
"""
@inline fsdp_load(model, folder, options, loaded) =
    @waits libfsdp.fsdp_load(model::Ptr{fsdp_model}, folder::Cstring, options::Ptr{fsdp_load_options},
        loaded::Ptr{fsdp_loaded})::Int32

raw"""
```text
Load weights alone, out of safetensors files of any library: path is such a file, or a folder of them, with Hugging
Face's index (model.safetensors.index.json) or without, as PyTorch's distributed checkpoint writes them, too. It may
also be a checkpoint of libfsdp or a folder of them. Links are followed (Hugging Face's cache is made of them), but
not in checkpoints of libfsdp; an index may name files in folders below. Names are ours unless renames say otherwise.
A tensor that several renames match goes to all of them: a fused one to its parts, a shared one to both of its names.
Parts that are fused here are several renames with a to_row each. Every row of a parameter must come once.

F64, F32, F16 and BF16 are converted to what the model keeps, rounded to nearest even. Planes of a FROZEN quantized
parameter w are tensors of their own (w.row, w.row_scale; of MXFP8 also w.column, w.column_scale: F8_E4M3 codes, F32
or F8_E8M0 scales) and bytes are U8, both taken bit for bit. Each rank reads what it keeps, in blocks of 256 KiB; a
transposed matrix takes memory for this rank's part of it meanwhile. Files of libfsdp are verified, others have no
sums. States and AdamW's number of steps stay as they are. Flags: ALLOW_MISSING, ALLOW_UNEXPECTED and IF_ANY, which
files that have none of the model's tensors need beside ALLOW_MISSING; a path that is not there is an error with it,
too. renames may be NULL. *loaded (may be NULL) has the numbers of bytes and tensors. A tensor whose dtype this
release does not know is refused where the model has a parameter of its name.

All or nothing, as fsdp_load. Collective: the mesh; the same renames and flags on every rank. Blocks: the disk and
peers. Window: inside. Errors: as fsdp_load; INVALID_ARGUMENT also lists rows that come twice or not at all, and
shapes that do not fit. Since 0.2.
```
"""
@inline fsdp_load_weights(model, path, renames, rename_count, rename_stride, options, loaded) =
    @waits libfsdp.fsdp_load_weights(model::Ptr{fsdp_model}, path::Cstring, renames::Ptr{fsdp_rename},
        rename_count::UInt64, rename_stride::UInt64, options::Ptr{fsdp_load_options}, loaded::Ptr{fsdp_loaded})::Int32

raw"""
```text
What the model's last successful load did, as JSON. "call" is the function that loaded; "name" and "step" are the
checkpoint's ("" and 0 after fsdp_load_weights). "loaded", "missing" and "unexpected" list the names of the tensors
that fsdp_loaded counts. Sizes as in fsdp_describe_model.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (nothing has been
loaded, or the model is not sealed). Since 0.2.
```
"""
@inline fsdp_describe_load(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_load(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
A checkpoint for the folder, nothing of it there yet. options as for fsdp_save; with step 0 it is the highest step of
the rank's models: ranks whose models are at different steps give one. Collective: no. Blocks: no. Errors:
INVALID_ARGUMENT, INVALID_HANDLE. Since 0.2.
```
"""
@inline fsdp_begin_checkpoint(context, folder, options, checkpoint) =
    @returns libfsdp.fsdp_begin_checkpoint(context::Ptr{fsdp_context}, folder::Cstring, options::Ptr{fsdp_save_options},
        checkpoint::Ptr{Ptr{fsdp_checkpoint}})::Int32

raw"""
```text
A sealed model of the context goes into the checkpoint, as it will be at the commit. name (NULL: "") is what it is
loaded by. Ranks may add different models: those of one pipeline stage, or of one group of experts. Models of
different ranks under one name are parts of one; names of tensors are unique over all models.
Collective: no. Blocks: no. Memory: the model stays until the save has ended, also if its handle is destroyed.
Errors: INVALID_ARGUMENT (a name or model that is in it), INVALID_STATE (not sealed; committed), INVALID_HANDLE.
Since 0.2.
```
"""
@inline fsdp_add_checkpoint_model(checkpoint, name, model) =
    @returns libfsdp.fsdp_add_checkpoint_model(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring,
        model::Ptr{fsdp_model})::Int32

raw"""
```text
Bytes of the caller's own go into the checkpoint: the state of a random generator, the place in the data. They are
copied at once. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (no name, or one that is in it),
INVALID_STATE (committed), OUT_OF_MEMORY. Since 0.2.
```
"""
@inline fsdp_add_checkpoint_bytes(checkpoint, name, data, size_bytes, owner) =
    @returns libfsdp.fsdp_add_checkpoint_bytes(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, data::Ptr{Cvoid},
        size_bytes::UInt64, owner::Int32)::Int32

raw"""
```text
Save it while training goes on: the call returns when the ranks have agreed and all see the folder. What is saved are
the versions published last. Threads of the library copy main weights and states, and write them; what they have not
copied when fsdp_finish_grads, fsdp_begin_update or fsdp_prepare_replay is called for the model, that call waits for
(fsdp_stats.checkpoint_stall_ns). The checkpoint has its name as soon as all ranks have written, whatever calls
the ranks are in then, and even if a rank has died since. One is under way at a time: the commit of the next waits
for it.
Collective: the world. Blocks: peers, and an earlier save. Window: outside, of all its models.
Errors, the same on all ranks: as fsdp_save, but for those of the disk, which fsdp_wait_checkpoint tells;
INVALID_STATE (nothing is in it, or committed before), INVALID_ARGUMENT (a tensor's name is not unique). Since 0.2.
```
"""
@inline fsdp_commit_checkpoint(checkpoint) =
    @waits libfsdp.fsdp_commit_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Int32

raw"""
Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT, INVALID_HANDLE. Since 0.2.
"""
@inline fsdp_get_checkpoint_status(checkpoint, status) =
    @returns libfsdp.fsdp_get_checkpoint_status(checkpoint::Ptr{fsdp_checkpoint},
        status::Ptr{fsdp_checkpoint_status})::Int32

raw"""
```text
Until the checkpoint is there, or is known to have failed; may be asked again. Collective: no. Blocks: the disk, and
peers' disks. Errors, the same on all ranks, and the job can go on: SYSTEM, INVALID_STATE (not committed),
UNSUPPORTED, OUT_OF_MEMORY, INTERRUPTED (of the wait alone: it may be repeated), PEER_FAILED. SYSTEM names the rank,
the file, what was done and errno, and nothing of this checkpoint is left. If rank 0 died as it gave the checkpoint
its name, whether it has it is not known. Since 0.2.
```
"""
@inline fsdp_wait_checkpoint(checkpoint) =
    @waits libfsdp.fsdp_wait_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Int32

raw"""
```text
Open the folder's newest checkpoint, or the checkpoint that the folder is, for the calls below. Collective: the
world. Blocks: the disk and peers. Errors, the same on all ranks: INVALID_ARGUMENT (there is none, or a
damaged one may be the newest), SYSTEM, UNSUPPORTED (written by a newer release), MISMATCH (hosts that see different
checkpoints). Since 0.2.
```
"""
@inline fsdp_open_checkpoint(context, folder, checkpoint) =
    @waits libfsdp.fsdp_open_checkpoint(context::Ptr{fsdp_context}, folder::Cstring,
        checkpoint::Ptr{Ptr{fsdp_checkpoint}})::Int32

raw"""
```text
Load a model out of an opened checkpoint: of that name (NULL: ""). Otherwise as fsdp_load, without FALLBACK; IF_ANY
has an effect only with ALLOW_MISSING, where the checkpoint has none of the model's tensors. Collective: the model's
mesh. Blocks: the disk and peers. Errors: as fsdp_load. Since 0.2.
```
"""
@inline fsdp_load_checkpoint_model(checkpoint, name, model, options, loaded) =
    @waits libfsdp.fsdp_load_checkpoint_model(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, model::Ptr{fsdp_model},
        options::Ptr{fsdp_load_options}, loaded::Ptr{fsdp_loaded})::Int32

raw"""
```text
Read bytes out of an opened checkpoint: those saved PER_RANK by the rank of this number, else those saved ONCE.
*size_bytes is the buffer's size on entry and that of the bytes on return; data may be NULL to ask. They are
verified. Collective: no. Blocks: the disk. Errors: INVALID_ARGUMENT (none of that name, or none of this rank; too
small, and then *size_bytes is set; a damaged file), SYSTEM. Since 0.2.
```
"""
@inline fsdp_read_checkpoint_bytes(checkpoint, name, data, size_bytes) =
    @waits libfsdp.fsdp_read_checkpoint_bytes(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, data::Ptr{Cvoid},
        size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Give the handle back. A save that is under way goes on: fsdp_close_context waits for it, and returns its failure;
fsdp_destroy_context gives it up, with a WARNING. Threads: any. Never waits. NULL is allowed. Since
0.2.
```
"""
@inline fsdp_destroy_checkpoint(checkpoint) =
    @returns libfsdp.fsdp_destroy_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Cvoid

raw"""
```text
The checkpoints of a folder as JSON: "checkpoints", the newest first, with name, step, sequence, ranks, models and
bytes; and "unreadable", the reason for each that is damaged or that this process may not read. Sizes as in
fsdp_describe_model. Collective: no. Blocks: the disk. Threads: any.
Errors: SYSTEM, INVALID_ARGUMENT (too small; *size_bytes is set). Since 0.2.
```
"""
@inline fsdp_list_checkpoints(folder, buffer, size_bytes) =
    @waits libfsdp.fsdp_list_checkpoints(folder::Cstring, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
From here to fsdp_end_capture the model's calls record their work into the graph that `stream` is being captured into
(cudaStreamBeginCapture first, mode relaxed or thread-local), instead of doing it. Any part of a step can be
captured, also all of it: prefetch, unshard and reshard; acquire, put and reduce gradients; finish_grads,
scale_grads, get_grad_norm, clip_grads and apply_grads; publish_weights; and step_adamw. step_adamw is captured once,
with step 0 in its options, and its lr is that of each replay. get_grad_norm, clip_grads and apply_grads have NULL
for norm and mesh, and fsdp_get_last_norm tells the norm of a replay. Ranks meet in these three, which are
UNSUPPORTED where the context has had other models, as is fsdp_prepare_replay then. All streams given must be in the
capture: `stream`, and those forked from it. Overwriting and adding gradients are two captures: of a first
micro-batch, and of a later one. INVALID_STATE meanwhile: calls for which the host must wait (norms that it is told,
check_grads, load, read), begin_update and discard_step. So are streams that are not in the capture, calls of the
context's other models, whose work could be drawn into the graph, and closing the context. A call of the model that
fails, whatever its error, is missing in the graph: fsdp_end_capture fails then. (Not so BUSY and INVALID_HANDLE,
which come before the model is looked at: a call that ends so must be made again, or the graph lacks it unnoticed.
FSDP_GRAD_NO_WAIT makes no call BUSY on a CUDA device.) Where this call itself has failed, fsdp_end_capture may be
called all the same, for peers whose call has not failed. It fails on every rank with the error of this one, and the
next capture is as good as any.
Collective: the mesh, though ranks meet only in fsdp_end_capture: they must capture the same. Blocks: until the
library's work on this rank is done. Errors: INVALID_STATE (the stream is not being captured, another capture is
under way), UNSUPPORTED, TIMEOUT (the library's work has not ended), SYSTEM. UNSUPPORTED: the host device,
FSDP_SCHEDULE_ANY, or a parameter with FSDP_MISSING_GRAD_SKIP. Calls between here and the end are UNSUPPORTED where
ranks exchange through memory of the host, which no graph can hold. Since 0.2.
```
"""
@inline fsdp_begin_capture(model, stream) =
    @waits libfsdp.fsdp_begin_capture(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Joins the library's streams to `stream`, so that its capture can end, and puts the model back into the state from
before fsdp_begin_capture: nothing has been done yet. Afterwards the caller ends the capture, instantiates and keeps
the graph. It fails on every rank, naming the rank, the call and its error, if a call since fsdp_begin_capture has
failed on one of them, or if one cannot end its capture. Then too the capture is over and the model is as before;
drop what cudaStreamEndCapture gives.
Collective: the mesh (compares what was captured). Blocks: peers. Errors: INVALID_STATE, MISMATCH, PEER_FAILED,
TIMEOUT. Since 0.2.
```
"""
@inline fsdp_end_capture(model, stream, capture) =
    @waits libfsdp.fsdp_end_capture(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, capture::Ptr{Ptr{fsdp_capture}})::Int32

raw"""
```text
Call this before each launch of the graph on `stream`. It checks that the model is in the state in which it was
captured. It orders the graph after the library's earlier work, and gives the device the step's lr and bias
corrections. lr counts only if the capture has a step; it is finite and the same on every rank. Then launch the graph
and call fsdp_commit_replay, or fsdp_cancel_replay if there was no launch, with the same stream, which lives until
then; in between other calls of the model are INVALID_STATE. If a rank cannot replay (another state, a step that
failed, a capture under way), it fails on every rank, naming that rank and what differs, and the model is as before.
Collective: the mesh. Blocks: peers; the GPU only with 64 replays under way. Errors: INVALID_STATE (says what
differs), INVALID_ARGUMENT, INVALID_HANDLE (the model was destroyed), MISMATCH (ranks replay different captures or
give another lr), PEER_FAILED, TIMEOUT (also: an earlier replay has not ended within timeout_ms), SYSTEM. Since 0.2.
```
"""
@inline fsdp_prepare_replay(capture, lr, stream) =
    @waits libfsdp.fsdp_prepare_replay(capture::Ptr{fsdp_capture}, lr::Float64, stream::Ptr{Cvoid})::Int32

raw"""
```text
After the graph was launched on `stream`: the model goes on as if the captured calls had been made, and later calls
come after the graph. One that does not end, since a peer launched none, ends later waits by TIMEOUT, which names the
capture.
Collective: no. Blocks: no. Errors: INVALID_STATE (not prepared), INVALID_ARGUMENT (not the stream of the
preparation), SYSTEM (nothing can be ordered behind the graph: the context has failed). Since 0.2.
```
"""
@inline fsdp_commit_replay(capture, stream) =
    @returns libfsdp.fsdp_commit_replay(capture::Ptr{fsdp_capture}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Instead of fsdp_commit_replay where the graph was not launched, say since its launch failed: the model is as before
fsdp_prepare_replay. All ranks must do so: where some have committed and others given up, the next call in which they
meet is a MISMATCH that names both.
Collective: the mesh, though ranks meet only later. Blocks: no. Errors: as fsdp_commit_replay. Since 0.2.
```
"""
@inline fsdp_cancel_replay(capture, stream) =
    @returns libfsdp.fsdp_cancel_replay(capture::Ptr{fsdp_capture}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Give the handle back; NULL is allowed. Between fsdp_prepare_replay and fsdp_commit_replay it gives the replay up, as
fsdp_cancel_replay does. A graph that runs needs the handle no more. The graphs themselves, executable or not, are
the caller's, which destroys them before the model: they refer to its memory. NCCL does not end a communicator before
the last graph that captured its collectives; the model's end then takes some seconds, and the log says so. Threads:
any. Since 0.2.
```
"""
@inline fsdp_destroy_capture(capture) =
    @returns libfsdp.fsdp_destroy_capture(capture::Ptr{fsdp_capture})::Cvoid

raw"""
```text
Write this rank's timeline to a file: the last trace_events events since the context began, in the Trace Event Format
(JSON) that Perfetto and chrome://tracing read. The file appears, or replaces the one of that name, when it is whole.
docs/guides/trace.md says what is in it and how files of several ranks become one.
Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed. The
file has mode 0600; only a regular file is replaced: a link, pipe, socket or device is SYSTEM, as is a limit of file
sizes.
Errors: INVALID_ARGUMENT, INVALID_STATE (no trace is kept), SYSTEM (errno is named). Since 0.2.
```
"""
@inline fsdp_write_trace(context, path) =
    @waits libfsdp.fsdp_write_trace(context::Ptr{fsdp_context}, path::Cstring)::Int32

raw"""
```text
Write this rank's flight record to a file: its last calls and collectives (flight_events of both), what the caller
waits for, and the error that failed the context, if any. It is written without this call when the context fails and
a directory is given. `fsdp-info flight` reads the files of several ranks; docs/guides/debugging-a-hang.md explains.
Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
Errors: INVALID_ARGUMENT, INVALID_STATE (a planning context), SYSTEM (errno is named). Since 0.2.
```
"""
@inline fsdp_write_flight_record(context, path) =
    @waits libfsdp.fsdp_write_flight_record(context::Ptr{fsdp_context}, path::Cstring)::Int32

raw"""
```text
Begin a span of the caller's own in the timeline, say "forward"; spans nest, up to 64. name is UTF-8 of 1-255 bytes;
a context keeps at most 256 different ones. Does nothing without FSDP_CONTEXT_TRACE. Collective: no. Blocks: no.
Errors: INVALID_ARGUMENT (one name too many), INVALID_STATE (64 are open). Since 0.2.
```
"""
@inline fsdp_begin_span(context, name) =
    @returns libfsdp.fsdp_begin_span(context::Ptr{fsdp_context}, name::Cstring)::Int32

raw"""
End the span that was begun last. Collective: no. Blocks: no. Errors: INVALID_STATE (none is open). Since 0.2.
"""
@inline fsdp_end_span(context) =
    @returns libfsdp.fsdp_end_span(context::Ptr{fsdp_context})::Int32
