# SPDX-License-Identifier: Apache-2.0

@testset "structs are the compiler's" begin
    for (T, size, offsets) in FSDP.LibFSDP.LAYOUTS
        @test isbitstype(T)
        @test sizeof(T) == size
        @test Tuple(Int(fieldoffset(T, n)) for n in 1:fieldcount(T)) == offsets
    end
    @test length(FSDP.LibFSDP.LAYOUTS) >= 21
end

@testset "constants are the header's" begin
    for (constant, value) in FSDP.CONSTANTS
        @test Int64(constant) == value
    end
    @test unsafe_string(FSDP.LibFSDP.fsdp_get_status_name(Int32(FSDP.MISMATCH))) == "FSDP_MISMATCH"
    for status in instances(FSDP.Status)
        @test unsafe_string(FSDP.LibFSDP.fsdp_get_status_name(Int32(status))) == "FSDP_$status"
    end
end

@testset "bfloat16 rounds to nearest even" begin
    @test BFloat16(1f0).bits == 0x3f80
    @test BFloat16(reinterpret(Float32, 0x3f808000)).bits == 0x3f80
    @test BFloat16(reinterpret(Float32, 0x3f818000)).bits == 0x3f82
    @test BFloat16(reinterpret(Float32, 0x3f808001)).bits == 0x3f81
    @test isnan(BFloat16(NaN32)) && Float32(BFloat16(-Inf32)) == -Inf32
    @test BFloat16(1.5f0) * 2f0 === 3f0
end

@testset "options" begin
    wrong = thrown(() -> FSDP.options(FSDP.LibFSDP.fsdp_model_options, (stratgy = 1,)))
    @test wrong isa ArgumentError && occursin("it has", wrong.msg) && occursin("strategy", wrong.msg)
    @test thrown(() -> Context(; log = C_NULL)) isa ArgumentError
end
