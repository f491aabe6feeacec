# SPDX-License-Identifier: Apache-2.0
# The interpreter of bindings/conformance/scenarios.txt in Julia; the README there says what it does.
#
# usage: julia conformance.jl threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt
import FSDP
using FSDP: BFloat16, BFLOAT16, EVERY_RANK, FLOAT32, LibFSDP, Param
using Logging

const TIMEOUT_MS = 30000
const CRC_TABLE = [foldl((c, _) -> c & 1 == 1 ? c >> 1 ⊻ 0xedb88320 : c >> 1, 1:8; init = UInt32(n)) for n in 0:255]

function crc(bytes::Vector{UInt8}, value = 0x00000000)
    value = ~value
    for byte in bytes
        value = CRC_TABLE[((value ⊻ byte) & 0xff) + 1] ⊻ value >> 8
    end
    return ~value
end
hex(value::UInt32) = string(value; base = 16, pad = 8)
hex(value::Float64) = string(reinterpret(UInt64, value); base = 16, pad = 16)
bytes_of(array::Array) = Vector{UInt8}(reinterpret(UInt8, vec(array)))
hash_of(arrays...) = hex(foldl((value, array) -> crc(bytes_of(array), value), arrays; init = 0x00000000))

struct Line
    text::String
    only::Int  # the rank that makes the call; -1: every one
    but::Int
    words::Vector{String}
    keys::Dict{Symbol,String}
    given::Vector{String}
    failed::Union{Nothing,Tuple{Int,Int}}
end

"`a B c`, ` before` -> the words of both sides of a mark"
halves(text, mark) = (split(text, mark; limit = 2)..., "")[1:2]

function Line(text, defines)
    define(word) = get(defines, word, word)
    call, given = halves(text, " -> ")
    call, failed = halves(call, " ! ")
    words, only, but = define.(String.(split(call))), -1, -1
    if words[1] in ("on", "off")
        rank = parse(Int, words[2])
        only, but = words[1] == "on" ? (rank, -1) : (-1, rank)
        words = words[3:end]
    end
    pairs = [split(word, '='; limit = 2) for word in words if occursin('=', word)]
    keys = Dict{Symbol,String}(Symbol(key) => define(value) for (key, value) in pairs)
    numbers = parse.(Int, define.(String.(split(failed))))
    return Line(text, only, but, filter(word -> !occursin('=', word), words), keys, split(given),
        isempty(numbers) ? nothing : (numbers[1], numbers[2]))
end

is_for(line, rank) = line.only in (-1, rank) && line.but != rank

struct Scenario
    name::String
    worlds::Vector{Int}
    lines::Vector{Line}
end

function read_scenarios(path)
    defines, scenarios = Dict{String,String}(), Scenario[]
    for text in filter(text -> !isempty(text) && text[1] != '#', strip.(readlines(path)))
        word, rest = split(text)[1], split(text)[2:end]
        if word == "define"
            defines[rest[1]] = rest[2]
        elseif word == "scenario"
            push!(scenarios, Scenario(rest[1], parse.(Int, rest[2:end]), []))
        elseif word != "end"
            push!(scenarios[end].lines, Line(text, defines))
        end
    end
    return scenarios
end

"What one rank of a scenario has."
mutable struct Rank
    context::FSDP.Context
    rank::Int
    world::Int
    save_folder::String
    load_folder::String
    named::Dict{String,Any}
    params::Dict{String,Vector{Param}}
    order::Vector{String}  # of the groups' names
    declared::Vector{Param}
    visits::Vector{Any}
end
Rank(context, rank, world, save, load) = Rank(context, rank, world, save, load, Dict(), Dict(), [], [], [])

include("conformance_calls.jl")

"A status that was not expected: the ranks no longer agree on what comes next."
struct Wrong <: Exception end

const IS_AS_EXPECTED = Threads.Atomic{Bool}(true)

"Makes the call, compares, and returns its line of the transcript."
function execute(rank, line, number, world_index)
    status, blamed, value, why = 0, -1, "-", ""
    try
        given = call(rank, Val(Symbol(line.words[1])), line.words[2:end], line.keys)
        given isa String && (value = given)
    catch error
        error isa FSDP.Error || rethrow()
        status, blamed, why = Int(error.status), something(error.rank, -1), error.message
    end
    wanted = isempty(line.given) ? value : line.given[min(world_index, end)]
    failed = something(line.failed, (0, -1))
    if (status, blamed) != failed || status == 0 && value != wanted
        IS_AS_EXPECTED[] = false
        println(stderr, line.text, ", world ", rank.world, ", rank ", rank.rank, "\n  gave ", status, " ", value, ", rank ",
            blamed, ": ", why)
        status == failed[1] || throw(Wrong())
    end
    return "$number $status $blamed $value\n"
end

function run_rank(scenario, world_index, rank)
    number, transcript = 0, 0x00000000
    try
        for line in filter(line -> is_for(line, rank.rank), scenario.lines)
            if line.words[1] == "param"
                declare(rank, line)
            elseif line.words[1] == "visit"
                push!(rank.visits, (rank.named[line.words[2]], phase(line.words[3]), piece_in(line.keys)))
            else
                number += 1
                transcript = crc(Vector{UInt8}(execute(rank, line, number, world_index)), transcript)
            end
        end
    catch error
        IS_AS_EXPECTED[] = false
        FSDP.abort(rank.context, "not as expected")
        error isa Wrong || showerror(stderr, error, catch_backtrace())
    end
    foreach(close, filter(object -> object isa FSDP.Owner, collect(values(rank.named))))
    FSDP.close_at_once(rank.context)
    return "$(scenario.name) $(rank.world) $(rank.rank) $(hex(transcript))\n"
end

function run_threads(scenario, world_index, world, folders)
    Threads.nthreads() >= world || error("$world ranks as threads need julia -t $world")
    contexts = FSDP.local_contexts(world; timeout_ms = TIMEOUT_MS)
    ranks = [Rank(context, number - 1, world, folders...) for (number, context) in enumerate(contexts)]
    told = fill("", world)
    # Each iteration on a thread of its own: there are as many.
    Threads.@threads for number in 1:Threads.nthreads()
        number <= world && (told[number] = run_rank(scenario, world_index, ranks[number]))
    end
    print(stdout, told...)
end

function main(mode, save, load, path)
    global_logger(NullLogger())  # scenarios fail on purpose
    launched = parse(Int, get(ENV, "WORLD_SIZE", "1"))
    for scenario in read_scenarios(path)
        if mode == "threads"
            for (index, world) in enumerate(scenario.worlds)
                run_threads(scenario, index, world, (save, load))
            end
        elseif launched in scenario.worlds
            context = FSDP.Context(; timeout_ms = TIMEOUT_MS)
            rank = Rank(context, FSDP.rank(context), launched, save, load)
            print(stdout, run_rank(scenario, findfirst(==(launched), scenario.worlds), rank))
            flush(stdout)
        end
    end
    return IS_AS_EXPECTED[] ? 0 : 1
end

if length(ARGS) != 4 || !(ARGS[1] in ("threads", "processes"))
    println(stderr, "usage: julia conformance.jl threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt")
    exit(2)
end
exit(main(ARGS...))
