# SPDX-License-Identifier: Apache-2.0
# What a visit of a group costs over FSDP.jl; bindings/benchmark/visit.c says what it is.
#
# usage: julia visit.jl index|name      how views are looked up
using FSDP

const VIEWS, VISITS, ROUNDS = 12, 20000, 9

first_numbers(weights, params) = sum((weights[param]::Matrix{Float32})[1] for param in params)

function time_visits(group, params)
    sum = 0f0
    began = time_ns()
    for _ in 1:VISITS
        sum += unshard(weights -> first_numbers(weights, params), group)::Float32
    end
    sum == 0 || error("the weights were never loaded")
    return (time_ns() - began) / VISITS
end

context = FSDP.local_contexts(1)[1]
model = create_model(context)
names = ["w$n" for n in 1:VIEWS]
group = create_group(model, "layer", [Param(name, 64, 64) for name in names])
seal(model)
publish_weights(model)
params = ARGS == ["index"] ? (1:VIEWS) : names
time_visits(group, params)
println(round(sort([time_visits(group, params) for _ in 1:ROUNDS])[ROUNDS÷2+1]; digits = 1))
