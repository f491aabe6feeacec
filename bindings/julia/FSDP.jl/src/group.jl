# SPDX-License-Identifier: Apache-2.0

"""
    Param(name, dims...; fields...)
    Param(name, T, dims...; fields...)

A parameter to declare: an array of `T` (Float32, Float16, BFloat16, and UInt8 of frozen ones) and of these dims in Julia, which the library has
reversed. It shards along its first dimension, which is Julia's last; with `row_dimensions = 2` ranks also divide the
matrices of a stack. Keywords are further fields of `fsdp_param` (`flags`, `lr_scale`, `granule`, `granule_rows`,
`row_dimensions`, `quantization`, `missing_grad`, `piece`, `optimizer`), `matrix = true` if its first two dimensions in Julia are a
matrix (see `foreach_matrix`), `splits` with the rows of each matrix into which these are cut, and `global_dims` and `global_offset` of a tensor that this
one is a box of, in Julia's order too, the offset from 0.
"""
struct Param
    name::String
    type::DataType
    dims::Dims
    fields::Any
end
Param(name, type::DataType, dims::Integer...; fields...) = Param(name, type, Dims(dims), values(fields))
Param(name, dims::Integer...; fields...) = Param(name, Float32, dims...; fields...)

"The number of its piece of the group, from 0."
piece_of(param::Param) = Int(get(param.fields, :piece, 0))

is_quantized(param::Param) = Int32(get(param.fields, :quantization, 0)) != 0

is_trainable(param::Param) = get(param.fields, :flags, 0) & FSDP_PARAM_FROZEN == 0

c_order(dims) = UInt64[reverse(Tuple(dims))...]

"The fsdp_param."
function declared(param::Param)
    made = blank(fsdp_param)
    setfield(made, :name, param.name)
    setfield(made, :shape, c_order(param.dims))
    setfield(made, :dimension_count, length(param.dims))
    setfield(made, :dtype, dtype_of(param.type))
    for (name, value) in pairs(param.fields)
        if value === nothing
            continue
        elseif name in (:global_dims, :global_offset)
            setfield(made, name === :global_dims ? :global_shape : name, c_order(value))
        elseif name === :splits
            declare_splits(made, value)
        else
            setfield(made, name, value)
        end
    end
    return made
end

function declare_splits(made, rows)
    setfield(made, :matrix, FSDP_MATRIX_LAST_TWO)
    setfield(made, :matrix_splits, UInt64[rows...])
    setfield(made, :matrix_split_count, length(rows))
end

"""
Parameters that are gathered and reduced together, made by `create_group`. Calls take a parameter by its name, or by its
number in the group, from 1.
"""
mutable struct Group
    number::Ptr{fsdp_group}
    state::State
    handle::Handle{State}  # the model's
    model::Any
    name::String
    params::Vector{Param}
    indices::Dict{String,Int}
    views::Vector{Union{Nothing,Vector{Any}}}  # for each phase, where addresses are fixed from the seal on
    piece_views::Dict{Tuple{Int,Int},Vector{Any}}  # likewise for each piece and phase
    grads::Vector{Any}
end

Base.show(io::IO, group::Group) = print(io, "Group(", repr(group.name), ", ", [p.name for p in group.params], ")")

"The parameter's number in the group."
index_of(::Group, param::Integer) = Int(param)
function index_of(group::Group, param::AbstractString)
    index = get(group.indices, param, 0)
    index == 0 && throw(KeyError("$param: group $(group.name) has $(join((p.name for p in group.params), ", "))"))
    return index
end

# The library counts from 0. A number is outside of its range exactly if it is outside of Julia's range.
param_index(group, param) = (index_of(group, param) - 1) % UInt64

declared_param(group, param) = group.params[index_of(group, param)]

"What a group was declared as, with defaults filled in: fields of `fsdp_group_info`, of which `group_index` is from 0."
function group_info(group::Group)
    found = blank(fsdp_group_info)
    check(fsdp_get_group_info(group.number, found))
    return told(found)
end

"A parameter as declared, with defaults filled in and the lr_scale of now: a `Param`, which `create_group` takes."
function param_info(group::Group, param)
    found = blank(fsdp_param)
    check(fsdp_get_param_info(group.number, param_index(group, param), found))
    raw = found.memory[]
    splits = [Int(unsafe_load(raw.matrix_splits, n)) for n in 1:Int(raw.matrix_split_count)]
    box(sizes) = sizes == C_NULL ? nothing : dims_of(sizes, raw)
    fields = (flags = raw.flags, granule = Granule(raw.granule), granule_rows = raw.granule_rows,
        row_dimensions = raw.row_dimensions, lr_scale = raw.lr_scale, quantization = raw.quantization,
        missing_grad = MissingGrad(raw.missing_grad), piece = Int(raw.piece),
        optimizer = getfield_of(found, :optimizer), splits = raw.matrix == 0 ? nothing : splits,
        global_dims = box(raw.global_shape),
        global_offset = box(raw.global_offset))
    return Param(unsafe_string(raw.name), element_type(raw.dtype), dims_of(raw.shape, raw), fields)
end

"Julia's order of dims; a scalar has none, and perhaps no address of them."
dims_of(sizes::Ptr, raw) = ntuple(n -> Int(unsafe_load(sizes, raw.dimension_count - n + 1)), Int(raw.dimension_count))

"The part of a parameter that a rank stores, this one's if none is given: fields of `fsdp_chunk`, offsets from 0."
function chunk(group::Group, param, rank_of = rank(group.model.context))
    found = blank(fsdp_chunk)
    check(fsdp_get_chunk(group.number, param_index(group, param), rank_of, found))
    return told(found)
end

"Data of a whole parameter: what fits it, or its numbers in a row. Transposed numbers would be accepted by the library."
function full(group, param, data::AbstractArray)
    return fitting(param, declared_param(group, param).dims, data), dtype_of(eltype(data))
end

function fitting(what, dims::Dims, data::AbstractArray)
    size(data) == dims || size(data) == (prod(dims),) ||
        throw(DimensionMismatch("$what has dims $dims, not $(size(data))"))
    return dense(data)
end

"Of codes those of the parameter; of scales one for each block, which lies in the first two: columns and rows."
function plane_dims(param::Param, which::Plane)
    quantization = Int32(get(param.fields, :quantization, 0))
    (which in (PLANE_ROW, PLANE_COLUMN) || quantization == 0) && return param.dims
    quantization == FSDP_QUANTIZE_FP8 && return map(_ -> 1, param.dims)
    block = quantization == FSDP_QUANTIZE_FP8_BLOCK ? (128, 128) : which == PLANE_ROW_SCALE ? (32, 1) : (1, 32)
    return ntuple(n -> n > 2 ? param.dims[n] : cld(param.dims[n], block[n]), length(param.dims))
end

"""
    load_param(group, param, data; root = EVERY_RANK)

Load a whole parameter, inside the update window. With a root only the root's data counts, and other ranks may pass
`nothing`.
"""
load_param(group::Group, param, data; root = EVERY_RANK) = load(fsdp_load_param, group, param, (), data, root)

"""
    load_plane(group, param, which, data; root = EVERY_RANK)

Load a whole plane of a frozen quantized parameter as it is: codes and MXFP8 scales as the bits that `plane` shows
(`UInt8`), other scales as `Float32`. The data has the plane's dims, or is a vector. With a root only the root's data
counts, and other ranks may pass `nothing`.
"""
function load_plane(group::Group, param, which::Plane, data::Union{Nothing,AbstractArray}; root = EVERY_RANK)
    data = data === nothing ? UInt8[] : fitting("$which of $param", plane_dims(declared_param(group, param), which), data)
    codes = which in (PLANE_ROW, PLANE_COLUMN)
    dtype = eltype(data) == UInt8 ? (codes ? FLOAT8_E4M3 : E8M0) : dtype_of(eltype(data))
    GC.@preserve data @call group.state fsdp_load_plane(group.number, param_index(group, param), Int32(which),
        isempty(data) ? C_NULL : address(data), Int32(dtype), length(data), root, 0)
end

"""
    load_state(group, param, name, data; root = EVERY_RANK)

Load a named optimizer state of a parameter, as `load_param` does its weights.
"""
load_state(group::Group, param, name, data; root = EVERY_RANK) = load(fsdp_load_state, group, param, (name,), data, root)

"""
    load_grad(group, param, data; root = EVERY_RANK)

Replace a whole main gradient, in an update window with gradients, as `load_param` loads weights.
"""
load_grad(group::Group, param, data; root = EVERY_RANK) = load(fsdp_load_grad, group, param, (), data, root)

function load(f, group::Group, param, name::Tuple, data::AbstractArray, root)
    data, dtype = full(group, param, data)
    GC.@preserve data @call group.state f(group.number, param_index(group, param), name..., address(data), Int32(dtype),
        length(data), root, 0)
end
load(f, group::Group, param, name::Tuple, ::Nothing, root) =
    @call group.state f(group.number, param_index(group, param), name..., C_NULL, FSDP_FLOAT32, 0, root, 0)

"""
    read_param(group, param, T = Float32; root = EVERY_RANK)

Return the whole main weight as a new array; `nothing` on ranks other than the root.
"""
read_param(group::Group, param, T::DataType = Float32; root = EVERY_RANK) =
    read_whole(fsdp_read_param, group, param, (), T, root)

"""
    read_state(group, param, name, T = Float32; root = EVERY_RANK)

A whole optimizer state of a parameter, as `read_param` gives its weights.
"""
read_state(group::Group, param, name, T::DataType = Float32; root = EVERY_RANK) =
    read_whole(fsdp_read_state, group, param, (name,), T, root)

"""
    read_grad(group, param, T = Float32; root = EVERY_RANK)

A whole main gradient as the optimizer will see it, as `read_param` gives weights.
"""
read_grad(group::Group, param, T::DataType = Float32; root = EVERY_RANK) =
    read_whole(fsdp_read_grad, group, param, (), T, root)

function read_whole(f, group, param, name, T, root)
    index = param_index(group, param)
    data = Array{T}(undef, index < length(group.params) ? group.params[index+1].dims : (1,))
    GC.@preserve data @call group.state f(group.number, index, name..., address(data), Int32(dtype_of(T)), length(data),
        root, 0)
    return root in (EVERY_RANK, rank(group.model.context)) ? data : nothing
end

"""
    load_chunk(group, param, data, row_offset, row_count)

Load rows that this rank owns (see `chunk`). A row is a slice along Julia's last dimension.
"""
function load_chunk(group::Group, param, data::AbstractArray, row_offset, row_count)
    whole = declared_param(group, param).dims
    wanted = isempty(whole) ? 1 : prod(whole[1:end-1]) * row_count
    length(data) == wanted || throw(DimensionMismatch("$row_count rows of $param are $wanted numbers, not $(length(data))"))
    data = dense(data)
    GC.@preserve data @call group.state fsdp_load_chunk(group.number, param_index(group, param), address(data),
        Int32(dtype_of(eltype(data))), row_offset, row_count, 0)
end

"Give a parameter another lr_scale from the next step on, alike on every rank."
set_param_lr_scale(group::Group, param, lr_scale) =
    @call group.state fsdp_set_param_lr_scale(group.number, param_index(group, param), lr_scale)

"Stop training a parameter, or train it again, between steps and alike on every rank."
set_param_trainable(group::Group, param, trainable::Bool) =
    @call group.state fsdp_set_param_trainable(group.number, param_index(group, param), trainable)
