# SPDX-License-Identifier: Apache-2.0

"""
    save(model, folder; options...)

Save weights and states as a checkpoint of the folder. Keywords are the fields of `fsdp_save_options`.
"""
function save(model::Model, folder; fields...)
    wanted = options(fsdp_save_options, fields)
    @call model.state fsdp_save(model.number, folder, wanted)
end

"""
    load(model, folder; options...)

Load the folder's newest checkpoint, or the checkpoint that the folder itself is; then publish. Keywords are the fields
of `fsdp_load_options`. Returns the fields of `fsdp_loaded`.
"""
function load(model::Model, folder; fields...)
    wanted, loaded = options(fsdp_load_options, fields), blank(fsdp_loaded)
    @call model.state fsdp_load(model.number, folder, wanted, loaded)
    return told(loaded)
end

"""
    load_weights(model, path; renames = [], options...)

Load weights from safetensors files of any library. `renames` are named tuples of the fields of `fsdp_rename`, which see
matrices in C's order, as the library has them.
"""
function load_weights(model::Model, path; renames = [], fields...)
    made = [options(fsdp_rename, pairs(rename)) for rename in renames]
    list = fsdp_rename[one.memory[] for one in made]
    wanted, loaded = options(fsdp_load_options, fields), blank(fsdp_loaded)
    GC.@preserve made @call model.state fsdp_load_weights(model.number, path, isempty(list) ? C_NULL : list, length(list),
        sizeof(fsdp_rename), wanted, loaded)
    return told(loaded)
end

"The last load, as JSON: the names of what was loaded, missing and unexpected."
describe_load(model::Model) = read_text((text, size) -> fsdp_describe_load(model.number, text, size))

"Several models and bytes, saved while training goes on, or opened to be read."
mutable struct Checkpoint <: Owner
    number::Ptr{fsdp_checkpoint}
    state::State
    handle::Handle{State}
    context::Context
end

"""
    begin_checkpoint(context, folder; options...)

A checkpoint for the folder: `add_model`, `add_bytes`, `commit`. Keywords are the fields of `fsdp_save_options`.
"""
function begin_checkpoint(context::Context, folder; fields...)
    wanted = options(fsdp_save_options, fields)
    return new_checkpoint(number -> fsdp_begin_checkpoint(context.number, folder, wanted, number), context)
end

"The folder's newest checkpoint, for `load_model` and `read_bytes`."
open_checkpoint(context::Context, folder) =
    new_checkpoint(number -> fsdp_open_checkpoint(context.number, folder, number), context)
open_checkpoint(f, context::Context, folder) = closing(f, open_checkpoint(context, folder))

function new_checkpoint(f, context)
    handle = create(f, context.state, fsdp_destroy_checkpoint, fsdp_checkpoint)
    return own(Checkpoint(handle.number, context.state, handle, context))
end

"A sealed model goes into the checkpoint, under a name."
add_model(checkpoint::Checkpoint, model::Model, name = "") =
    @call checkpoint.state fsdp_add_checkpoint_model(checkpoint.number, name, model.number)

"Bytes of the program's own go into it: `BYTES_ONCE`, those of rank 0, or `BYTES_PER_RANK`."
function add_bytes(checkpoint::Checkpoint, name, data, owner::BytesOwner = BYTES_ONCE)
    bytes = Vector{UInt8}(data)
    @call checkpoint.state fsdp_add_checkpoint_bytes(checkpoint.number, name, bytes, length(bytes), Int32(owner))
end

"Save it while training goes on."
commit(checkpoint::Checkpoint) = @call checkpoint.state fsdp_commit_checkpoint(checkpoint.number)

"How far it is: fields of `fsdp_checkpoint_status`."
function checkpoint_status(checkpoint::Checkpoint)
    found = blank(fsdp_checkpoint_status)
    check(fsdp_get_checkpoint_status(checkpoint.number, found))
    return told(found)
end

"""
    log_progress(checkpoint)

Log the progress of the save, as a record of Julia's logging with a `progress` from 0 to 1, which ProgressLogging's
sinks draw.
"""
function log_progress(checkpoint::Checkpoint)
    status = checkpoint_status(checkpoint)
    done = status.state in (CHECKPOINT_COMMITTED, CHECKPOINT_FAILED, CHECKPOINT_OPENED)
    progress = done ? 1.0 : status.bytes_in_all == 0 ? 0.0 : status.bytes / status.bytes_in_all
    @logmsg Logging.LogLevel(-1) "checkpoint $(status.name)" progress = done ? "done" : progress _id = objectid(checkpoint)
    return progress
end

"Until it is there, or is known to have failed, which is thrown."
Base.wait(checkpoint::Checkpoint) = @call checkpoint.state fsdp_wait_checkpoint(checkpoint.number)

"Load a model out of an opened checkpoint. Keywords are the fields of `fsdp_load_options`; gives those of `fsdp_loaded`."
function load_model(checkpoint::Checkpoint, model::Model, name = ""; fields...)
    wanted, loaded = options(fsdp_load_options, fields), blank(fsdp_loaded)
    @call checkpoint.state fsdp_load_checkpoint_model(checkpoint.number, name, model.number, wanted, loaded)
    return told(loaded)
end

"Bytes out of an opened checkpoint."
function read_bytes(checkpoint::Checkpoint, name)
    size = Ref{UInt64}(0)
    @call checkpoint.state fsdp_read_checkpoint_bytes(checkpoint.number, name, C_NULL, size)
    data = Vector{UInt8}(undef, size[])
    @call checkpoint.state fsdp_read_checkpoint_bytes(checkpoint.number, name, data, size)
    return data
end

"The checkpoints of a folder, as JSON, the newest first."
list_checkpoints(folder) = read_text((text, size) -> fsdp_list_checkpoints(folder, text, size))
