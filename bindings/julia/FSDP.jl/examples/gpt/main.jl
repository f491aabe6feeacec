# SPDX-License-Identifier: Apache-2.0
# A tiny GPT by hand, sharded, beside the same math over arrays of its own. examples/README.md describes it.
#
#     fsdp-run -n 2 --no-prefix julia main.jl
using FSDP
using Printf: @printf

include("layers.jl")

const BATCH, STEPS, LEARNING_RATE, WEIGHT_DECAY = 4, 5, 1e-3, 0.1
const TEXT = codeunits(
    "Each rank of a sharded job keeps a part of every weight, of every gradient and of the state of the optimizer. " *
    "Before a layer is used its weights are gathered, and after it they are given back. What the ranks' gradients " *
    "add up to goes to the one that keeps the part. So all ranks together need the memory of one copy.",
)
const GROUPS = ["embedding" => EMBEDDING, ("blocks.$layer" => BLOCK for layer in 0:LAYERS-1)..., "head" => HEAD]

"The first weights of a parameter: integers of 32 bits, then a division by a power of two."
function make_weight(number, name, dims)
    value(i) = begin
        bits = i * 0x9e3779b1 + UInt32(40503number + 1)
        bits = xor(bits, bits >> 16) * 0x85ebca77
        bits = xor(bits, bits >> 13)
        return Float32(Int(bits & 0xffff) - 32768) / 2f0^19
    end
    is_gain = occursin("norm", name) && endswith(name, "weight")
    return reshape([value(UInt32(i)) + is_gain for i in 0:prod(dims)-1], dims)
end

"The first weights of each group."
function make_weights()
    number = -1
    return [[make_weight(number += 1, name, dims) for (name, dims) in params] for (_, params) in GROUPS]
end

"A rank's sequences of a step, and what follows each byte of them, as indices from 1."
function read_batch(step, rank, world_size)
    size = BATCH ÷ world_size
    starts = [11 * (step * BATCH + rank * size + b) for b in 0:size-1]
    cut(start) = Int.(TEXT[start+1:start+CONTEXT]) .+ 1
    return reduce(vcat, cut.(starts)), reduce(vcat, cut.(starts .+ 1))
end

include("alone.jl")

"The sealed model with the first weights."
function make_model(context)
    model = create_model(context)
    for (group, params) in GROUPS
        create_group(model, group, [Param("$group.$name", dims...) for (name, dims) in params])
    end
    seal(model)
    for (group, weights) in zip(model.groups, make_weights()), (index, values) in enumerate(weights)
        load_param(group, index, values)
    end
    publish_weights(model)
    return model
end

"Runs math with a group's weights."
visit(math, group, phase) = unshard(group, phase) do weights
    math([weights[index] for index in 1:length(group.params)])
end

"... and its gradients, which are then reduced."
function visit_backward(math, group)
    grads = acquire_grads(group)
    result = visit(w -> math(w, [grads[param.name] for param in group.params]), group, FSDP.BACKWARD)
    reduce_grad(group)
    return result
end

"One step; gives this rank's loss."
function train(model, tokens, targets)
    first_group, blocks, last_group = model.groups[1], model.groups[2:end-1], model.groups[end]
    x, kept = visit(w -> embed(w, tokens), first_group, FSDP.FORWARD), []
    for group in blocks
        x, needed = visit(w -> block(w, x), group, FSDP.FORWARD)
        push!(kept, needed)
    end
    # The last group's forward and backward pass are one.
    loss, dx = visit_backward((w, g) -> head(w, g, x, targets), last_group)
    for (group, needed) in reverse(collect(zip(blocks, kept)))
        dx = visit_backward((w, g) -> block_backward(w, g, needed, dx), group)
    end
    visit_backward((_, g) -> embed_backward(g, tokens, dx), first_group)
    finish_grads(model)
    step_adamw(model, LEARNING_RATE; weight_decay = WEIGHT_DECAY)
    return loss
end

"Bytes of a rank's part of weights, gradients and optimizer states, and of all memory."
function rank_bytes(model, rank)
    state = sum(FSDP.role_bytes(model, role, rank)
                for role in (FSDP.ROLE_COMPUTE, FSDP.ROLE_MAIN, FSDP.ROLE_GRAD, FSDP.ROLE_OPTIMIZER))
    return state, FSDP.role_bytes(model, FSDP.ROLE_ALL, rank)
end

function report(model, context, losses, alone, weights_differ)
    println("julia $VERSION, $(world_size(context)) ranks")
    for step in 1:STEPS
        @printf("step %d: loss %.7f, alone %.7f\n", step, losses[step], alone[step])
    end
    @printf("weights differ by at most %.1e\n", weights_differ)
    one_copy = 16sum(prod(dims) for (_, params) in GROUPS for (_, dims) in params)
    for rank in 0:world_size(context)-1
        state, all = rank_bytes(model, rank)
        println("rank $rank: state $state bytes of $one_copy, $all in all")
    end
end

alone, weights_alone = train_alone()
Context() do context
    model = make_model(context)
    losses = map(0:STEPS-1) do step
        loss = train(model, read_batch(step, rank(context), world_size(context))...)
        all_reduce_values(context, loss, FSDP.VALUE_MEAN)
    end
    weights_differ = maximum(maximum(abs.(read_param(group, index) .- values))
                             for (group, weights) in zip(model.groups, weights_alone)
                             for (index, values) in enumerate(weights))
    rank(context) == 0 && report(model, context, losses, alone, weights_differ)
    abs(losses[1] - alone[1]) <= 1e-5 || error("the first loss is another one alone")
    maximum(abs.(losses .- alone)) <= 1e-4 || error("a later loss is another one alone")
    weights_differ <= 1e-4 || error("the weights are others alone")
end
