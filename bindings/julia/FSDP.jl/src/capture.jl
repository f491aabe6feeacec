# SPDX-License-Identifier: Apache-2.0

"A part of a step that was captured into a CUDA graph, made by `end_capture`."
mutable struct Capture <: Owner
    number::Ptr{fsdp_capture}
    state::State
    handle::Handle{State}
    model::Model
end

"From here to `end_capture` the model's calls record their work into the graph that the stream is captured into."
begin_capture(model::Model, stream) = @call model.state fsdp_begin_capture(model.number, Ptr{Cvoid}(stream))

"The `Capture`; the model is as before `begin_capture`. End the stream's own capture then."
function end_capture(model::Model, stream)
    handle = create(model.state, fsdp_destroy_capture, fsdp_capture) do number
        fsdp_end_capture(model.number, Ptr{Cvoid}(stream), number)
    end
    return own(Capture(handle.number, model.state, handle, model))
end

"Before each launch of the graph on the stream."
prepare_replay(capture::Capture, lr = 0.0; stream = C_NULL) =
    @call capture.state fsdp_prepare_replay(capture.number, lr, Ptr{Cvoid}(stream))

"After the graph was launched."
commit_replay(capture::Capture; stream = C_NULL) =
    @call capture.state fsdp_commit_replay(capture.number, Ptr{Cvoid}(stream))

"Instead, where the graph was not launched."
cancel_replay(capture::Capture; stream = C_NULL) =
    @call capture.state fsdp_cancel_replay(capture.number, Ptr{Cvoid}(stream))
