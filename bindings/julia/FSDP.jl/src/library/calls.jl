# SPDX-License-Identifier: Apache-2.0
# Written by bindings/julia/generate.py from bindings/abi/abi.json: do not edit.
# The calls of fsdp.h. @waits is for those that may take long.

raw"""
```text
Get the detail of the last failing call: with a context the last one on this context, whichever thread made it; with
NULL the last one of the calling thread, on any context or none. status is FSDP_OK if no call has failed.
Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_get_last_error(context, error) =
    @returns libfsdp.fsdp_get_last_error(context::Ptr{fsdp_context}, error::Ptr{fsdp_error})::Int32

raw"""
```text
The message of the calling thread's last failing call, on whichever context; "" if no call has failed. The text lives
until the next failing call of that thread. Threads: any. Since 0.2.
```
"""
@inline fsdp_get_last_message() =
    @returns libfsdp.fsdp_get_last_message()::Cstring

raw"""
The name of a status as text, such as "FSDP_TIMEOUT"; static, never NULL. Threads: any. Since 0.2.
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
Describe what this build contains and how it was configured, as text lines of "key: value". The first lines have the
version, the backends and the instruction set in use. Then comes each environment variable of the library with its
value and, in parentheses, "environment" or "default". For FSDP_JOB_SECRET the text says only whether it is set.
buffer and size_bytes work as in fsdp_describe_model. Threads: any. Since 0.2.
```
"""
@inline fsdp_describe_build(buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_build(buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
Bytes of one element; 0 for an unknown dtype. Threads: any. Since 0.2.
"""
@inline fsdp_get_dtype_size(dtype) =
    @returns libfsdp.fsdp_get_dtype_size(dtype::Int32)::UInt64

raw"""
```text
Join the job. Without a world_size in the options the launcher's variables decide. The first launcher in this list
whose variables are set counts:
  torchrun, fsdp-run  RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with LOCAL_RANK and LOCAL_WORLD_SIZE; the port is
                      MASTER_PORT + 1 if TORCHELASTIC_USE_AGENT_STORE is True, because torch's store listens at
                      MASTER_PORT
  Open MPI            OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
  Slurm               SLURM_PROCID and SLURM_STEP_ID, with SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID
  MPICH (Hydra)       PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
If none of them is set, the job is a world of one. If only some variables of a launcher are set, the call fails with
INVALID_ARGUMENT, and the message names what is missing. FSDP_RENDEZVOUS (with the values of rendezvous in the
options) replaces MASTER_ADDR and MASTER_PORT as the place to meet. Open MPI and MPICH give no address, so their
ranks need FSDP_RENDEZVOUS if they are on several hosts. Ranks with different FSDP_RESTART_COUNT (fsdp-run
--max-restarts) do not join the same job. A log line at FSDP_LOG_INFO says what was used.

If the launcher says that all ranks are on one host, they connect by a unix socket. They must have the same user, and
the same job secret if FSDP_JOB_SECRET or FSDP_JOB_SECRET_FILE is set. The secret's file is a regular file of 1 to
4,096 bytes that belongs to the user or root, and no other user may read it. If the launcher does not say that the
ranks are on one host, they connect by TCP: rank 0 listens at the rendezvous until all have come. Both ends of a
connection prove the job secret before anything else is read; without a secret only loopback addresses are served. A
job has at most 16,384 ranks, 1,024 on one host. See docs/guides/launchers.md.

Messages between hosts go over UCX if every rank has an RDMA device, and otherwise over TCP. These TCP connections
prove the job secret as well. FSDP_NET (auto, tcp, ucx; the same on every rank) can choose one of the two. See
docs/guides/network.md.
Collective: the job. Blocks: peers. Threads: any.
Errors: INVALID_ARGUMENT, MISMATCH (FSDP_NET differs), TIMEOUT, PEER_FAILED, SYSTEM, OUT_OF_MEMORY, UNSUPPORTED.
UNSUPPORTED: FSDP_NET is ucx, and a rank has no UCX, or its UCX may use TCP and FSDP_UCX_TCP=trusted is not set on
every rank. (If UCX uses TCP, any process that reaches UCX's port can write the memory of that rank.) Since 0.2.
```
"""
@inline fsdp_create_context(options, context) =
    @waits libfsdp.fsdp_create_context(options::Ptr{fsdp_context_options}, context::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Make world_size contexts in this process, one for each thread that will act as a rank. contexts is an array of
world_size elements, at most 1,024. Each context is then used by one thread at a time. Collective calls on different
contexts must come from different threads. world_size and rank in the options are ignored. On failure all entries are
NULL; but if world_size is above 16,384, no entry is touched.
Collective: no. Blocks: local work. Threads: any. Errors: INVALID_ARGUMENT, SYSTEM, OUT_OF_MEMORY. Since 0.2.
```
"""
@inline fsdp_create_local_contexts(world_size, options, contexts) =
    @waits libfsdp.fsdp_create_local_contexts(world_size::UInt32, options::Ptr{fsdp_context_options},
        contexts::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Make a context that only plans: rank `rank` of an imagined world. Meshes, models and groups are declared and sealed
by the same calls as in a real run, but nothing is allocated and no peer is contacted. fsdp_get_role_bytes,
fsdp_get_model_info, fsdp_get_chunk and fsdp_describe_model answer as they would in the real run, to the byte
(fsdp_get_role_bytes names one exception). Calls that would touch data return INVALID_STATE. So a laptop can plan a
job of 16,384 ranks, which is the maximum.
Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_create_plan_context(world_size, rank, options, context) =
    @returns libfsdp.fsdp_create_plan_context(world_size::UInt32, rank::UInt32, options::Ptr{fsdp_context_options},
        context::Ptr{Ptr{fsdp_context}})::Int32

raw"""
```text
Leave the job in good order: the call waits until every rank has made it. Destroy the context afterwards, also on
failure. If a checkpoint is being saved, the call waits for it first. If the save fails, this call closes the context
and returns the save's error.
Collective: the job. Blocks: peers. Errors: INVALID_STATE (a model has unfinished work), PEER_FAILED, TIMEOUT, and
the errors of fsdp_wait_checkpoint. Since 0.2.
```
"""
@inline fsdp_close_context(context) =
    @waits libfsdp.fsdp_close_context(context::Ptr{fsdp_context})::Int32

raw"""
```text
Fail the context for good and wake its waiting calls, on this rank and on the other ranks of the job. The call only
sets a flag and returns. At the latest a second later every call of the other ranks fails with PEER_FAILED, also on
ranks that wait for no peer; only destroy and the getters that any thread may call still work. fsdp_get_context_error
and fsdp_get_failed_ranks then tell which rank has aborted. reason may be NULL.
Collective: no. Blocks: no. Threads: any, also while another call runs. Since 0.2.
```
"""
@inline fsdp_abort_context(context, reason) =
    @returns libfsdp.fsdp_abort_context(context::Ptr{fsdp_context}, reason::Cstring)::Int32

raw"""
```text
Give the handle back. The call never waits for peers. From then on calls on models, groups, meshes, captures and
checkpoints of the context return INVALID_HANDLE. These handles must still be destroyed, in any order. NULL is
allowed. If a rank leaves without fsdp_close_context, peers that wait for it get PEER_FAILED; the other peers go on.
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
The error that failed the context for good; its status is FSDP_OK if there is none. Threads: any. Since 0.2.
"""
@inline fsdp_get_context_error(context, error) =
    @returns libfsdp.fsdp_get_context_error(context::Ptr{fsdp_context}, error::Ptr{fsdp_error})::Int32

raw"""
```text
The ranks that the error of fsdp_get_context_error blames, in ascending order: all ranks that died together, stopped,
or did not come in time. fsdp_error.rank is one of them. *rank_count is the room in ranks on entry and their number
on return. The number is 0 if the context has not failed or no rank is to blame (a network that is cut, a wait that
was interrupted). With ranks NULL the call gives only the number.
Collective: no. Blocks: no. Threads: any, also while another call runs.
Errors: INVALID_ARGUMENT (too little room: *rank_count is set to what is needed, nothing else is written). Since 0.2.
```
"""
@inline fsdp_get_failed_ranks(context, ranks, rank_count) =
    @returns libfsdp.fsdp_get_failed_ranks(context::Ptr{fsdp_context}, ranks::Ptr{UInt32},
        rank_count::Ptr{UInt64})::Int32

raw"""
```text
Reduce a few doubles (at most 512) in place, for example the global loss. The values are reduced over the ranks of a
mesh, in the mesh's order; with mesh NULL over all ranks of the job, in rank order. If a value is NaN on any rank,
its result is NaN.
Collective: the mesh, or the job. Blocks: peers. Errors: INVALID_ARGUMENT, MISMATCH (counts or ops differ),
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_all_reduce_values(context, mesh, values, value_count, op) =
    @waits libfsdp.fsdp_all_reduce_values(context::Ptr{fsdp_context}, mesh::Ptr{fsdp_mesh}, values::Ptr{Float64},
        value_count::UInt64, op::Int32)::Int32

raw"""
```text
Wait until the stream has finished everything that was enqueued on it before this call, by the program and by the
library. Unlike cudaStreamSynchronize, this wait always ends: when its time limit has passed, when the interrupted
hook or flag asks for it, or when the context fails, with the context's error. If timeout_ms is not 0, it is a limit
for this call alone: a TIMEOUT ends the call and does not fail the context, because a long kernel is no failure. If
timeout_ms is 0, the limit is the timeout_ms of the context, and a TIMEOUT fails the context, as it does in every
other wait. On the host device stream must be NULL, and the call returns at once. On a GPU the call creates and
destroys a CUDA event.
Collective: no. Blocks: until the GPU has done the work, and so until peers have done what that work waits for.
Stream: any stream of the context's GPU, unless the stream is being captured. Errors: INVALID_ARGUMENT (host device:
stream is not NULL), INVALID_STATE (a planning context, or a stream that is being captured), TIMEOUT, INTERRUPTED,
PEER_FAILED, SYSTEM. Since 0.2.
```
"""
@inline fsdp_wait_stream(context, stream, timeout_ms) =
    @waits libfsdp.fsdp_wait_stream(context::Ptr{fsdp_context}, stream::Ptr{Cvoid}, timeout_ms::UInt32)::Int32

raw"""
```text
Arrange ranks as replicate x shard. Rank r of the mesh is in replica r / shard_size, at place r % shard_size of its
shard axis. If the options have a list of ranks, every rank in it passes the same list. A rank may be in several
meshes (for example one for dense and one for expert parameters).

Replicas exchange only sums of gradients (HSDP; with FSDP_OUTER_OPTIM also weights, see fsdp_outer_strategy). They
may be on different hosts, while the ranks of each replica's shard axis share a host. The shard axis of a mesh with
one replica may span several hosts. Each host must then have the same number of ranks, which are consecutive in the
mesh. Every host keeps one copy of the compute weights, which are gathered over hosts once a step; everything else is
sharded over all ranks.

Gradients of the shard axis are added in rank order. With reduction_block_size B, a divisor of shard_size, ranks [0,
B) are added and their sum is scaled, then [B, 2 B) and so on; at last the sums of the blocks are added in order. An
axis over several hosts is always added in blocks, and each host is a block. An axis on one host with the same blocks
gets the same bits. Over several hosts B must be the number of ranks of a host, or 0; any other B is UNSUPPORTED.

Collective: the ranks of the mesh. Blocks: no.
Errors: INVALID_ARGUMENT (the sizes do not multiply to the number of ranks), UNSUPPORTED (an axis is not spread
evenly over its hosts). Since 0.2.
```
"""
@inline fsdp_create_mesh(context, options, mesh) =
    @returns libfsdp.fsdp_create_mesh(context::Ptr{fsdp_context}, options::Ptr{fsdp_mesh_options},
        mesh::Ptr{Ptr{fsdp_mesh}})::Int32

raw"""
Give the handle back. Models made from the mesh keep what they need. NULL is allowed. Threads: any. Since 0.2.
"""
@inline fsdp_destroy_mesh(mesh) =
    @returns libfsdp.fsdp_destroy_mesh(mesh::Ptr{fsdp_mesh})::Cvoid

raw"""
```text
Create an empty model. Collective: the mesh. Blocks: no. Memory: none until the seal.
Errors: INVALID_ARGUMENT, INVALID_HANDLE, UNSUPPORTED. Since 0.2.
```
"""
@inline fsdp_create_model(context, options, model) =
    @returns libfsdp.fsdp_create_model(context::Ptr{fsdp_context}, options::Ptr{fsdp_model_options},
        model::Ptr{Ptr{fsdp_model}})::Int32

raw"""
```text
Give the handle back, with the model's groups and memory. NULL is allowed. The call never waits for peers. If peers
are in a collective of this model or enter one, they get a TIMEOUT that names this rank, unless they destroy their
model too. Threads: any. Since 0.2.
```
"""
@inline fsdp_destroy_model(model) =
    @returns libfsdp.fsdp_destroy_model(model::Ptr{fsdp_model})::Cvoid

raw"""
```text
Set the order in which groups will be visited. The order decides prefetch and the plan of the buffers; the default is
SEQUENTIAL. A training step may deviate from the order: an unused prefetch is dropped, and a hold that does not fit
is an error that names both groups. With ANY this error names held_groups and the groups that hold the buffers.
Collective: the mesh. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (sealed). Since 0.2.
```
"""
@inline fsdp_set_schedule(model, kind, options) =
    @returns libfsdp.fsdp_set_schedule(model::Ptr{fsdp_model}, kind::Int32, options::Ptr{fsdp_schedule_options})::Int32

raw"""
```text
Add a named state tensor for the caller's own optimizer, or beside the states of AdamW (for example a moving average
of the weights). In each shard the state has as many elements as the main weights. It is zeroed at the seal, and
saved and loaded with the other states. All parameters that are not FROZEN have the state. But if AdamW updates some
of them and the caller others (fsdp_param.optimizer), only those that the caller updates have it.
Collective: the mesh. Blocks: no.
Errors: INVALID_ARGUMENT (the name is taken, with AdamW also "step" and the names of AdamW's states; the name is not
UTF-8 of 1-63 bytes), INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_add_optimizer_state(model, name, dtype) =
    @returns libfsdp.fsdp_add_optimizer_state(model::Ptr{fsdp_model}, name::Cstring, dtype::Int32)::Int32

raw"""
```text
Hand in the memory of a role, aligned to 4096 bytes and at least as large as fsdp_get_role_bytes of a planning
context says. Only roles that peers do not read can be handed in: MAIN, OPTIMIZER, GATHER, and GRAD if no group is
NO_SHARD or reduced once a step. Other roles are UNSUPPORTED. On a CUDA device the memory must belong to that device.
The memory must outlive the model. The model may live on after fsdp_destroy_model returns: while a save still holds
it, or while another thread is inside one of its calls. Collective: no. Blocks: no.
Errors: INVALID_ARGUMENT, INVALID_STATE (sealed), UNSUPPORTED. The seal reports a size that is too small. Since 0.2.
```
"""
@inline fsdp_set_arena(model, role, data, size_bytes) =
    @returns libfsdp.fsdp_set_arena(model::Ptr{fsdp_model}, role::Int32, data::Ptr{Cvoid}, size_bytes::UInt64)::Int32

raw"""
```text
List what fsdp_seal_model would refuse in this rank's declarations, as text with one violation a line; no violation
gives an empty text. Sizes and arenas are checked only if groups and visits are right. Problems that only show
when ranks are compared or memory is allocated are not in the text. buffer and size_bytes work as in
fsdp_describe_model.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (sealed). Since
0.2.
```
"""
@inline fsdp_check_model(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_check_model(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Fix the layout, plan and allocate all memory, and compare what every rank declared (names, order, shapes, dtypes,
flags, policy, layout hash). A model needs at least one group, which may have no parameters. The first difference is
reported on every rank with both ranks' values. Afterwards the model is in its update window: load parameters, then
call fsdp_publish_weights.
Collective: the mesh. Blocks: peers. Memory: all that the model will ever use.
Errors: MISMATCH, INVALID_STATE, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. INVALID_ARGUMENT
also reports a size beyond 64 bits, or two tensors that would have the same name in a checkpoint. If ranks that share
a memory cgroup need more than it has free, OUT_OF_MEMORY comes before anything is allocated. If the call fails on
one rank, it fails on all ranks with the same status. Since 0.2.
```
"""
@inline fsdp_seal_model(model) =
    @waits libfsdp.fsdp_seal_model(model::Ptr{fsdp_model})::Int32

raw"""
```text
The bytes of a role, or of FSDP_ROLE_ALL, on rank `rank` of a sealed model's mesh, as the plan has them. rank may be
any rank that is in all meshes of this rank; if no group has a mesh of its own, these are all ranks of the model. If
a planning context for a GPU names no device_transport, the bytes of FSDP_ROLE_STAGING are the maximum over the
transports that the seal may choose.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_role_bytes(model, role, rank, bytes) =
    @returns libfsdp.fsdp_get_role_bytes(model::Ptr{fsdp_model}, role::Int32, rank::UInt32, bytes::Ptr{UInt64})::Int32

raw"""
```text
The bytes of a role, or of FSDP_ROLE_ALL, that this rank has allocated, as the allocator counted them. They equal
the bytes of fsdp_get_role_bytes. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or
only planned). Since 0.2.
```
"""
@inline fsdp_get_allocated_bytes(model, role, bytes) =
    @returns libfsdp.fsdp_get_allocated_bytes(model::Ptr{fsdp_model}, role::Int32, bytes::Ptr{UInt64})::Int32

raw"""
```text
Get size and layout of a model. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed).
 Since 0.2.
```
"""
@inline fsdp_get_model_info(model, info) =
    @returns libfsdp.fsdp_get_model_info(model::Ptr{fsdp_model}, info::Ptr{fsdp_model_info})::Int32

raw"""
Get the counters since the seal. Collective: no. Blocks: no. Errors: INVALID_STATE (not sealed). Since 0.2.
"""
@inline fsdp_get_stats(model, stats) =
    @returns libfsdp.fsdp_get_stats(model::Ptr{fsdp_model}, stats::Ptr{fsdp_stats})::Int32

raw"""
```text
Describe the layout of a sealed model as JSON: groups, buckets, parameters with offsets, padding, pool slots, hash.
*size_bytes is the buffer's size on entry, and on return the size needed with the final NUL. buffer may be NULL to
ask for the size alone.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_describe_model(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_model(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Declare a group of param_count parameters. The descriptors follow each other at a distance of param_stride bytes,
which is sizeof(fsdp_param). The group's name is UTF-8 of 1-255 bytes and unique among the model's groups. Parameters
of different dtypes, row sizes and trainability may mix; the library splits the group internally. A group without
parameters is legal.
A group may have a mesh of its own, for example experts. With 4 ranks and expert-parallel 2, ranks 0 and 2 name the
mesh {0, 2} for a group; ranks 1 and 3 name the mesh {1, 3}. Each rank declares the same groups in the same order.
Parameters with the same index in different meshes are different parameters: they have the same shape and options,
but their values, names, global_shape and global_offset may differ. Parameters with one name in several meshes are
boxes of one tensor; boxes that are equal hold the same values, and norms and checkpoints count them once. Calls that
load or read one parameter are collective over the group's mesh. Settings such as lr_scale and trainability must be
equal on all ranks of the model. All ranks of the model also call the reduces, and on GPUs the gathers, of all groups
in one order.
Collective: the model's mesh (compared at the seal). Blocks: no. Memory: none until the seal.
Errors: INVALID_ARGUMENT (naming the parameter and field), INVALID_STATE (sealed). Since 0.2.
```
"""
@inline fsdp_create_group(model, name, params, param_count, param_stride, options, group) =
    @returns libfsdp.fsdp_create_group(model::Ptr{fsdp_model}, name::Cstring, params::Ptr{fsdp_param},
        param_count::UInt64, param_stride::UInt64, options::Ptr{fsdp_group_options}, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
Get the number of groups that were created. Threads: any, once sealed. Since 0.2.
"""
@inline fsdp_get_group_count(model, group_count) =
    @returns libfsdp.fsdp_get_group_count(model::Ptr{fsdp_model}, group_count::Ptr{UInt64})::Int32

raw"""
```text
Get the group with that index, in the order of creation. The handle is the one that fsdp_create_group returned.
 Threads: any, once sealed. Since 0.2.
```
"""
@inline fsdp_get_group(model, group_index, group) =
    @returns libfsdp.fsdp_get_group(model::Ptr{fsdp_model}, group_index::UInt64, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
Find the group of that name. Threads: any, once sealed. Errors: INVALID_ARGUMENT (no such group). Since 0.2.
"""
@inline fsdp_find_group(model, name, group) =
    @returns libfsdp.fsdp_find_group(model::Ptr{fsdp_model}, name::Cstring, group::Ptr{Ptr{fsdp_group}})::Int32

raw"""
Get a group's declaration. Strings live as long as the model. Threads: any, once sealed. Since 0.2.
"""
@inline fsdp_get_group_info(group, info) =
    @returns libfsdp.fsdp_get_group_info(group::Ptr{fsdp_group}, info::Ptr{fsdp_group_info})::Int32

raw"""
```text
Find the parameter of that name, which is unique in the model. Threads: any, once sealed. Errors: INVALID_ARGUMENT
 (no such parameter). Since 0.2.
```
"""
@inline fsdp_find_param(model, name, group, param_index) =
    @returns libfsdp.fsdp_find_param(model::Ptr{fsdp_model}, name::Cstring, group::Ptr{Ptr{fsdp_group}},
        param_index::Ptr{UInt64})::Int32

raw"""
```text
Get the descriptor as it was declared, with defaults filled in and the current lr_scale. fsdp_create_group accepts
 this descriptor. Threads: any, once sealed. Errors: INVALID_ARGUMENT. Since 0.2.
```
"""
@inline fsdp_get_param_info(group, param_index, param) =
    @returns libfsdp.fsdp_get_param_info(group::Ptr{fsdp_group}, param_index::UInt64, param::Ptr{fsdp_param})::Int32

raw"""
```text
Load a parameter from full data: element_count elements of dtype, in C order. With root FSDP_EVERY_RANK every rank
passes the same data and nothing is communicated. Otherwise rank `root` passes the data, and data should be NULL on
the other ranks. A rank that passes NULL may pass any dtype and element_count; data that is not NULL is checked as
the root's data is. The data may be freed when the call returns. flags must be 0.
Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Memory:
for a FROZEN quantized parameter 4 bytes for each element that this rank owns, during the call, because the planes
are made when all data has come. Errors: INVALID_ARGUMENT, INVALID_STATE (window closed), OUT_OF_MEMORY, PEER_FAILED,
TIMEOUT. If the root's data, dtype or element_count is wrong, all ranks get INVALID_ARGUMENT. Any other wrong
argument fails the call only on the rank that passed it, and the other ranks wait for that rank. With a root all
ranks get OUT_OF_MEMORY, else only this rank does. After OUT_OF_MEMORY the planes have their old values: load the
parameter again before the next publish. Since 0.2.
```
"""
@inline fsdp_load_param(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_param(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Copy a whole parameter out: the main weights (for a frozen parameter the compute weights), converted to dtype. With
root FSDP_EVERY_RANK every rank gets the data; otherwise only rank `root` gets it, and data may be NULL on the
others. flags must be 0. The data arrives in blocks from the ranks that own it, so if a peer fails, a part of data
may have been written.
Collective: the group's mesh (root is one of its ranks). Blocks: peers. Window: either; while the window is open, no
rank may write main weights during the call. Memory: for a FROZEN quantized parameter all its codes and scales during
the call, on each rank that gets the data; on a GPU this is page-locked host memory. Errors: INVALID_ARGUMENT,
INVALID_STATE, OUT_OF_MEMORY (on every rank that sends or gets some of the data), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_read_param(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_param(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Get a read-only view of a parameter's full compute weights. The view may be read while the parameter's piece is held
or, if the strategy keeps the weights whole, at any time outside the update window. With SEQUENTIAL and VISITS
schedules the address is the same from the seal on, in every phase. With INTERLEAVED, and in a group whose planes are
gathered by phase (fsdp_plane_policy), there are two addresses: one for FORWARD and EVAL, and one for BACKWARD.
RECOMPUTE has the address of FORWARD if planes are gathered by phase or if BACKWARD reads no weights; otherwise it
has that of BACKWARD. With ANY the address is valid while the group is held, and may differ at the next hold. Every
phase is legal here, except BACKWARD of a group with FSDP_BACKWARD_WEIGHTS_NONE.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (also if the parameter is quantized, see fsdp_get_plane),
INVALID_STATE (not sealed; not unsharded). Since 0.2.
```
"""
@inline fsdp_get_param(group, param_index, phase, tensor) =
    @returns libfsdp.fsdp_get_param(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32,
        tensor::Ptr{fsdp_tensor})::Int32

raw"""
```text
Get the views of all parameters of a group, each as from fsdp_get_param. This is for bindings, which may keep the
views where addresses are fixed. The view of a quantized parameter has data NULL. tensors is an array of tensor_count
elements, the group's number of parameters. The call sets each struct_size: to the stride, or to the size that the
library knows if that is less.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_get_params(group, phase, tensors, tensor_count, tensor_stride) =
    @returns libfsdp.fsdp_get_params(group::Ptr{fsdp_group}, phase::Int32, tensors::Ptr{fsdp_tensor},
        tensor_count::UInt64, tensor_stride::UInt64)::Int32

raw"""
```text
Get a read-only view of a whole plane of a quantized parameter's compute weights. The view may be read at the same
times as one of fsdp_get_param, and its address follows the same rules. If planes are gathered by phase, it may be
read while a hold of the phase given lasts; the ROW planes of a group have other addresses than its COLUMN planes.
Collective: no. Blocks: no.
Errors: INVALID_ARGUMENT (no such plane; the parameter is not quantized), INVALID_STATE (not sealed; not unsharded;
the phase has other planes). Since 0.2.
```
"""
@inline fsdp_get_plane(group, param_index, phase, plane, tensor) =
    @returns libfsdp.fsdp_get_plane(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32, plane::Int32,
        tensor::Ptr{fsdp_tensor})::Int32

raw"""
```text
Load a whole plane of a FROZEN quantized parameter as it is, bit for bit: element_count codes or scales in the
plane's shape and dtype (see fsdp_plane), in C order. This loads another program's quantized checkpoint without any
rounding. root and flags are as in fsdp_load_param.
Planes that belong together must be loaded together, in the same window: codes and scales, and for MXFP8 both forms.
The library does not check this.
Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Errors:
INVALID_ARGUMENT (no such plane; another dtype or count; the parameter is not quantized), INVALID_STATE (not FROZEN:
its planes are computed from main weights; window closed), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_load_plane(group, param_index, plane, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_plane(group::Ptr{fsdp_group}, param_index::UInt64, plane::Int32, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Write the scales of an MXFP8 plane, ROW_SCALE or COLUMN_SCALE, in the order in which block-scaled GEMMs read them
(VEC32_UE8M0 of cuBLASLt). If the parameter has three or more dimensions, its matrices follow each other. For an R x
C matrix, the scales of ROW planes are a matrix of R x C/32; the scales of COLUMN planes are transposed to C x R/32.
The rows and columns of this matrix of scales are rounded up to multiples of 128 and of 4. Tiles of 128 x 4 scales,
512 bytes each, follow each other, one row of tiles after the other. In a tile, scale (r, c) is byte
r % 32 * 16 + r / 32 * 4 + c; bytes beyond the scales are 0.
data is memory of the model's device. *size_bytes is its size on entry and the size needed on return. data may be
NULL to ask for the size, at any time after the seal. With data, the plane must be readable as for fsdp_get_plane,
and its hold must be returned in the order of this stream.
Collective: no. Blocks: local work on the host device, else no.
Errors: as fsdp_get_plane, and INVALID_ARGUMENT (no scales of MXFP8; too small: *size_bytes is set). Since 0.2.
```
"""
@inline fsdp_swizzle_scales(group, param_index, phase, plane, data, size_bytes, stream) =
    @waits libfsdp.fsdp_swizzle_scales(group::Ptr{fsdp_group}, param_index::UInt64, phase::Int32, plane::Int32,
        data::Ptr{Cvoid}, size_bytes::Ptr{UInt64}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Get the part of a parameter that rank `rank` stores, by arithmetic alone. On that rank fsdp_load_chunk takes this
part, and fsdp_get_shard shows it if the parameter is not FROZEN. The part is the whole parameter where every rank
has the whole (FSDP_STRATEGY_NO_SHARD). Each replica has the same parts. The rank must be in the group's mesh.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_chunk(group, param_index, rank, chunk) =
    @returns libfsdp.fsdp_get_chunk(group::Ptr{fsdp_group}, param_index::UInt64, rank::UInt32,
        chunk::Ptr{fsdp_chunk})::Int32

raw"""
```text
Load rows of a parameter that this rank owns: row_count rows from row_offset on, in C order, for example those of
fsdp_get_chunk. The rows must be in this rank's chunk; if the strategy keeps main weights whole, the chunk is all
rows. Every rank loads its own rows, and replicas do so as well. Rows are those of fsdp_param.row_dimensions. flags
must be 0. For a FROZEN quantized parameter the rows must be whole blocks: in a matrix, blocks of 32 rows (MXFP8) or
of 128 rows (FP8_BLOCK; the last block may be shorter). FP8 makes its scale of all rows, so a FROZEN parameter with
FP8 is loaded by fsdp_load_param.
Collective: no. Blocks: local work. Window: inside. Memory: as fsdp_load_param.
Errors: INVALID_ARGUMENT (rows of another rank, or parts of blocks), INVALID_STATE (window closed), UNSUPPORTED (FP8
of a FROZEN parameter), OUT_OF_MEMORY (the planes are as before). Since 0.2.
```
"""
@inline fsdp_load_chunk(group, param_index, data, dtype, row_offset, row_count, flags) =
    @waits libfsdp.fsdp_load_chunk(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        row_offset::UInt64, row_count::UInt64, flags::UInt32)::Int32

raw"""
```text
Load a named optimizer state of a parameter from full data, as fsdp_load_param does for its weights: "exp_avg" or
"exp_avg_sq" of AdamW, or one of the caller's own states. AdamW's number of steps is not part of a state and is not
changed by this call: set it once with fsdp_adamw_options.step, and later steps count on. flags must be 0.
Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window: inside. Errors:
as fsdp_load_param, and INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (frozen). Since 0.2.
```
"""
@inline fsdp_load_state(group, param_index, name, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_state(group::Ptr{fsdp_group}, param_index::UInt64, name::Cstring, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Copy a whole optimizer state of a parameter out, as fsdp_read_param does for its weights. flags must be 0.
Collective: the group's mesh (root is one of its ranks). Blocks: peers. Window: either. Errors: as fsdp_read_param,
and INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (frozen). Since 0.2.
```
"""
@inline fsdp_read_state(group, param_index, name, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_state(group::Ptr{fsdp_group}, param_index::UInt64, name::Cstring, data::Ptr{Cvoid},
        dtype::Int32, element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Give a parameter another lr_scale from the next step on. 0 makes the optimizer leave the weights alone and sets
FSDP_PARAM_LR_ZERO in the descriptor; a later value that is not 0 clears this flag. Make the same calls on every
rank. The next call that synchronizes the model's ranks (such as fsdp_finish_grads or fsdp_publish_weights) compares
the lr_scales. If they differ, that call is a MISMATCH, which names the parameter and both values; ranks that make
the lr_scales equal again can go on. Setting the current value changes nothing. A capture that contains an AdamW step
can be replayed only while the lr_scales are those of the capture.
Collective: the mesh, but the ranks synchronize only later. Blocks: no. Window: either.
Errors: INVALID_ARGUMENT (negative or not finite in fp32), INVALID_STATE (not sealed; frozen; a capture is under
way), OUT_OF_MEMORY (nothing has changed). Since 0.2.
```
"""
@inline fsdp_set_param_lr_scale(group, param_index, lr_scale) =
    @returns libfsdp.fsdp_set_param_lr_scale(group::Ptr{fsdp_group}, param_index::UInt64, lr_scale::Float64)::Int32

raw"""
```text
Stop training a parameter, or train it again. An untrained parameter has no gradient: fsdp_put_grad and
fsdp_acquire_grad refuse it like a FROZEN one, fsdp_acquire_grads lends nothing for it, and fsdp_reduce_grad does not
require its gradient. In a group without trained parameters fsdp_reduce_grad does nothing and need not be called.
fsdp_apply_grads still has an entry for the parameter, with data NULL. Steps leave its weights and states unchanged,
also by weight decay. fsdp_shard.flags has FSDP_PARAM_FROZEN, and the main gradient is zeros, also in norms.
fsdp_get_param_info shows the parameter as declared. The planned memory does not change. A parameter that was
declared FROZEN cannot be trained.
Collective: no, but train the same parameters on every rank. The next call that synchronizes the model's ranks, at
the latest the end of the step, compares which parameters are trained. If a rank reduces another group than its peers
before that call, the collective fails at once with MISMATCH, and the contexts have failed. Blocks: no.
Window: either, but only between steps: no gradient may have been acquired since the last publish, and an open window
must have no gradients. A graph captured earlier can be replayed only while the trained parameters are those of
its capture.
Errors: INVALID_ARGUMENT (trainable is neither 0 nor 1), INVALID_STATE (FROZEN; within a step; captured). Since 0.2.
```
"""
@inline fsdp_set_param_trainable(group, param_index, trainable) =
    @returns libfsdp.fsdp_set_param_trainable(group::Ptr{fsdp_group}, param_index::UInt64, trainable::Int32)::Int32

raw"""
```text
Start gathering a group ahead of its unshard. The schedule does this on its own; make this call if the order differs
from the schedule. If the group is gathered already, the call costs nothing. It does nothing if no buffer is free, or
with FSDP_CONTEXT_DEBUG. On the host device the calling thread copies a short group (docs/contracts/memory.md) at
once, which takes less time than waking another thread. flags must be 0.
Collective: no (the rank pulls what peers have published); on a CUDA device the shard axis. Blocks: no. Window:
outside. Errors: INVALID_ARGUMENT, INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_prefetch(group, phase, flags, stream) =
    @returns libfsdp.fsdp_prefetch(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Make the full compute weights readable for work that follows on the stream, and take a hold. If the group is gathered
already, the call costs nothing; otherwise it gathers the group. A group is gathered once per version, and again
after its weights were released. A RECOMPUTE hold while a BACKWARD hold is pending costs nothing, unless planes are
gathered by phase (fsdp_plane_policy). flags must be 0.
Collective: no; on a CUDA device the shard axis. Blocks: peers on the host device (until every rank has published
this version). Window: outside.
Errors: INVALID_STATE (window open; no buffer free, naming both groups or pieces; pieces of the group share a buffer;
BACKWARD with FSDP_BACKWARD_WEIGHTS_NONE; RECOMPUTE and BACKWARD at once, if planes are gathered by phase),
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_unshard(group, phase, flags, stream) =
    @waits libfsdp.fsdp_unshard(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Return a hold of the phase given. When the last hold is returned, the group gives up its buffer once the work on all
streams that returned holds is done. flags must be 0. After fsdp_discard_step, which takes back all holds, the call
fails with INVALID_STATE and changes nothing; a scope that ends after the discard may ignore this error.
Collective: no; on a CUDA device the shard axis. Blocks: no. Errors: INVALID_STATE (no such hold). Since 0.2.
```
"""
@inline fsdp_reshard(group, phase, flags, stream) =
    @returns libfsdp.fsdp_reshard(group::Ptr{fsdp_group}, phase::Int32, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Make the weights of one piece of a group readable, as fsdp_unshard does for all of its pieces, and take a hold of the
piece. The piece alone is gathered, in a launch of its own. Holds are counted for each piece and phase. fsdp_unshard
holds every piece; only fsdp_reshard returns that hold. A piece that is gathered already is not gathered again,
neither by this call nor by fsdp_unshard. If visits name the group's pieces (fsdp_visit.piece), each piece has a
buffer that is planned for its own visits, and the weights of the next visits are gathered ahead. If not, the group
has one buffer, which the first hold takes and the return of the last hold gives up. Gradients belong to the whole
group. fsdp_get_param needs a hold of the parameter's piece. flags must be 0.
Collective: no; on a CUDA device the shard axis, where the comparison of the ranks' calls includes the number of the
piece. Blocks: as fsdp_unshard. Window: outside.
Errors: as fsdp_unshard; INVALID_ARGUMENT (the group has no such piece). Since 0.2.
```
"""
@inline fsdp_unshard_piece(group, piece, phase, flags, stream) =
    @waits libfsdp.fsdp_unshard_piece(group::Ptr{fsdp_group}, piece::UInt32, phase::Int32, flags::UInt32,
        stream::Ptr{Cvoid})::Int32

raw"""
```text
Return a hold of fsdp_unshard_piece, as fsdp_reshard does for the whole group. flags must be 0.
Collective: no; on a CUDA device the shard axis. Blocks: no. Errors: INVALID_ARGUMENT (no such piece), INVALID_STATE
(no such hold; a hold of fsdp_unshard is returned by fsdp_reshard). Since 0.2.
```
"""
@inline fsdp_reshard_piece(group, piece, phase, flags, stream) =
    @returns libfsdp.fsdp_reshard_piece(group::Ptr{fsdp_group}, piece::UInt32, phase::Int32, flags::UInt32,
        stream::Ptr{Cvoid})::Int32

raw"""
```text
Show the true weights of a group again after a write through its views. Every publish and fsdp_discard_step do this
for all groups. Weights that are mapped, or that the strategy keeps whole, need FSDP_VIEWS_PRIVATE: the written pages
show the compute weights again, whether the group is held or not. Copied weights, with either view_kind, are gathered
again at the next unshard, so the group must have no hold. (A model on one rank copies nothing, unless
FSDP_MODEL_FORCE_COMMUNICATION or FSDP_CONTEXT_DEBUG is set.)
Collective: no; for copied weights on a CUDA device the shard axis, because the next unshard gathers there. Blocks:
local work. Window: either. Memory: the copies of written pages are freed.
Errors: INVALID_STATE (copied weights that are held; other weights with FSDP_VIEWS_READ_ONLY), SYSTEM. Since 0.2.
```
"""
@inline fsdp_restore_view(group) =
    @waits libfsdp.fsdp_restore_view(group::Ptr{fsdp_group})::Int32

raw"""
```text
Borrow the full gradient of a parameter to write into, in grad_dtype. If *accumulate is 0, overwrite all of it; if it
is 1, add to it. With FSDP_GRAD_ZEROED it is always 1, and accumulate may be NULL. A second call before
fsdp_reduce_grad (for a tied or twice-used parameter) sets *accumulate to 1 and orders the second stream after the
first. The view ends with fsdp_complete_grad for the parameter, or else with fsdp_reduce_grad.
Collective: no. Blocks: peers on the host device, if the reduce of another part must end first, to free a buffer.
Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; completed; reduced with LAST; no buffer free, naming both groups),
BUSY (FSDP_GRAD_NO_WAIT). If the call waits for a reduce, also the errors of that reduce: MISMATCH, PEER_FAILED,
TIMEOUT.
Since 0.2.
```
"""
@inline fsdp_acquire_grad(group, param_index, flags, stream, grad, accumulate) =
    @waits libfsdp.fsdp_acquire_grad(group::Ptr{fsdp_group}, param_index::UInt64, flags::UInt32, stream::Ptr{Cvoid},
        grad::Ptr{fsdp_tensor}, accumulate::Ptr{Int32})::Int32

raw"""
```text
Borrow the full gradients of all trainable parameters of a group at once, each as by fsdp_acquire_grad. grads is an
array of grad_count elements, the group's number of parameters. accumulate is an array of the same length; with
FSDP_GRAD_ZEROED it may be NULL. A parameter that is FROZEN or not trained now (fsdp_set_param_trainable) has data
NULL and accumulate 0. struct_size is set as in fsdp_get_params.
Collective: no. Blocks: as fsdp_acquire_grad. Errors: as fsdp_acquire_grad, and
INVALID_STATE if max_pending_bytes has no room for all gradients at once. Since 0.2.
```
"""
@inline fsdp_acquire_grads(group, flags, stream, grads, grad_count, grad_stride, accumulate) =
    @waits libfsdp.fsdp_acquire_grads(group::Ptr{fsdp_group}, flags::UInt32, stream::Ptr{Cvoid},
        grads::Ptr{fsdp_tensor}, grad_count::UInt64, grad_stride::UInt64, accumulate::Ptr{Int32})::Int32

raw"""
```text
Hand in the caller's own full gradient: element_count elements of dtype. They are copied, or added where
fsdp_acquire_grad would set *accumulate to 1. On the host device this is done when the call returns, on a GPU it is
done in stream order. data NULL means "no gradient": it counts as zeros (but see fsdp_missing_grad). flags:
FSDP_GRAD_NO_WAIT.
Collective: no. Blocks: as fsdp_acquire_grad. Errors: as fsdp_acquire_grad. Since 0.2.
```
"""
@inline fsdp_put_grad(group, param_index, data, dtype, element_count, flags, stream) =
    @waits libfsdp.fsdp_put_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Declare a parameter's gradient of this contribution complete. Until fsdp_reduce_grad the caller must not write into
it or put it again. A group may be reduced in parts (max_pending_bytes). The library begins to reduce a part, or an
undivided group, as soon as all of its trainable parameters are complete. Once a part is reduced, its buffer can be
lent for other gradients while the rest of the group is written. fsdp_reduce_grad must still be called: it ends the
contribution.
Complete parameters from the last to the first, in the order of a backward pass. Ranks may complete the parameters of
a part in different orders, but they must reduce parts in the same order. A rank may leave parts to fsdp_reduce_grad,
which reduces them from the last to the first. With FSDP_REDUCE_POLICY_LAST nothing is reduced before
fsdp_reduce_grad. `stream` orders no work: the reduce waits for the streams that were given to fsdp_acquire_grad or
fsdp_put_grad. flags must be 0.
Collective: the mesh. Blocks: no. Window: outside. Errors: INVALID_ARGUMENT, INVALID_STATE (frozen; no gradient yet;
completed already; reduced with FSDP_LAST), MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_complete_grad(group, param_index, flags, stream) =
    @returns libfsdp.fsdp_complete_grad(group::Ptr{fsdp_group}, param_index::UInt64, flags::UInt32,
        stream::Ptr{Cvoid})::Int32

raw"""
```text
End one contribution (micro-batch) of a group: its gradients are complete. The call reduces into the main grads what
fsdp_complete_grad has not reduced. Every trainable parameter must have been acquired or put. With
FSDP_REDUCE_POLICY_LAST only the call with FSDP_LAST communicates. The buffer is free for other groups or parts
once its reduce has ended; a call that needs it sooner waits.
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
phase is left. It waits for all reduces, multiplies main grads by scale (1 leaves them as they are), and opens the
update window once every rank has made this call. If anything is missing on any rank, every rank's error lists it.
With the flag FSDP_LAST, on all ranks, groups need not have been reduced with LAST: this call ends the contributions
of each such group, in reverse declared order, with the same bits. A group without a contribution is reduced as
zeros, as if each parameter had been put NULL. Groups that were reduced with LAST stay as they are.
After a failure that leaves the context alive, go on with fsdp_discard_step on every rank. Until then getters,
traces, fsdp_reshard of held groups and destroy calls are still legal; fsdp_close_context and every other call of the
step return INVALID_STATE.
Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since
0.2.
```
"""
@inline fsdp_finish_grads(model, scale, flags, stream) =
    @waits libfsdp.fsdp_finish_grads(model::Ptr{fsdp_model}, scale::Float64, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Copy a whole main gradient out, converted to dtype: the reduced and scaled gradient of the step, as the optimizer
will see it. Otherwise the call works as fsdp_read_param. Collective: the group's mesh (root is one of its ranks).
Blocks: peers. Window: inside, with gradients. Errors: as fsdp_read_param, and INVALID_STATE (FROZEN; no gradients in
this window). Since 0.2.
```
"""
@inline fsdp_read_grad(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_read_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Replace a main gradient by full data, as fsdp_load_param replaces weights, for example after a transformation of the
whole gradient. Collective: the group's mesh (root is one of its ranks). Blocks: peers, if there is a root. Window:
inside, with gradients. Errors: as fsdp_load_param, and INVALID_STATE (FROZEN or not trained; no gradients in this
window). Since 0.2.
```
"""
@inline fsdp_load_grad(group, param_index, data, dtype, element_count, root, flags) =
    @waits libfsdp.fsdp_load_grad(group::Ptr{fsdp_group}, param_index::UInt64, data::Ptr{Cvoid}, dtype::Int32,
        element_count::UInt64, root::Int32, flags::UInt32)::Int32

raw"""
```text
Get the number of shards that this rank owns. It is fixed from the seal on. Collective: no. Errors: INVALID_STATE
 (not sealed, or only planned). Since 0.2.
```
"""
@inline fsdp_get_shard_count(model, shard_count) =
    @waits libfsdp.fsdp_get_shard_count(model::Ptr{fsdp_model}, shard_count::Ptr{UInt64})::Int32

raw"""
```text
Get one of this rank's shards, in declaration order. Addresses are fixed from the seal on; lr_scale and flags are the
current values, at the time of this call. What is at home in a file has no address here: fsdp_next_shard_chunk gives
it to the caller's optimizer, and other parameters are read and loaded by calls.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed). Since 0.2.
```
"""
@inline fsdp_get_shard(model, shard_index, shard) =
    @returns libfsdp.fsdp_get_shard(model::Ptr{fsdp_model}, shard_index::UInt64, shard::Ptr{fsdp_shard})::Int32

raw"""
```text
Get the address of a named optimizer state of a shard: element_count elements of the state's dtype. A state that
FSDP_OPTIMIZER_ADAMW_8BIT keeps in codes has the dtype FSDP_UINT8; its scales are the state "exp_avg.absmax" or
"exp_avg_sq.absmax", one FSDP_FLOAT32 for each 256 elements of the shard. data is NULL if the state is at home in a
file.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE (not sealed, or
only planned). Since 0.2.
```
"""
@inline fsdp_get_shard_state(model, shard_index, name, state) =
    @returns libfsdp.fsdp_get_shard_state(model::Ptr{fsdp_model}, shard_index::UInt64, name::Cstring,
        state::Ptr{fsdp_tensor})::Int32

raw"""
```text
Bring the next chunk of what is at home in a file to memory, for the caller's own optimizer. A chunk is a part of one
shard of a parameter with FSDP_OPTIMIZER_CALLER that has main weights, main gradients or a state in the file, and
that this step does not leave unchanged. *chunk has the fields of fsdp_get_shard, for the chunk alone: addresses and
element_count are those of the chunk. element_offset is the number of its first element in the parameter; row_offset
and row_count are the rows of which it has elements. Until the next call, a plane in the file has an address in
memory of the host that kernels of the device can use, too; any other plane has its own address. A chunk has at most
as many elements as one segment of turn_bytes. fsdp_get_shard_chunk_state gives its states. A shard with nothing in
the file has no chunks. The order of chunks is not defined. What the caller writes into main_grad is lost. In a
window without gradients the numbers there are old ones.
The caller works on the chunk on this stream. The next call writes its main weights and states to the file, after all
work that was enqueued on the stream before that call. element_count is 0 when all chunks were given and are written.
From the first chunk until then fsdp_publish_weights, fsdp_step_adamw and all calls that read or load main weights,
main gradients or states are refused. Another call afterwards begins a new pass. Once a chunk was given, its step can
no longer be discarded, because main weights may have been written: end the pass, and publish.
Collective: no. Blocks: for the disk. Window: inside.
Errors: INVALID_STATE (not in the window, in a capture, or while matrices are collected), SYSTEM (the disk; the
context then fails). Since 0.2.
```
"""
@inline fsdp_next_shard_chunk(model, stream, chunk) =
    @waits libfsdp.fsdp_next_shard_chunk(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, chunk::Ptr{fsdp_shard})::Int32

raw"""
```text
Get the address of a named optimizer state of the chunk that fsdp_next_shard_chunk gave last, as fsdp_get_shard_state
does for a shard: as many elements of the state as the chunk has.
Collective: no. Blocks: no. Window: inside. Errors: INVALID_ARGUMENT (the parameter has no such state), INVALID_STATE
(no chunk is given). Since 0.2.
```
"""
@inline fsdp_get_shard_chunk_state(model, name, state) =
    @returns libfsdp.fsdp_get_shard_chunk_state(model::Ptr{fsdp_model}, name::Cstring, state::Ptr{fsdp_tensor})::Int32

raw"""
```text
Get the L2 norm of all main grads of the model, the same double on every rank: fp64 partial sums, added in a fixed
order; padding and copies are not counted. With mesh NULL it is the norm of this model alone. With a mesh it is the
norm over several models that are parts of one network (pipeline stages, tensor parallel parts). Each rank of the
mesh contributes the norm of its own model, and the squares are added in the mesh's order. No two ranks of the mesh
may be ranks of the same model. norm may be NULL, on all ranks or on some; fsdp_get_last_norm returns the norm later.
If norm is NULL and no mesh is given, the call waits for no GPU: the ranks synchronize on the host to compare what
they ask for, and the norm is computed in stream order. On the host device the calling thread takes the place of the
stream.
Collective: the model's mesh, and the mesh given. Blocks: peers; also the stream, if norm is not NULL or with a mesh.
Window: inside.
Errors: INVALID_ARGUMENT, INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_get_grad_norm(model, mesh, stream, norm) =
    @waits libfsdp.fsdp_get_grad_norm(model::Ptr{fsdp_model}, mesh::Ptr{fsdp_mesh}, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
Get the norm that the last fsdp_get_grad_norm, fsdp_clip_grads or fsdp_apply_grads of the model measured, before
clipping; a call in a graph counts when the graph is replayed. Collective: no. Blocks: until the norm is known on
this rank. Errors: INVALID_STATE (no norm was measured yet), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_get_last_norm(model, norm) =
    @waits libfsdp.fsdp_get_last_norm(model::Ptr{fsdp_model}, norm::Ptr{Float64})::Int32

raw"""
```text
Get the L2 norm of each parameter's main grad, group by group in declaration order. norm_count must be the number of
parameters of the model. Frozen parameters give 0. Where meshes of a group have different parameters, each rank gets
the norms of those that it declares. Collective: the mesh. Blocks: peers. Window: inside. Since 0.2.
```
"""
@inline fsdp_get_param_grad_norms(model, stream, norms, norm_count) =
    @waits libfsdp.fsdp_get_param_grad_norms(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, norms::Ptr{Float64},
        norm_count::UInt64)::Int32

raw"""
```text
Get the L2 norm of each parameter's main weights, group by group in declaration order, the same double on every rank
that declares the parameter. The fp64 sums have the order of fsdp_get_param_grad_norms; padding is not counted, and
an element that several ranks keep is counted once. Main weights of FSDP_MAIN_SPLIT16 count as fp32 numbers, and
those of FSDP_MAIN_NONE as bfloat16 numbers. A FROZEN parameter has no main weights, so its compute weights are
measured. If it is quantized or of FSDP_UINT8, it has no numbers to measure, and its norm is NaN. norm_count must be
the number of parameters of the model. Inside the window, the weights are those that loads, edits and earlier work of
the window have left.
Collective: the mesh. Blocks: peers, and the stream. Window: either. Errors: INVALID_ARGUMENT (norm_count),
INVALID_STATE (not sealed, or only planned; a step has failed and was not discarded; a capture is under way),
MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_get_param_weight_norms(model, stream, norms, norm_count) =
    @waits libfsdp.fsdp_get_param_weight_norms(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, norms::Ptr{Float64},
        norm_count::UInt64)::Int32

raw"""
```text
Count the elements of the main grads that are exactly +0 or -0, over the whole model: each element once, whichever
ranks keep it, and no padding. It reads the gradients as fsdp_finish_grads and later scaling have left them.
*zero_count is the same on every rank. Parameters that the step leaves unchanged are not counted: those that are
FROZEN or not trained now, and, with FSDP_MISSING_GRAD_SKIP, those to which no rank has given a gradient. With
FSDP_MISSING_GRAD_ZEROS all elements of a missing gradient count.
Collective: the mesh. Blocks: peers, and the stream. Window: inside, with gradients. Errors: INVALID_ARGUMENT,
INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_count_zero_grads(model, stream, zero_count) =
    @waits libfsdp.fsdp_count_zero_grads(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, zero_count::Ptr{UInt64})::Int32

raw"""
```text
Multiply this rank's main grads. Every rank must give the same factors in the same order: the next norm, clip or end
of the step compares them (MISMATCH). Collective: no, but make the same calls on every rank. Blocks: local work.
Window: inside. Since 0.2.
```
"""
@inline fsdp_scale_grads(model, factor, stream) =
    @waits libfsdp.fsdp_scale_grads(model::Ptr{fsdp_model}, factor::Float64, stream::Ptr{Cvoid})::Int32

raw"""
```text
Scale all main grads by max_norm / norm if norm > max_norm. If the norm is not finite, the call leaves the gradients
alone and returns OK, so test the norm. mesh and a norm of NULL work as in fsdp_get_grad_norm. Work that follows on
the stream uses the scaled gradients.
Collective: the model's mesh, and the mesh given. Blocks: as fsdp_get_grad_norm. Window: inside.
Errors: INVALID_ARGUMENT (max_norm <= 0), INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. All ranks of both meshes get
MISMATCH if a rank gave another max_norm or asked only for the norm. Nothing was scaled then, and all ranks can clip
again. Since 0.2.
```
"""
@inline fsdp_clip_grads(model, mesh, max_norm, stream, norm) =
    @waits libfsdp.fsdp_clip_grads(model::Ptr{fsdp_model}, mesh::Ptr{fsdp_mesh}, max_norm::Float64, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
Look for Inf and NaN in the main grads of all ranks. *found is 0 or 1, the same on every rank. *name is set to the
name of the first parameter that has some, or to NULL; name may be NULL. If meshes of a group have different names
for the parameter, the name is that of the first rank where such a number was found. Collective: the mesh. Blocks:
peers.
Window: inside. Since 0.2.
```
"""
@inline fsdp_check_grads(model, stream, found, name) =
    @waits libfsdp.fsdp_check_grads(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, found::Ptr{Int32},
        name::Ptr{Ptr{UInt8}})::Int32

raw"""
```text
Take one step of AdamW (Loshchilov and Hutter 2019, decoupled weight decay) in fp32 on this rank's shards, then
publish.
  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g g;  w = w - lr s wd w - lr s (m / c1) / (sqrt(v / c2) +
  eps)
Here s is the parameter's lr_scale, and c = 1 - beta^step is computed in double and rounded to fp32.
The step does not change the main weights and states of a parameter with fsdp_param.optimizer FSDP_OPTIMIZER_CALLER.
The caller has updated them in the window, and this call publishes them with the others, as fsdp_publish_weights
does.
Collective: the mesh. Window: closes it.
Blocks: peers. The ranks agree to step before any weight is changed. So if a rank discards the step instead, this
call fails, and all ranks can still discard. Errors: INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another lr, beta,
epsilon, weight_decay, step, lr_scale, or scaling of the gradients, which includes the norm that was clipped). Since
0.2.
```
"""
@inline fsdp_step_adamw(model, lr, options, stream) =
    @waits libfsdp.fsdp_step_adamw(model::Ptr{fsdp_model}, lr::Float64, options::Ptr{fsdp_adamw_options},
        stream::Ptr{Cvoid})::Int32

raw"""
```text
Round fp32 numbers to bfloat16 stochastically, for an optimizer of the caller's own on a parameter with
FSDP_MAIN_NONE. A number between two bfloat16 numbers is rounded to the one of greater magnitude with a probability
proportional to its distance from the other. A number that bfloat16 has exactly does not change, and no finite number
becomes Inf. element_offset is the number of the first element in the parameter, as in fsdp_shard. from has count
fp32 numbers, and to has room for count bfloat16 numbers. Both are in the device's memory and must not overlap. The
random bits are those that fsdp_step_adamw would use in the step with this number: they depend only on the model's
rounding_seed, the parameter's name, the element and the step.
Collective: no. Blocks: local work on the host device, no on a GPU. Window: inside. Stream: the rounding is done in
stream order. Errors: INVALID_ARGUMENT, INVALID_STATE (not sealed, or only planned; window closed; a capture is
under way; the parameter's main storage is not FSDP_MAIN_NONE). Since 0.2.
```
"""
@inline fsdp_round_stochastic(group, param_index, element_offset, from, to, count, step, stream) =
    @waits libfsdp.fsdp_round_stochastic(group::Ptr{fsdp_group}, param_index::UInt64, element_offset::UInt64,
        from::Ptr{Float32}, to::Ptr{Cvoid}, count::UInt64, step::UInt64, stream::Ptr{Cvoid})::Int32

raw"""
```text
Begin to bring each matrix of the model whole to one rank, its owner, for an optimizer that needs whole matrices,
such as Muon. Inside the update window, call this, then fsdp_next_matrix until there are no more, and then
fsdp_return_matrices: the rows then go back to the ranks that hold them. What is done to a matrix is done once, by
one rank, on the whole matrix. So the result does not depend on how many ranks there are.
Owners are chosen at the seal, so that each rank has about the same work (fsdp_get_matrix_plan). Ranks that hold the
same rows, such as HSDP replicas and the ranks of a group with FSDP_STRATEGY_NO_SHARD, each get the matrices and do
the same work. Matrices travel in waves of at most matrix_bytes for each owner, and while the caller works on one
wave, the next one travels. Matrices of parameters that this step leaves as they are (fsdp_shard.flags) do not
travel. If a state is source or target, all parameters with matrices must have it.
Until fsdp_return_matrices make no other collective call of any model of the context: ranks are at different
matrices, and would wait for each other. fsdp_discard_step is legal if the target is the main grads. With another
target it is illegal until fsdp_return_matrices, and with the target "main_weight" until the next publish. If ranks
make different calls in that time, the context fails.
Collective: the mesh. Blocks: peers. Window: inside; if the source or the target is the main grads, the window must
have gradients. Stream: the source is read in stream order.
Errors: INVALID_ARGUMENT (no such state, a state in codes, main weights in two halves), INVALID_STATE (no parameter
has matrices; matrices are collected already; a capture is under way), MISMATCH (ranks gave other options),
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_collect_matrices(model, options, stream) =
    @waits libfsdp.fsdp_collect_matrices(model::Ptr{fsdp_model}, options::Ptr{fsdp_matrix_options},
        stream::Ptr{Cvoid})::Int32

raw"""
```text
Get the next matrices of this rank, in an order that the plan has fixed; data is NULL when there are no more. The
caller may change them in place, on this stream. The call gives back the matrices of the previous call, so enqueue
all work on them first.
Collective: no. Blocks: on the host device until the matrices are there; on a GPU no. Window: inside.
Errors: INVALID_STATE (nothing is collected; a capture is under way; on the host device also: another rank has
discarded the step), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_next_matrix(model, stream, matrix) =
    @waits libfsdp.fsdp_next_matrix(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, matrix::Ptr{fsdp_matrix})::Int32

raw"""
```text
Bring all rows back, to the target of fsdp_collect_matrices. Work that follows on the stream finds them there. The
ranks synchronize in this call, so it fails on all of them if one discards the step.
Collective: the mesh. Blocks: peers. Window: inside.
Errors: INVALID_STATE (nothing is collected; this rank has matrices that fsdp_next_matrix has not given; a
capture is under way; another rank has discarded the step), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_return_matrices(model, stream) =
    @waits libfsdp.fsdp_return_matrices(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Describe the matrices of a sealed model as JSON: owners, the cost of each rank's matrices, waves and bytes. Waves and
bytes are those of the meshes to which this rank belongs. An owner is given as a rank of the job: that of the first
replica, since each replica has owners of its own. It is null if every rank has a copy. The cost of a matrix is
min(rows, columns)^2 * max(rows, columns). wire_bytes is what travels one way in fp32, in one replica. buffer and
size_bytes work as in fsdp_describe_model.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE. Since 0.2.
```
"""
@inline fsdp_get_matrix_plan(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_get_matrix_plan(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Publish the main weights: cast them to compute weights, raise the version, close the update window. Weights that the
strategy keeps whole are refreshed before the call returns. If the scales of a quantized parameter show that its main
weights have Inf or NaN, the rank that has them logs one FSDP_LOG_WARNING for each such parameter and version. On the
host device this call logs the line. On a GPU the first later call of this context that finds the publish finished
logs it. There is no line for a version that a CUDA graph published, nor for one that was published while the check
of an earlier version was still running.
Collective: the mesh. Blocks: peers.
Window: closes it. Errors: INVALID_STATE, MISMATCH, PEER_FAILED, TIMEOUT. MISMATCH: a rank made a different call, or
a setting that must be equal on all ranks differs. After the first publish MISMATCH is fatal on all ranks, because
main weights may have been written already. Before it, make the settings equal and publish again. Since 0.2.
```
"""
@inline fsdp_publish_weights(model, stream) =
    @waits libfsdp.fsdp_publish_weights(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Open the update window outside a training step, to load or edit weights. No hold may be left and no gradient may be
pending on any rank. Otherwise all ranks get INVALID_STATE, and can go on after fsdp_discard_step.
Collective: the mesh. Blocks: peers. Window: opens it. Errors: INVALID_STATE, PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_begin_update(model, stream) =
    @waits libfsdp.fsdp_begin_update(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Discard this step: holds, lent and pending gradients, and everything that was reduced so far. The call is legal in
any state between two publishes, also after an exception in the middle of a pass. Inside the update window it closes
the window, and the version stays the same. So do not discard a step in whose window main weights were written. The
same holds if FROZEN parameters were loaded, because readers see these at once. Over NCCL, if ranks have enqueued
different collectives, the communicators are created again. This is impossible while a graph exists that captured the
old communicators, so in that case the context fails.
Collective: the mesh. Blocks: peers. Errors: INVALID_STATE (nothing was published yet, or matrices are collected with
another target than the main grads, or were returned to main weights, or a chunk of a shard was given; where only
some ranks are so, the others wait for them until TIMEOUT), PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_discard_step(model, stream) =
    @waits libfsdp.fsdp_discard_step(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Compare the data that several ranks store alike, to find a replica that has drifted: a bit that flipped, or a load or
edit that was not the same everywhere. Main weights, optimizer states and compute weights of each parameter are
hashed as they are in memory, without padding. The hashes are compared among the ranks that have the same elements:
the replicas of a mesh, and all ranks of a mesh if each has the whole. Data that only one rank of a mesh has is not
compared, so equal boxes in different meshes (fsdp_create_group) are not compared with each other. MISMATCH, with the
same text on all ranks, names the first parameter that differs, what differs, both ranks and both hashes.
fsdp_error.rank is the one of the two ranks with which fewer ranks agree; if equally many agree with both, it is the
higher rank. The model can be used as before. The call reads the compared memory once, on a GPU through 1 MiB of host
memory. flags must be 0. Collective: the mesh. Blocks: peers, and the GPU.
Window: outside. Errors: INVALID_ARGUMENT (flags), INVALID_STATE (inside the window, or captured), MISMATCH,
PEER_FAILED, TIMEOUT. Since 0.2.
```
"""
@inline fsdp_check_replicas(model, flags, stream) =
    @waits libfsdp.fsdp_check_replicas(model::Ptr{fsdp_model}, flags::UInt32, stream::Ptr{Cvoid})::Int32

raw"""
```text
Take a whole step in one call, for array frameworks: full gradients in, AdamW, published weights out. grads has one
entry for each parameter of the model that was not declared FROZEN, group by group in declaration order. A parameter
that is not trained now (fsdp_set_param_trainable) must have data NULL. The bits are those of put, reduce, finish and
step. If max_norm > 0, the gradients are first clipped to it; 0 leaves them. *norm (norm may be NULL) is set to the
norm before clipping. The step is taken even if gradients are not finite; to skip such a step, use the single calls.
max_norm must be the same on every rank. With max_norm 0, either all ranks pass NULL for norm or none does.
Collective: the mesh. Blocks: peers. Window: outside; it is closed again when the call returns. Errors: as those of
the calls that this call replaces, and INVALID_STATE (a trained parameter has fsdp_param.optimizer
FSDP_OPTIMIZER_CALLER, which leaves no moment to update it). Since 0.2.
```
"""
@inline fsdp_apply_grads(model, grads, grad_count, grad_stride, lr, max_norm, options, stream, norm) =
    @waits libfsdp.fsdp_apply_grads(model::Ptr{fsdp_model}, grads::Ptr{fsdp_grad}, grad_count::UInt64,
        grad_stride::UInt64, lr::Float64, max_norm::Float64, options::Ptr{fsdp_adamw_options}, stream::Ptr{Cvoid},
        norm::Ptr{Float64})::Int32

raw"""
```text
Save main weights (for frozen parameters the compute weights), optimizer states and AdamW's number of steps as a
checkpoint in the folder. The folder is made if it does not exist. A checkpoint is DIR/step-0000001200/ with
safetensors files as PyTorch's distributed checkpoint writes them, and a manifest with checksums of all files
(docs/guides/checkpoints.md). A checkpoint either has its name and is whole and on the disk, or it does not exist:
whatever fails or is killed during the save, earlier checkpoints stay as they are. With COMMIT_MANIFEST the
checkpoint's folder has its name from the start and is a checkpoint once its manifest is written. A save that is
killed before then leaves no checkpoint, and a checkpoint that loses its manifest later is damaged. A save succeeds
even if another checkpoint in the folder cannot be read. Main weights and states must not be written during the save.
Every rank must see the folder.

The call saves the version published last, also in the middle of a step. Ranks that have the same bytes share the
writing, or one of them writes. A save takes 32 MiB of memory a rank while it runs, or the model's
save_staging_bytes. If a save is under way in the background (fsdp_commit_checkpoint), the call waits for it first.
Collective: the mesh. Blocks: the disk, and peers. A rank that is still writing after timeout_ms has not failed; a
rank whose disk takes nothing for that long has failed, with errno ETIMEDOUT. Window: outside.
Errors, the same on all ranks: SYSTEM, INVALID_STATE, INVALID_ARGUMENT, MISMATCH (another step, keep or flag),
UNSUPPORTED (REPLACE where the file system cannot exchange two names), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT. SYSTEM
names the rank, the file, what was done and errno. Nothing of this checkpoint is left, the job can go on, and the
next save may succeed. INVALID_STATE: the folder has this step; another host does not see what rank 0 has made in the
folder; the window is open; or a capture is under way. INVALID_ARGUMENT: REPLACE with COMMIT_MANIFEST, or a parameter
named state.NAME.step, the name under which AdamW's number of steps for the parameter NAME is saved. fsdp_seal_model
already refuses other names that two tensors would share. Since 0.2.
```
"""
@inline fsdp_save(model, folder, options) =
    @waits libfsdp.fsdp_save(model::Ptr{fsdp_model}, folder::Cstring, options::Ptr{fsdp_save_options})::Int32

raw"""
```text
Load the folder's newest whole checkpoint (the last one saved there, whatever its step), or the checkpoint that the
folder is itself. The ranks, mesh, strategy and unshard mode may differ from those of the save. Each rank reads the
rows that it keeps and verifies what it reads, with 8 MiB of memory. Call fsdp_publish_weights afterwards. *loaded
says what was loaded (loaded may be NULL). The log at INFO says how many tensors were loaded, missing and unexpected.

If a checkpoint that is damaged or cannot be read may be the newest, the load fails and names it; with FALLBACK the
call loads the newest whole checkpoint instead. If such a checkpoint is certainly older than the one loaded, a
WARNING in the log names it.

All or nothing: on failure no rank has loaded the checkpoint, and the window stays open. Main weights may have been
written in part, so another load, or the caller's own values, must come before the next publish.
Collective: the mesh. Blocks: the disk and peers. Window: inside; the step's gradients, if any, stay.
Errors, the same on all ranks: INVALID_ARGUMENT, SYSTEM, INVALID_STATE, UNSUPPORTED (written by a newer release),
MISMATCH (another model, other flags, or hosts that see different checkpoints), OUT_OF_MEMORY, PEER_FAILED, TIMEOUT.
INVALID_ARGUMENT: no checkpoint in the folder; none of the model's tensors, without IF_ANY; or a damaged file, with
the range of bytes and the tensors. The message also lists all tensors that are missing, unexpected, of another
shape, or of a dtype that cannot be converted to the parameter's. SYSTEM names the rank, the file, what was done and
errno: ENOENT for a folder that does not exist. Since 0.2.
```
"""
@inline fsdp_load(model, folder, options, loaded) =
    @waits libfsdp.fsdp_load(model::Ptr{fsdp_model}, folder::Cstring, options::Ptr{fsdp_load_options},
        loaded::Ptr{fsdp_loaded})::Int32

raw"""
```text
Load only weights, from safetensors files of any library. path is such a file, or a folder of such files, with
Hugging Face's index (model.safetensors.index.json) or without it, also as PyTorch's distributed checkpoint writes
them. It may also be a checkpoint of libfsdp or a folder of these. Links are followed (Hugging Face's cache is made
of them), but not in checkpoints of libfsdp. An index may name files in folders below it. Tensors in the files have
the names of the model's parameters, unless renames say otherwise. A tensor that several renames match goes to all of
their parameters: a fused tensor to its parts, a shared tensor to both of its names. If separate tensors of the files
are fused in the model, each has a rename with a to_row of its own. Every row of a parameter must come exactly once.

F64, F32, F16 and BF16 are converted to what the model keeps, rounded to nearest even. The planes of a FROZEN
quantized parameter w are tensors of their own: w.row and w.row_scale, with MXFP8 also w.column and w.column_scale
(F8_E4M3 codes, F32 or F8_E8M0 scales). Bytes are U8. Planes and bytes are taken bit for bit. Each rank reads what it
keeps, in blocks of 256 KiB; a transposed matrix takes memory for this rank's part of it during the call. Files of
libfsdp are verified; other files have no checksums. States and AdamW's number of steps stay as they are. Flags:
ALLOW_MISSING, ALLOW_UNEXPECTED and IF_ANY. Files that have none of the model's tensors need IF_ANY and
ALLOW_MISSING; a path that does not exist is an error also with IF_ANY. renames may be NULL. *loaded has the numbers
of bytes and tensors; loaded may be NULL. A tensor whose dtype this release does not know is refused if the model has
a parameter of its name.

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
Describe the model's last successful load as JSON. "call" is the function that loaded; "name" and "step" are the
checkpoint's ("" and 0 after fsdp_load_weights). "loaded", "missing" and "unexpected" list the names of the tensors
that fsdp_loaded counts. buffer and size_bytes work as in fsdp_describe_model.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (too small; *size_bytes is set), INVALID_STATE (nothing has been
loaded, or the model is not sealed). Since 0.2.
```
"""
@inline fsdp_describe_load(model, buffer, size_bytes) =
    @returns libfsdp.fsdp_describe_load(model::Ptr{fsdp_model}, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Begin a checkpoint for the folder; nothing is written yet. The options are those of fsdp_save. With step 0 the step
is the highest step of the rank's models, so if the models of different ranks are at different steps, give a step.
Collective: no. Blocks: no. Errors: INVALID_ARGUMENT, INVALID_HANDLE. Since 0.2.
```
"""
@inline fsdp_begin_checkpoint(context, folder, options, checkpoint) =
    @returns libfsdp.fsdp_begin_checkpoint(context::Ptr{fsdp_context}, folder::Cstring, options::Ptr{fsdp_save_options},
        checkpoint::Ptr{Ptr{fsdp_checkpoint}})::Int32

raw"""
```text
Add a sealed model of the context to the checkpoint, with the data that it will have at the commit. The model is
loaded by name (NULL: ""). Ranks may add different models: those of one pipeline stage, or of one group of experts.
Models of different ranks with the same name are parts of one model. Names of tensors are unique over all models.
Collective: no. Blocks: no. Memory: the model stays until the save has ended, also if its handle is destroyed.
Errors: INVALID_ARGUMENT (the checkpoint has this name or model), INVALID_STATE (not sealed; committed),
INVALID_HANDLE. Since 0.2.
```
"""
@inline fsdp_add_checkpoint_model(checkpoint, name, model) =
    @returns libfsdp.fsdp_add_checkpoint_model(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring,
        model::Ptr{fsdp_model})::Int32

raw"""
```text
Add bytes of the caller's own to the checkpoint, for example the state of a random generator or the position in the
data. The bytes are copied at once. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (no name, or a name that the
checkpoint has), INVALID_STATE (committed), OUT_OF_MEMORY. Since 0.2.
```
"""
@inline fsdp_add_checkpoint_bytes(checkpoint, name, data, size_bytes, owner) =
    @returns libfsdp.fsdp_add_checkpoint_bytes(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, data::Ptr{Cvoid},
        size_bytes::UInt64, owner::Int32)::Int32

raw"""
```text
Save the checkpoint while training goes on. The call returns when the ranks have agreed and all see the folder. It
saves the versions published last. Threads of the library copy main weights and states and write them. If they have
not copied everything when fsdp_finish_grads, fsdp_begin_update or fsdp_prepare_replay is called for the model, that
call waits for the rest (fsdp_stats.checkpoint_stall_ns). The checkpoint gets its name as soon as all ranks have
written, whatever calls the ranks are in then, and even if a rank has died since. Only one save is under way at a
time: the next commit waits for it.
Collective: the world. Blocks: peers, and an earlier save. Window: outside, for all its models.
Errors, the same on all ranks: as fsdp_save, except errors of the disk, which fsdp_wait_checkpoint returns;
INVALID_STATE (nothing is in the checkpoint, or it was committed before), INVALID_ARGUMENT (a tensor's name is not
unique). Since 0.2.
```
"""
@inline fsdp_commit_checkpoint(checkpoint) =
    @waits libfsdp.fsdp_commit_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Int32

raw"""
```text
Get the progress of a checkpoint. Collective: no. Blocks: no. Threads: any. Errors: INVALID_ARGUMENT,
 INVALID_HANDLE. Since 0.2.
```
"""
@inline fsdp_get_checkpoint_status(checkpoint, status) =
    @returns libfsdp.fsdp_get_checkpoint_status(checkpoint::Ptr{fsdp_checkpoint},
        status::Ptr{fsdp_checkpoint_status})::Int32

raw"""
```text
Wait until the checkpoint is saved or is known to have failed. The call may be repeated. Collective: no. Blocks: the
disk, and peers' disks. Errors, the same on all ranks, after which the job can go on: SYSTEM, INVALID_STATE (not
committed), UNSUPPORTED, OUT_OF_MEMORY, INTERRUPTED (ends only this wait, which may be repeated), PEER_FAILED. SYSTEM
names the rank, the file, what was done and errno, and nothing of this checkpoint is left. If rank 0 died as it gave
the checkpoint its name, it is not known whether the checkpoint has its name. Since 0.2.
```
"""
@inline fsdp_wait_checkpoint(checkpoint) =
    @waits libfsdp.fsdp_wait_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Int32

raw"""
```text
Open the folder's newest checkpoint, or the checkpoint that the folder is, for the calls below. Collective: the
world. Blocks: the disk and peers. Errors, the same on all ranks: INVALID_ARGUMENT (there is no checkpoint, or a
damaged one may be the newest), SYSTEM, UNSUPPORTED (written by a newer release), MISMATCH (hosts see different
checkpoints). Since 0.2.
```
"""
@inline fsdp_open_checkpoint(context, folder, checkpoint) =
    @waits libfsdp.fsdp_open_checkpoint(context::Ptr{fsdp_context}, folder::Cstring,
        checkpoint::Ptr{Ptr{fsdp_checkpoint}})::Int32

raw"""
```text
Load a model from an opened checkpoint, by the name that it was saved under (NULL: ""). Otherwise the call works as
fsdp_load without FALLBACK. IF_ANY has an effect only with ALLOW_MISSING, if the checkpoint has none of the model's
tensors. Collective: the model's mesh. Blocks: the disk and peers. Errors: as fsdp_load. Since 0.2.
```
"""
@inline fsdp_load_checkpoint_model(checkpoint, name, model, options, loaded) =
    @waits libfsdp.fsdp_load_checkpoint_model(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, model::Ptr{fsdp_model},
        options::Ptr{fsdp_load_options}, loaded::Ptr{fsdp_loaded})::Int32

raw"""
```text
Read bytes from an opened checkpoint: the bytes that the rank of this number saved PER_RANK, or else the bytes saved
ONCE. *size_bytes is the buffer's size on entry and the number of bytes on return; data may be NULL to ask for the
number. The bytes are verified. Collective: no. Blocks: the disk. Errors: INVALID_ARGUMENT (no bytes of that name, or
none of this rank; too small, and then *size_bytes is set; a damaged file), SYSTEM. Since 0.2.
```
"""
@inline fsdp_read_checkpoint_bytes(checkpoint, name, data, size_bytes) =
    @waits libfsdp.fsdp_read_checkpoint_bytes(checkpoint::Ptr{fsdp_checkpoint}, name::Cstring, data::Ptr{Cvoid},
        size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Give the handle back. The call never waits. A save that is under way goes on: fsdp_close_context waits for it and
returns its failure; fsdp_destroy_context gives the save up and logs a WARNING. NULL is allowed. Threads: any. Since
0.2.
```
"""
@inline fsdp_destroy_checkpoint(checkpoint) =
    @returns libfsdp.fsdp_destroy_checkpoint(checkpoint::Ptr{fsdp_checkpoint})::Cvoid

raw"""
```text
List the checkpoints of a folder as JSON. "checkpoints" has name, step, sequence, ranks, models and bytes of each,
the newest first; "unreadable" has the reason for each checkpoint that is damaged or that this process may not read.
buffer and size_bytes work as in fsdp_describe_model. Collective: no. Blocks: the disk. Threads: any.
Errors: SYSTEM, INVALID_ARGUMENT (too small; *size_bytes is set). Since 0.2.
```
"""
@inline fsdp_list_checkpoints(folder, buffer, size_bytes) =
    @waits libfsdp.fsdp_list_checkpoints(folder::Cstring, buffer::Ptr{UInt8}, size_bytes::Ptr{UInt64})::Int32

raw"""
```text
Begin a capture: until fsdp_end_capture, the model's calls do not do their work but record it into the graph that
`stream` is being captured into (call cudaStreamBeginCapture first, in relaxed or thread-local mode). Any part of a
step can be captured, also all of it: prefetch, unshard and reshard; acquire, put and reduce gradients; finish_grads,
scale_grads, get_grad_norm, clip_grads and apply_grads; publish_weights; and step_adamw.
  AdamW      step_adamw is captured at most once, with step 0 in its options; each replay gives its own lr.
  Norms      get_grad_norm, clip_grads and apply_grads must have NULL for norm and mesh; fsdp_get_last_norm returns
             the norm of a replay. The ranks synchronize in these calls during the capture. If the context has had
             other models, a captured call that measures a norm (apply_grads does so only if it clips) is
             UNSUPPORTED, and so is fsdp_prepare_replay of a capture with a norm.
  Streams    All streams given must be in the capture: `stream`, and streams forked from it.
  Gradients  Record two captures: one of a first micro-batch, which overwrites gradients, and one of a later
             micro-batch, which adds to them.
During a capture these calls are INVALID_STATE: calls for which the host must wait (those that return a norm,
check_grads, load, read), begin_update and discard_step. The same holds for calls with streams that are not in the
capture, calls of the context's other models, whose work could get into the graph, and fsdp_close_context.
If a call of the model fails, its work is missing in the graph, and fsdp_end_capture fails. After BUSY or
INVALID_HANDLE fsdp_end_capture does not fail, because the call never reached the model: make the call again, else
the graph lacks its work. (FSDP_GRAD_NO_WAIT makes no call BUSY on a CUDA device.) If
fsdp_begin_capture itself fails on a rank, that rank may still call fsdp_end_capture, for the sake of peers whose
call succeeded. fsdp_end_capture then fails on every rank with the error of fsdp_begin_capture, and a new capture can
begin.
Collective: the mesh, but this call does not synchronize the ranks; fsdp_end_capture does. The ranks must capture the
same calls. Blocks: until the library's work on this rank is done. Errors: INVALID_STATE (the stream is not being
captured, or another capture is under way), UNSUPPORTED, TIMEOUT (the library's work has not ended), SYSTEM.
UNSUPPORTED: the host device, FSDP_SCHEDULE_ANY, or a parameter with FSDP_MISSING_GRAD_SKIP. Calls that communicate
during a capture are UNSUPPORTED if ranks exchange data through memory of the host, which no graph can hold. Since
0.2.
```
"""
@inline fsdp_begin_capture(model, stream) =
    @waits libfsdp.fsdp_begin_capture(model::Ptr{fsdp_model}, stream::Ptr{Cvoid})::Int32

raw"""
```text
End a capture: join the library's streams to `stream`, so that its capture can end, and put the model back into the
state from before fsdp_begin_capture, because nothing has been done yet. Afterwards the caller ends the stream's
capture, instantiates the graph and keeps it. If a call since fsdp_begin_capture has failed on a rank, or a rank
cannot end its capture, this call fails on every rank and names the rank, call and error. In this case, too, the
capture is over and the model is as before; drop the graph that cudaStreamEndCapture returns.
Collective: the mesh (compares what was captured). Blocks: peers. Errors: INVALID_STATE, MISMATCH, PEER_FAILED,
TIMEOUT. Since 0.2.
```
"""
@inline fsdp_end_capture(model, stream, capture) =
    @waits libfsdp.fsdp_end_capture(model::Ptr{fsdp_model}, stream::Ptr{Cvoid}, capture::Ptr{Ptr{fsdp_capture}})::Int32

raw"""
```text
Prepare a replay: call this before each launch of the graph on `stream`. The call checks that the model is in the
state in which it was captured. It orders the graph after the library's earlier work, and gives the device the step's
lr and bias corrections. lr counts only if the capture has a step; it must be finite and the same on every rank. Then
launch the graph and call fsdp_commit_replay, or fsdp_cancel_replay if there was no launch, with the same stream. The
stream must live until that call, and other calls of the model before it are INVALID_STATE. If a rank cannot replay
(another state, a step that failed, a capture under way), the call fails on every rank and names that rank and what
differs. The model is then as before.
Collective: the mesh. Blocks: peers; the GPU only while 64 replays are under way. Errors: INVALID_STATE (says what
differs), INVALID_ARGUMENT, INVALID_HANDLE (the model was destroyed), MISMATCH (ranks replay different captures or
give another lr), PEER_FAILED, TIMEOUT (also: an earlier replay has not ended within timeout_ms), SYSTEM. Since 0.2.
```
"""
@inline fsdp_prepare_replay(capture, lr, stream) =
    @waits libfsdp.fsdp_prepare_replay(capture::Ptr{fsdp_capture}, lr::Float64, stream::Ptr{Cvoid})::Int32

raw"""
```text
Commit a replay after the graph was launched on `stream`: the model goes on as if the captured calls had been made,
and later calls come after the graph. If the graph does not end, because a peer has not launched its graph, later
waits end by a TIMEOUT that names the capture.
Collective: no. Blocks: no. Errors: INVALID_STATE (not prepared), INVALID_ARGUMENT (not the stream of the
preparation), SYSTEM (nothing can be ordered behind the graph: the context has failed). Since 0.2.
```
"""
@inline fsdp_commit_replay(capture, stream) =
    @returns libfsdp.fsdp_commit_replay(capture::Ptr{fsdp_capture}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Cancel a replay. Call this instead of fsdp_commit_replay if the graph was not launched, for example because its
launch failed: the model is as before fsdp_prepare_replay. All ranks must cancel. If some ranks commit and others
cancel, the next call that synchronizes them is a MISMATCH that names both.
Collective: the mesh, but the ranks synchronize only later. Blocks: no. Errors: as fsdp_commit_replay. Since 0.2.
```
"""
@inline fsdp_cancel_replay(capture, stream) =
    @returns libfsdp.fsdp_cancel_replay(capture::Ptr{fsdp_capture}, stream::Ptr{Cvoid})::Int32

raw"""
```text
Give the handle back; NULL is allowed. Between fsdp_prepare_replay and fsdp_commit_replay the call gives the replay
up, as fsdp_cancel_replay does. A running graph does not need the handle any more. The graphs themselves, executable
or not, belong to the caller, which must destroy them before the model, because they refer to its memory. NCCL does
not end a communicator before the last graph that captured its collectives is destroyed. If such a graph still
exists, destroying the model takes some seconds, and the log says so. Threads: any. Since 0.2.
```
"""
@inline fsdp_destroy_capture(capture) =
    @returns libfsdp.fsdp_destroy_capture(capture::Ptr{fsdp_capture})::Cvoid

raw"""
```text
Write this rank's timeline to a file: the last trace_events events since the context began, in the Trace Event Format
(JSON) that Perfetto and chrome://tracing read. The file appears, or replaces the file of that name, when it is
complete. It has mode 0600. Only a regular file is replaced: a link, pipe, socket or device is a SYSTEM error, and so
is a file that would pass the limit of file sizes. docs/guides/trace.md says what is in the file and how files of
several ranks are merged.
Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
Errors: INVALID_ARGUMENT, INVALID_STATE (no trace is kept), SYSTEM (errno is named). Since 0.2.
```
"""
@inline fsdp_write_trace(context, path) =
    @waits libfsdp.fsdp_write_trace(context::Ptr{fsdp_context}, path::Cstring)::Int32

raw"""
```text
Write this rank's flight record to a file: its last calls and collectives (flight_events of each), what the caller
waits for, and the error that failed the context, if any. If the context fails and the options give a directory, the
record is written without this call. `fsdp-info flight` reads the files of several ranks; see
docs/guides/debugging-a-hang.md.
Collective: no. Blocks: local work. Threads: any, also while another call runs or after the context has failed.
Errors: INVALID_ARGUMENT, INVALID_STATE (a planning context), SYSTEM (errno is named). Since 0.2.
```
"""
@inline fsdp_write_flight_record(context, path) =
    @waits libfsdp.fsdp_write_flight_record(context::Ptr{fsdp_context}, path::Cstring)::Int32

raw"""
```text
Begin a span of the caller's own in the timeline, for example "forward"; spans nest, up to 64. name is UTF-8 of 1-255
bytes; a context keeps at most 256 different names. The call does nothing unless FSDP_CONTEXT_TRACE or
trace_directory has turned the timeline on. Collective: no. Blocks: no. Errors: INVALID_ARGUMENT (one name too many),
INVALID_STATE (64 are open). Since 0.2.
```
"""
@inline fsdp_begin_span(context, name) =
    @returns libfsdp.fsdp_begin_span(context::Ptr{fsdp_context}, name::Cstring)::Int32

raw"""
End the span that was begun last. Collective: no. Blocks: no. Errors: INVALID_STATE (none is open). Since 0.2.
"""
@inline fsdp_end_span(context) =
    @returns libfsdp.fsdp_end_span(context::Ptr{fsdp_context})::Int32
