# SPDX-License-Identifier: Apache-2.0

"""
Some equal matrices of one parameter, which this rank has whole inside the block of `foreach_matrix`: a vector of Arrays
over the library's memory, to be changed in place. On a GPU they are Tensors.

A matrix of R rows and C columns is an Array of dims `(C, R)`: C's rows, which lie together in memory, are Julia's
columns. So it is the transpose of the matrix in `fsdp.h`, as a parameter's Array is. `rows` and `columns` are those of
`fsdp.h`.

`group`, `name` and `param_index` (from 1) say which parameter it is, `batch_index` which matrix of a stack comes first,
`split_index` and `row_offset` which rows; these three count from 0.
"""
struct WholeMatrices{V} <: AbstractVector{V}
    group::Group
    name::String
    param_index::Int
    batch_index::Int
    split_index::Int
    row_offset::Int
    rows::Int
    columns::Int
    views::Vector{V}
end

Base.size(matrices::WholeMatrices) = size(matrices.views)
Base.getindex(matrices::WholeMatrices, number::Int) = matrices.views[number]

function WholeMatrices(model::Model, raw::fsdp_matrix)
    dims, kind, device = (Int(raw.columns), Int(raw.rows)), element_type(raw.dtype), device_of(model)
    view_at(data) = view_of(Tensor(data, kind, dims, device..., false, model.handle))
    views = [view_at(raw.data + n * raw.stride_bytes) for n in 0:Int(raw.count)-1]
    return WholeMatrices(group_of(model, raw.group), unsafe_string(raw.name), Int(raw.param_index) + 1,
        Int(raw.batch_index), Int(raw.split_index), Int(raw.row_offset), Int(raw.rows), Int(raw.columns), views)
end

"""
    foreach_matrix(f, model; source, target, dtype = Float32, stream)

Bring each matrix of the model whole to one rank, inside the update window, and return the rows. `f(matrices)` is called
for all `WholeMatrices` of this rank:

    foreach_matrix(model) do matrices
        foreach(matrix -> matrix .= orthogonalized(matrix), matrices)
    end

`source` and `target` are left out for the main gradients, or are `"main_weight"` or the name of a state. Without a
target the rows go back to the source. An exception of `f` leaves the matrices collected: `discard_step` on every rank.
"""
function foreach_matrix(f, model::Model; source = nothing, target = nothing, dtype::DataType = Float32, stream = C_NULL)
    wanted = options(fsdp_matrix_options, (source = source, target = target, dtype = dtype_of(dtype)))
    stream = Ptr{Cvoid}(stream)
    @call model.state fsdp_collect_matrices(model.number, wanted, stream)
    while true
        found = blank(fsdp_matrix)
        @call model.state fsdp_next_matrix(model.number, stream, found)
        found.memory[].data == C_NULL && break
        f(WholeMatrices(model, found.memory[]))
    end
    @call model.state fsdp_return_matrices(model.number, stream)
end

"The matrices' owners, costs, waves and bytes, as JSON."
matrix_plan(model::Model) = read_text((text, size) -> fsdp_get_matrix_plan(model.number, text, size))
