# SPDX-License-Identifier: Apache-2.0
"""Rewords the library's errors: they name C functions, and users of torch call the methods of Sharded instead."""

import contextlib
import functools
import re

from ..errors import Error

_PHRASES = {
    "; fsdp_check_model lists them": "",
    "the gradient buffers of FSDP_SCHEDULE_ANY": "the gradient buffers",
    "buffers of FSDP_SCHEDULE_ANY": "buffers",
    "raise held_groups in fsdp_schedule_options": "give shard() a larger held_groups",
    "FSDP_LOAD_ALLOW_MISSING leaves": "sharded.load(folder, flags=libfsdp.LoadFlag.ALLOW_MISSING) leaves",
    "FSDP_LOAD_ALLOW_UNEXPECTED passes": "sharded.load(folder, flags=libfsdp.LoadFlag.ALLOW_UNEXPECTED) passes",
    "FSDP_SAVE_REPLACE replaces it": "sharded.save(folder, flags=libfsdp.SaveFlag.REPLACE) replaces it",
}
_ENUMS = {"LOAD": "LoadFlag", "SAVE": "SaveFlag", "OPTIMIZER": "Optimizer", "QUANTIZE": "Quantization"}
_CALLS = {
    "fsdp_acquire_grad": "the backward pass",
    "fsdp_all_reduce_values": "sharded.step()",
    "fsdp_begin_update": "the beginning of a load",
    "fsdp_check_grads": "sharded.step(skip_nonfinite=True)",
    "fsdp_clip_grads": "sharded.step(max_norm=)",
    "fsdp_complete_grad": "the backward pass",
    "fsdp_collect_matrices": "sharded.step()",
    "fsdp_create_group": "libfsdp.torch.shard",
    "fsdp_discard_step": "sharded.discard()",
    "fsdp_finish_grads": "sharded.finish()",
    "fsdp_get_grad_norm": "sharded.step(max_norm=)",
    "fsdp_load_model": "sharded.load()",
    "fsdp_load_param": "load_state_dict()",
    "fsdp_next_matrix": "sharded.step()",
    "fsdp_prefetch": "the forward pass",
    "fsdp_publish_weights": "sharded.step()",
    "fsdp_put_grad": "the backward pass",
    "fsdp_read_grad": "sharded.read_grad()",
    "fsdp_read_param": "sharded.full_state_dict()",
    "fsdp_reduce_grad": "the backward pass",
    "fsdp_reshard": "the end of `with sharded.unsharded():`",
    "fsdp_restore_view": "sharded.drop_writes()",
    "fsdp_return_matrices": "sharded.step()",
    "fsdp_save": "sharded.save()",
    "fsdp_scale_grads": "sharded.clip_grad_norm_()",
    "fsdp_seal_model": "libfsdp.torch.shard",
    "fsdp_set_param_trainable": "requires_grad",
    "fsdp_step_adamw": "sharded.step()",
    "fsdp_unshard": "the forward pass",
}


# On GPUs gathers are collective, so ranks that visit different layers fail.
_GATHERS_DIFFER = re.compile(r"called all_gather of .*, rank \d+ called |gathered group .*, rank \d+ gathered group ")
_ONE_LAYER = (
    "; ranks must visit the same layers in the same order: where ranks use different parts of a block, such as its "
    "experts, give shard() the block as one layer (layers=)"
)

# Ranks run different numbers of backward passes: say one has no batch left.
_PASSES_DIFFER = re.compile(
    r"(?s)in fsdp_all_reduce_values .*reduce_scatter|reduce_scatter.*in fsdp_all_reduce_values "
)
_SAME_PASSES = (
    "; every rank must run as many backward passes in a step as the others: a rank without data runs one with its loss "
    "times zero"
)


_CONSTANT = re.compile(rf"\bFSDP_({'|'.join(_ENUMS)})_([A-Z0-9_]+)")


def translate(message):
    if _PASSES_DIFFER.search(message):
        message += _SAME_PASSES
    if _GATHERS_DIFFER.search(message) and not message.endswith(_ONE_LAYER):
        message += _ONE_LAYER
    for phrase, ours in _PHRASES.items():
        message = message.replace(phrase, ours)
    message = _CONSTANT.sub(lambda found: f"libfsdp.{_ENUMS[found[1]]}.{found[2]}", message)
    return re.sub(r"\bfsdp_[a-z_]+", lambda found: _CALLS.get(found[0], found[0]), message)


@contextlib.contextmanager
def advice(text, applies=True):
    """Adds what to do to an error that buffers are too few."""
    try:
        yield
    except Error as error:
        if applies and "held_groups" in error.message:
            error.message += "; " + text
        raise


def in_torch_words(function):
    """Wraps a method so that its errors name the calls of this package."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Error as error:
            error.message = translate(error.message)
            error.args = (error.message,)
            raise

    return call
