# SPDX-License-Identifier: Apache-2.0

"""
Memory that the library owns: `address`, `type` of the elements, `dims` as Julia has them (reversed), `device`,
`device_index`, `is_read_only`. `array(tensor)` is an Array over it; for GPU memory CUDA.jl makes an array from the
address.
"""
struct Tensor
    address::Ptr{Cvoid}
    type::DataType
    dims::Dims
    device::DeviceKind
    device_index::Int
    is_read_only::Bool
    handle::Handle{State}
end

function Tensor(found::fsdp_tensor, handle)
    return Tensor(found.data, element_type(found.dtype), dims_of(found.shape, found), DeviceKind(found.device), found.device_index,
        found.flags & FSDP_TENSOR_READ_ONLY != 0, handle)
end

Base.show(io::IO, tensor::Tensor) = print(io, "Tensor(", tensor.type, ", ", tensor.dims, ", ", tensor.device, ")")

"""
    array(tensor)

The library's memory as an Array, without a copy. The memory stays mapped as long as the array exists, whatever was
closed. Writing to a read-only, mapped array throws `ReadOnlyMemoryError`.
"""
function array(tensor::Tensor)
    tensor.device == DEVICE_HOST ||
        throw(ArgumentError("memory of a GPU: make CUDA.jl's array of the address of tensors(group)[\"name\"]"))
    return lend(tensor.handle, unsafe_wrap(Array, Ptr{tensor.type}(tensor.address), tensor.dims))
end

# What a program reads or writes: of a GPU, the tensor itself.
view_of(tensor::Tensor) = tensor.device == DEVICE_HOST ? array(tensor) : tensor
