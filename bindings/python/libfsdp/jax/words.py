# SPDX-License-Identifier: Apache-2.0
"""Rewords the library's errors: they name C functions, and users of JAX call the methods of Sharded instead."""

import functools
import re

from ..errors import Error

_CALLS = {
    "fsdp_apply_grads": "sharded.apply_grads()",
    "fsdp_begin_update": "sharded.load()",
    "fsdp_check_grads": "sharded.apply(skip_nonfinite=True)",
    "fsdp_clip_grads": "sharded.apply(max_norm=)",
    "fsdp_create_group": "libfsdp.jax.shard",
    "fsdp_discard_step": "sharded.discard()",
    "fsdp_finish_grads": "sharded.apply()",
    "fsdp_get_grad_norm": "sharded.apply()",
    "fsdp_load_checkpoint_model": "sharded.load()",
    "fsdp_load_model": "sharded.load()",
    "fsdp_load_param": "libfsdp.jax.shard",
    "fsdp_publish_weights": "sharded.apply()",
    "fsdp_put_grad": "sharded.accumulate()",
    "fsdp_read_param": "sharded.full_params()",
    "fsdp_reduce_grad": "sharded.accumulate()",
    "fsdp_reshard": "sharded.params()",
    "fsdp_save": "sharded.save()",
    "fsdp_seal_model": "libfsdp.jax.shard",
    "fsdp_set_param_trainable": "sharded.freeze() or sharded.unfreeze()",
    "fsdp_step_adamw": "sharded.apply()",
    "fsdp_unshard": "sharded.params()",
}
_PHRASES = {
    "; fsdp_check_model lists them": "",
    "FSDP_SAVE_REPLACE replaces it": "sharded.save(folder, flags=libfsdp.SaveFlag.REPLACE) replaces it",
}


# Methods that make calls of the library which others make, too.
_FIRST = {"apply_grads": "sharded.apply_grads()", "keep": "sharded.keep()", "shard": "libfsdp.jax.shard"}


def translate(message, method):
    if method in _FIRST:
        message = re.sub(r"\bfsdp_[a-z_]+(?=:)", _FIRST[method], message, count=1)
    for phrase, ours in _PHRASES.items():
        message = message.replace(phrase, ours)
    return re.sub(r"\bfsdp_[a-z_]+", lambda found: _CALLS.get(found[0], found[0]), message)


def in_jax_words(function):
    """Wraps a method so that its errors name the calls of this package."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Error as error:
            error.message = translate(error.message, function.__name__)
            error.args = (error.message,)
            raise

    return call
