# SPDX-License-Identifier: Apache-2.0
# What a visit of a group costs over FSDP.jl, views by their names; bindings/benchmark/visit.c says what it is.
using FSDP

const VIEWS, VISITS, ROUNDS = 12, 20000, 9

function time_visits(group, names)
    sum = 0f0
    began = time_ns()
    for _ in 1:VISITS
        unshard(group) do weights
            for name in names
                sum += (weights[name]::Matrix{Float32})[1]
            end
        end
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
time_visits(group, names)
println(round(sort([time_visits(group, names) for _ in 1:ROUNDS])[ROUNDS÷2+1]; digits = 1))
