# SPDX-License-Identifier: Apache-2.0
# Structs of the header that a call reads or fills, field by field: by value some have a thousand bytes.

# Fields of flags, which keep their type; other numbers become Int.
const BITS = (:flags, :layout_hash)

"A struct in memory with what its pointers point to; an argument of type `Ptr{T}`."
struct Struct{T}
    memory::Base.RefValue{T}
    kept::Vector{Any}
end
Base.cconvert(::Type{Ptr{T}}, made::Struct{T}) where {T} = made
Base.unsafe_convert(::Type{Ptr{T}}, made::Struct{T}) where {T} = Base.unsafe_convert(Ptr{T}, made.memory)

"A struct that is zero but for its size."
function blank(::Type{T}) where {T}
    made = Struct{T}(Ref{T}(), [])
    GC.@preserve made ccall(:memset, Ptr{Cvoid}, (Ptr{Cvoid}, Cint, Csize_t), place(made, 0), 0, sizeof(T))
    fieldname(T, 1) === :struct_size && setfield(made, :struct_size, sizeof(T))
    return made
end

place(made::Struct{T}, offset) where {T} = Ptr{UInt8}(Base.unsafe_convert(Ptr{T}, made.memory)) + offset

function field(::Type{T}, name) where {T}
    index = findfirst(==(name), fieldnames(T))
    if index === nothing
        known = join(filter(name -> !(name in (:struct_size, :reserved)), fieldnames(T)), ", ")
        throw(ArgumentError("$(nameof(T)) has no field $name; it has $known"))
    end
    return fieldtype(T, index), fieldoffset(T, index)
end

function setfield(made::Struct{T}, name, value) where {T}
    kind, offset = field(T, name)
    GC.@preserve made unsafe_store!(Ptr{kind}(place(made, offset)), plain_value(kind, value, made.kept))
    return made
end

function getfield_of(made::Struct{T}, name) where {T}
    kind, offset = field(T, name)
    GC.@preserve made begin
        kind <: Tuple && return unsafe_string(place(made, offset))
        value = unsafe_load(Ptr{kind}(place(made, offset)))
    end
    kind === Cstring && return value == C_NULL ? nothing : unsafe_string(value)
    enum = get(FIELD_ENUMS, (T, name), nothing)
    enum === nothing && return value isa Unsigned && !(name in BITS) ? Int(value) : value
    return value in Int32.(instances(enum)) ? enum(value) : nothing  # 0: a default that differs from field to field
end

plain_value(::Type{T}, value, kept) where {T<:Number} = T(value)
plain_value(::Type{Ptr{T}}, value::Ptr, kept) where {T} = Ptr{T}(value)
plain_value(::Type{Ptr{T}}, ::Nothing, kept) where {T} = Ptr{T}(C_NULL)
function plain_value(::Type{Ptr{T}}, value, kept) where {T}
    push!(kept, value)
    return Ptr{T}(Base.unsafe_convert(Ptr{eltype(value)}, value))
end
plain_value(::Type{Cstring}, ::Nothing, kept) = Cstring(C_NULL)
function plain_value(::Type{Cstring}, value::AbstractString, kept)
    push!(kept, String(value))
    return Base.unsafe_convert(Cstring, kept[end])
end

"A struct of the fields given; those left out, and `nothing`, are defaults."
function options(::Type{T}, fields) where {T}
    made = blank(T)
    for (name, value) in pairs(fields)
        field(T, name)
        value === nothing || setfield(made, name, value)
    end
    return made
end

"What a call has filled in, as a named tuple with text and enums."
function told(made::Struct{T}) where {T}
    names = Tuple(name for name in fieldnames(T) if !(name in (:struct_size, :reserved)))
    return NamedTuple{names}(Tuple(getfield_of(made, name) for name in names))
end
