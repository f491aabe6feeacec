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

from ..constants import MissingGrad, Optimizer
from .averages import Average, read_averages
from .casts import Casts, in_library_dtypes
from .division import check_module, find_groups, find_ignored, find_layers, read_layers
from .hugging_face import MIXTRAL, HuggingFaceFolder, save_hugging_face
from .initial import find_initial, restoring
from .layer import Rules
from .muon import Muon
from .optimizer import choose_optimizer
from .parameter import HandedGrad, HiddenParameter
from .sharded import Sharded
from .words import in_torch_words

__all__ = [
    "Average",
    "HandedGrad",
    "HiddenParameter",
    "HuggingFaceFolder",
    "MIXTRAL",
    "Muon",
    "Sharded",
    "save_hugging_face",
    "shard",
]


@in_torch_words
def shard(
    module,
    context,
    layers=None,
    no_decay=None,
    missing_grad=MissingGrad.SKIP,
    held_groups=0,
    row_dimensions=lambda name, param: 1,
    boxes=lambda name, param: None,
    group_options=lambda name, layer: {},
    param_options=lambda name, param: {},
    ignored_params=(),
    init=None,
    param_dtype=None,
    cast_forward_inputs=True,
    output_dtype=None,
    optimizer=Optimizer.ADAMW,
    optimizer_options=None,
    optimizer_groups=None,
    averages=None,
    **options,
):
    """Shards a module over the ranks of the context, and hooks it; returns a Sharded.

    layers: the submodules that become one group each, as modules or by their names; a list of modules is one group, as
    in [[embed, head], *blocks]. Default: the elements of each outermost ModuleList and Sequential. All other
    parameters, and those that several groups share, form the root group. The logger "libfsdp" tells the groups at INFO, on rank 0.
    ignored_params: parameters that stay as they are, or a function (name, param) that is True for those. Each rank has
    them whole, in no group; their gradients and steps are the program's, and sharded.save leaves them out.
    no_decay(name, param): True for parameters without weight decay, with AdamW of the library. Default: those of fewer
    than two dimensions; none with optimizer=torch.optim.AdamW.
    missing_grad: what a step does to a parameter for which no rank has a gradient. Default: it leaves the parameter
    unchanged, as torch's optimizers do.
    held_groups: how many groups can be unsharded at once where weights are copied (fsdp_schedule_options).
    row_dimensions(name, param): in how many leading dimensions ranks may divide it. With 2 they also divide the matrices
    of a stack of experts; all ranks must answer the same.
    boxes(name, param): None, or (global_shape, global_offset) if the parameter is a box of a larger tensor: this rank's
    experts are a box of the stack of all experts.
    group_options(name, layer): fields of fsdp_group_options for the group of this layer, for example {"mesh": mesh}.
    With {"flags": GroupFlag.RESIDENT} it stays gathered from its forward to the end of the backward pass.
    For the root group, layer is the whole module; for a group of several modules, their list.
    param_options(name, param): fields of fsdp_param, as {"dtype": torch.float32} or {"lr_scale": 0.1}.
    init: the values of a module that was made on the meta device, where it is not its reset_parameters(): a function
    that fills the own parameters and buffers of one module (it is called for each); {name: values} as in a state dict;
    or the folder of a checkpoint of Sharded.save, for its weights and buffers. See docs/guides/torch.md.
    param_dtype: the dtype of the compute weights, by default that of each parameter. Main weights are made of the
    module's values without rounding them to it.
    cast_forward_inputs: cast the floating inputs of a layer, and of the module, to the dtype of its weights. Only where
    param_dtype or param_options has changed that dtype, and all weights of the group have one dtype.
    output_dtype: the dtype to which the module's floating outputs are cast.
    optimizer: Optimizer.ADAMW or ADAMW_8BIT of the library; or a class of torch.optim, which must update each element
    by itself, or a function of a list of parameters that returns such an optimizer. sharded.optimizer is then an
    optimizer of torch over this rank's shards, for torch's schedulers and GradScaler. torch.optim.AdamW stands for the
    library's AdamW, unless amsgrad or maximize is True. A libfsdp.torch.Muon(lr=...) is Muon for matrices and AdamW of
    the library for other parameters.
    optimizer_options: the optimizer's arguments, as {"lr": 0.1, "momentum": 0.9}. With AdamW or ADAMW_8BIT of the
    library they are those of torch.optim.AdamW.
    optimizer_groups(name, param): the options of the param_group that has the parameter, where they differ from
    optimizer_options, as {"weight_decay": 0.0}; equal options make one group.
    averages: {name: function} of moving averages of the weights, as {"ema":
    torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)}; the function changes a list of averages in place. Call
    sharded.averages[name].update() after steps.
    options: the fields of fsdp_model_options, as main_storage=MainStorage.SPLIT16 or reduce_dtype=torch.float32.

    Each rank shards the values of its own module: they must be equal on all ranks that share the group.
    """
    groups = find_groups(module) if layers is None else read_layers(module, layers)
    ignored = find_ignored(module, ignored_params)
    initial = find_initial(module, context, init, ignored)
    with restoring(initial):
        check_module(module, context, groups, ignored)
        device = next(param for param in module.parameters() if param not in ignored).device
        if isinstance(optimizer, Muon):
            steps = _choose_muon(optimizer, optimizer_options, optimizer_groups, module, layers and groups)
        else:
            steps = choose_optimizer(optimizer, optimizer_options, optimizer_groups, device)
        options["optimizer"] = (steps and steps.model_optimizer) or optimizer
        no_decay = (steps.no_decay(no_decay) if steps else no_decay) or (lambda name, param: param.dim() < 2)
        casts = Casts(param_dtype, cast_forward_inputs, output_dtype)
        averages = read_averages(averages or {}, steps, options)
        rules = Rules(no_decay, missing_grad, row_dimensions, boxes, group_options, param_options, casts)
        options = in_library_dtypes(options)
        return Sharded(module, context, groups, ignored, initial, rules, steps, held_groups, averages, options)


def _choose_muon(muon, options, optimizer_groups, module, groups):
    if options is not None or optimizer_groups is not None:
        raise TypeError(
            "libfsdp.torch.shard: optimizer_options and optimizer_groups are not for Muon: give the options to "
            "libfsdp.torch.Muon(lr=..., adamw={...}, matrices=...)"
        )
    layers = find_layers(module) if groups is None else [layer for group in groups for layer in group]
    return muon.steps(module, list(layers))
