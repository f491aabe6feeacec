# SPDX-License-Identifier: Apache-2.0
"""Shards a torch module with libfsdp, which then owns its weights, gradients and optimizer state.

    sharded = libfsdp.torch.shard(module, context)
    for inputs, targets in data:
        loss = criterion(module(inputs), targets)
        loss.backward()
        sharded.step(lr=1e-3, max_norm=1.0)

Hooks unshard and reshard each layer; a backward pass unshards the weights that it needs. libfsdp takes each gradient
from autograd as soon as it is complete. Gradients of several backward passes before a step add up. The sharded module
must run in eager mode: after shard() compile layers or parts of them, not the module as one graph.
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
    row_dimensions=lambda name, param: 1,
    **options,
):
    """Shards a module over the ranks of the context, and hooks it; returns a Sharded.

    layers: the submodules that become one group each; default: the elements of each outermost ModuleList and
    Sequential. All other parameters, and those that several layers share, form the root group.
    no_decay(name, param): True for parameters without weight decay.
    missing_grad: what a step does to a parameter for which no rank has a gradient. Default: it leaves the parameter
    unchanged, as torch's optimizers do.
    held_groups: how many groups can be unsharded at once where weights are copied (fsdp_schedule_options).
    row_dimensions(name, param): in how many leading dimensions ranks may divide it. With 2 they also divide the matrices
    of a stack of experts; all ranks must answer the same.
    options: the fields of fsdp_model_options, as main_storage=MainStorage.SPLIT16 or optimizer=Optimizer.ADAMW_8BIT.

    Each rank shards the values of its own module: they must be equal on all ranks.
    """
    layers = list(find_layers(module)) if layers is None else list(layers)
    check_module(module, context, layers)
    return Sharded(module, context, layers, no_decay, missing_grad, held_groups, row_dimensions, options)
