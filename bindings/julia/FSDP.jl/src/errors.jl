# SPDX-License-Identifier: Apache-2.0

"""
A call of libfsdp that failed: `status`, `rank` (the one to blame, or `nothing`), `message`, `origin` and `origin_code`
(where the error comes from, for example errno of the operating system), `context_failed` (the context can only be
destroyed).
"""
struct Error <: Exception
    status::Status
    rank::Union{Int,Nothing}
    message::String
    origin::Union{Origin,Nothing}
    origin_code::Int
    context_failed::Bool
end

Base.showerror(io::IO, error::Error) = print(io, error.status, ": ", error.message)

"The error that an fsdp_error tells of; `nothing` if there is none."
function error_of(found::Struct{fsdp_error}, status = Int32(getfield_of(found, :status)))
    status == FSDP_OK && return nothing
    rank = getfield_of(found, :rank)
    return Error(Status(status), rank < 0 ? nothing : Int(rank), getfield_of(found, :message),
        getfield_of(found, :origin), getfield_of(found, :origin_code), getfield_of(found, :context_failed) != 0)
end

"That of this thread's last failing call."
function last_error(status)
    found = blank(fsdp_error)
    fsdp_get_last_error(C_NULL, found)
    return error_of(found, status)
end

"What an object itself finds wrong."
misuse(status, message) = Error(status, nothing, message, ORIGIN_FSDP, 0, false)

"The header's name of a status, as \"FSDP_TIMEOUT\"."
status_name(status::Status) = unsafe_string(fsdp_get_status_name(Int32(status)))
"The text of this thread's last failing call, or \"\"."
last_message() = unsafe_string(fsdp_get_last_message())
