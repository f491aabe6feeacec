# SPDX-License-Identifier: Apache-2.0
"""What tests share: a small model, and its training with gradients that are known."""

import array

import libfsdp as fsdp

COUNT = 32


def floats(*values):
    return array.array("f", values)


def ramp(factor=1.0):
    return floats(*(factor * i for i in range(COUNT)))


def small_model(context, **options):
    """A group of two parameters, loaded and published."""
    model = context.create_model(**options)
    group = model.create_group("layer", [fsdp.Param("w", (8, 4)), fsdp.Param("b", (4,))])
    model.seal()
    group.load_param("w", ramp())
    group.load_param("b", floats(1, 2, 3, 4))
    model.publish_weights()
    return model, group


def train(model, group, value=1.0, lr=0.5):
    """A step whose gradients are `value` everywhere. The first step of AdamW moves each weight by lr, up to epsilon."""
    with group.unsharded(fsdp.Phase.FORWARD):
        pass
    group.put_grad("w", floats(*[value] * COUNT))
    group.put_grad("b", floats(*[value] * 4))
    group.reduce_grad()
    model.finish_grads()
    model.step_adamw(lr)


def flat(array_or_view):
    """The numbers of an array, in C order."""
    return memoryview(array_or_view).cast("B").cast("f").tolist()
