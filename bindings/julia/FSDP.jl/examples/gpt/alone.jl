# SPDX-License-Identifier: Apache-2.0
# The same training without the library: arrays, and AdamW written out (Loshchilov and Hutter, arXiv:1711.05101).

"The losses of all steps, and the last weights."
function train_alone()
    weights, losses = make_weights(), Float64[]
    zeros_like() = [[zero(param) for param in group] for group in weights]
    exp_avg, exp_avg_sq = zeros_like(), zeros_like()
    for step in 1:STEPS
        grads = zeros_like()
        push!(losses, find_grads(weights, grads, read_batch(step - 1, 0, 1)...))
        for groups in zip(weights, grads, exp_avg, exp_avg_sq), params in zip(groups...)
            step_alone(step, params...)
        end
    end
    return losses, weights
end

function find_grads(w, g, tokens, targets)
    x, kept = embed(w[1], tokens), []
    for layer in 1:LAYERS
        x, needed = block(w[layer+1], x)
        push!(kept, needed)
    end
    loss, dx = head(w[end], g[end], x, targets)
    for layer in LAYERS:-1:1
        dx = block_backward(w[layer+1], g[layer+1], kept[layer], dx)
    end
    embed_backward(g[1], tokens, dx)
    return loss
end

function step_alone(step, w, g, m, v)
    @. m = 0.9f0 * m + 0.1f0 * g
    @. v = 0.999f0 * v + 0.001f0 * g^2
    rate, correct = Float32(LEARNING_RATE / (1 - 0.9^step)), Float32(sqrt(1 - 0.999^step))
    keep = Float32(1 - LEARNING_RATE * WEIGHT_DECAY)
    @. w = keep * w - rate * m / (sqrt(v) / correct + 1f-8)
end
