# SPDX-License-Identifier: Apache-2.0
"""A module of torch whose weights, gradients and optimizer state libfsdp shards and owns.

    sharded = libfsdp.torch.shard(module, context)
    for inputs, targets in data:
        loss = criterion(module(inputs), targets)
        loss.backward()
        sharded.step(lr=1e-3, max_norm=1.0)

Hooks of the module's layers unshard and reshard them; what a backward pass needs decides which weights it holds. Each
gradient is handed over when autograd has it, and several backward passes before a step add up. Eager only: torch.compile
of a part that is no layer works, of the sharded module it does not.
"""

from ..constants import MissingGrad
from .division import check_module, find_layers
from .parameter import HandedGrad, HiddenParameter
from .sharded import Sharded

__all__ = ["HandedGrad", "HiddenParameter", "Sharded", "shard"]


def shard(
    module,
    context,
    layers=None,
    no_decay=lambda name, param: param.dim() < 2,
    missing_grad=MissingGrad.SKIP,
    held_groups=0,
    **options,
):
    """Shards a module over the ranks of the context, and hooks it; returns a Sharded.

    layers: the submodules that are a group each; default: the elements of each outermost ModuleList and Sequential. What
    they do not have, and what several of them share, is the root group. no_decay says which parameters have no weight
    decay. missing_grad: what a step does to a parameter that no rank has a gradient for; as torch's optimizers do, it
    stays as it is. held_groups: buffers for the weights of groups that are unsharded at once where weights are copied
    (fsdp_schedule_options). Further keywords are the fields of fsdp_model_options. The module's values are those of this
    rank: let them be equal on all.
    """
    layers = list(find_layers(module)) if layers is None else list(layers)
    check_module(module, context, layers)
    return Sharded(module, context, layers, no_decay, missing_grad, held_groups, options)
