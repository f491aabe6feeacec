# SPDX-License-Identifier: Apache-2.0
# The layers of the tiny GPT: a column for each token. Each takes its weights and adds to its gradients as arrays,
# whichever array owns them.

const LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 2, 64, 2, 32, 256

# A parameter's name and dims, which the library has reversed. Their order is that of the arrays below.
const EMBEDDING = ["tokens.weight" => (WIDTH, VOCABULARY), "places.weight" => (WIDTH, CONTEXT)]
const BLOCK = [
    "norm1.weight" => (WIDTH,),
    "norm1.bias" => (WIDTH,),
    "qkv.weight" => (WIDTH, 3WIDTH),
    "proj.weight" => (WIDTH, WIDTH),
    "norm2.weight" => (WIDTH,),
    "norm2.bias" => (WIDTH,),
    "up.weight" => (WIDTH, 4WIDTH),
    "up.bias" => (4WIDTH,),
    "down.weight" => (4WIDTH, WIDTH),
    "down.bias" => (WIDTH,),
]
const HEAD = ["norm.weight" => (WIDTH,), "norm.bias" => (WIDTH,), "head.weight" => (WIDTH, VOCABULARY)]

mean_of_columns(x) = sum(x, dims = 1) ./ size(x, 1)
sum_of_rows(x) = vec(sum(x, dims = 2))

function norm(x, gain, bias)
    centered = x .- mean_of_columns(x)
    factor = 1 ./ sqrt.(mean_of_columns(abs2.(centered)) .+ 1f-5)
    scaled = centered .* factor
    return scaled .* gain .+ bias, (scaled, factor)
end

"Adds to the gradients of gain and bias; gives that of the input."
function norm_backward(dy, (scaled, factor), gain, dgain, dbias)
    dbias .+= sum_of_rows(dy)
    dgain .+= sum_of_rows(dy .* scaled)
    d = dy .* gain
    return factor .* (d .- mean_of_columns(d) .- scaled .* mean_of_columns(d .* scaled))
end

# The approximation by tanh: Hendrycks and Gimpel, arXiv:1606.08415.
const GELU_FACTOR, GELU_CUBE = Float32(sqrt(2 / pi)), 0.044715f0
gelu(x) = x / 2 * (1 + tanh(GELU_FACTOR * (x + GELU_CUBE * x^3)))
function gelu_slope(x)
    t = tanh(GELU_FACTOR * (x + GELU_CUBE * x^3))
    return (1 + t) / 2 + x / 2 * (1 - t^2) * GELU_FACTOR * (1 + 3GELU_CUBE * x^2)
end

function softmax(x)
    e = exp.(x .- maximum(x, dims = 1))
    return e ./ sum(e, dims = 1)
end

"The rows of queries (part 0), keys (1) or values (2) of a head, and those of its output (part 0)."
function rows_of(head, part = 0)
    size = WIDTH ÷ HEADS
    return part * WIDTH + head * size .+ (1:size)
end
sequences(x) = (first:first+CONTEXT-1 for first in 1:CONTEXT:size(x, 2))
places(x) = ((columns, head) for columns in sequences(x) for head in 0:HEADS-1)
parts_of(qkv, columns, head) = (qkv[rows_of(head, part), columns] for part in 0:2)

"Causal attention: the output, and the probabilities of each sequence and head."
function attention(qkv)
    mixed, kept = zeros(Float32, WIDTH, size(qkv, 2)), []
    for (columns, head) in places(qkv)
        q, k, v = parts_of(qkv, columns, head)
        scores = k' * q ./ sqrt(Float32(size(q, 1)))
        p = softmax([from <= to ? scores[from, to] : -Inf32 for from in 1:CONTEXT, to in 1:CONTEXT])
        mixed[rows_of(head), columns] = v * p
        push!(kept, p)
    end
    return mixed, kept
end

function attention_backward(dmixed, qkv, kept)
    dqkv = zero(qkv)
    for (p, (columns, head)) in zip(kept, places(qkv))
        q, k, v = parts_of(qkv, columns, head)
        d = dmixed[rows_of(head), columns]
        dp = v' * d
        dscores = p .* (dp .- sum(dp .* p, dims = 1)) ./ sqrt(Float32(size(q, 1)))
        for (part, dpart) in enumerate((k * dscores, q * dscores', d * p'))
            dqkv[rows_of(head, part - 1), columns] = dpart
        end
    end
    return dqkv
end

embed(w, tokens) = w[1][:, tokens] .+ w[2][:, mod1.(1:length(tokens), CONTEXT)]

function embed_backward(g, tokens, dx)
    for (place, token) in enumerate(tokens)
        g[1][:, token] .+= dx[:, place]
        g[2][:, mod1(place, CONTEXT)] .+= dx[:, place]
    end
end

"The output, and what the backward pass needs."
function block(w, x)
    normed1, norm1 = norm(x, w[1], w[2])
    qkv = w[3]' * normed1
    mixed, probabilities = attention(qkv)
    x = x .+ w[4]' * mixed
    normed2, norm2 = norm(x, w[5], w[6])
    up = w[7]' * normed2 .+ w[8]
    active = gelu.(up)
    return x .+ w[9]' * active .+ w[10], (normed1, norm1, qkv, probabilities, mixed, normed2, norm2, up, active)
end

"The gradient of the block's input."
function block_backward(w, g, (normed1, norm1, qkv, probabilities, mixed, normed2, norm2, up, active), dx)
    g[10] .+= sum_of_rows(dx)
    g[9] .+= active * dx'
    dup = w[9] * dx .* gelu_slope.(up)
    g[8] .+= sum_of_rows(dup)
    g[7] .+= normed2 * dup'
    dx = dx .+ norm_backward(w[7] * dup, norm2, w[5], g[5], g[6])
    g[4] .+= mixed * dx'
    dqkv = attention_backward(w[4] * dx, qkv, probabilities)
    g[3] .+= normed1 * dqkv'
    return dx .+ norm_backward(w[3] * dqkv, norm1, w[1], g[1], g[2])
end

"The mean loss, and the gradient of x: forward and backward in one go."
function head(w, g, x, targets)
    normed, kept = norm(x, w[1], w[2])
    p = softmax(w[3]' * normed)
    hits = CartesianIndex.(targets, 1:length(targets))
    loss = -sum(log.(Float64.(p[hits]))) / length(targets)
    p[hits] .-= 1
    dlogits = p ./ length(targets)
    g[3] .+= normed * dlogits'
    return loss, norm_backward(w[3] * dlogits, kept, w[1], g[1], g[2])
end
