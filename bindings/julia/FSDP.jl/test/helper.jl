# SPDX-License-Identifier: Apache-2.0
# A small model, and its training with gradients that are known.

ramp() = reshape(Float32.(0:31), 4, 8)

function small_model(context; options...)
    model = create_model(context; options...)
    group = create_group(model, "layer", [Param("w", 4, 8), Param("b", 4)])
    seal(model)
    load_param(group, "w", ramp())
    load_param(group, "b", Float32[1, 2, 3, 4])
    publish_weights(model)
    return model, group
end

# The first step of AdamW moves each weight by lr, up to epsilon.
function train(model, group; value = 1f0, lr = 0.5)
    unshard(weights -> nothing, group)
    put_grad(group, "w", fill(value, 4, 8))
    put_grad(group, "b", fill(value, 4))
    reduce_grad(group)
    finish_grads(model)
    step_adamw(model, lr)
end

"The error that f throws."
function thrown(f)
    try
        f()
    catch error
        return error
    end
    return nothing
end
mappings() = countlines("/proc/self/maps")
