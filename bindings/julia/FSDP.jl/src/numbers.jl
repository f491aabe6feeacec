# SPDX-License-Identifier: Apache-2.0
# Julia's types for the library's dtypes.

"""
    BFloat16(x)

The upper half of a `Float32`, rounded to nearest even. Arithmetic with it is that of `Float32`. Arrays of another
package's type of the same bits are `reinterpret(ThatType, array)`.
"""
struct BFloat16 <: AbstractFloat
    bits::UInt16
    BFloat16(bits::UInt16, ::Val{:bits}) = new(bits)
end

function BFloat16(x::Float32)
    bits = reinterpret(UInt32, x)
    isnan(x) && return BFloat16((bits >> 16) % UInt16 | 0x0040, Val(:bits))
    return BFloat16(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) % UInt16, Val(:bits))
end
BFloat16(x::Real) = BFloat16(Float32(x))
BFloat16(x::BFloat16) = x
Base.Float32(x::BFloat16) = reinterpret(Float32, UInt32(x.bits) << 16)
Base.Float64(x::BFloat16) = Float64(Float32(x))
(::Type{T})(x::BFloat16) where {T<:Integer} = T(Float32(x))
Base.promote_rule(::Type{BFloat16}, ::Type{T}) where {T<:Union{Float32,Float64}} = T
Base.promote_rule(::Type{BFloat16}, ::Type{T}) where {T<:Union{Float16,Integer}} = Float32
for operation in (:+, :-, :*, :/, :^)
    @eval Base.$operation(x::BFloat16, y::BFloat16) = $operation(Float32(x), Float32(y))
end
for comparison in (:<, :<=, :(==))
    @eval Base.$comparison(x::BFloat16, y::BFloat16) = $comparison(Float32(x), Float32(y))
end
Base.:-(x::BFloat16) = -Float32(x)
Base.isnan(x::BFloat16) = isnan(Float32(x))
Base.isinf(x::BFloat16) = isinf(Float32(x))
Base.zero(::Type{BFloat16}) = BFloat16(0f0)
Base.one(::Type{BFloat16}) = BFloat16(1f0)
Base.show(io::IO, x::BFloat16) = print(io, "BFloat16(", Float32(x), ")")

dtype_of(::Type{Float32}) = FLOAT32
dtype_of(::Type{BFloat16}) = BFLOAT16
dtype_of(::Type{Float16}) = FLOAT16
dtype_of(::Type{UInt8}) = UINT8
dtype_of(::Type{T}) where {T} =
    throw(ArgumentError("elements are Float32, Float16, FSDP.BFloat16 or UInt8, not $T: convert them, as Float32.(array)"))

element_type(dtype::Integer) =
    dtype == FSDP_FLOAT32 ? Float32 : dtype == FSDP_BFLOAT16 ? BFloat16 : dtype == FSDP_FLOAT16 ? Float16 :
    dtype in (FSDP_FLOAT8_E4M3, FSDP_E8M0, FSDP_UINT8) ? UInt8 :  # bytes, or a code's bits
    throw(ArgumentError("no dtype $dtype is known, of $(fsdp_get_dtype_size(dtype)) bytes"))

# Contiguous memory with the numbers of an array: the array itself, unless it is a view or computed.
dense(array::DenseArray) = array
dense(array::AbstractArray) = Array(array)
# Also for arrays of a GPU, whose pointers have another type.
address(array) = reinterpret(Ptr{Cvoid}, pointer(array))
