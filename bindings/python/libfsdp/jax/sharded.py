# SPDX-License-Identifier: Apache-2.0
"""What libfsdp.jax.shard() returns: the parameters of a tree as groups of the library, and the calls of a step."""

import collections
import contextlib
import dataclasses

import jax
import numpy

from ..constants import DeviceKind, Optimizer, ParamFlag, Phase, ScheduleKind
from ..errors import InvalidArgument
from ..group import Param
from ..tensor import read_numpy
from .groups import find_groups, rule_of
from .kept import Kept
from .optimizer import OptaxOptimizer
from .tree import Tree
from .words import in_jax_words

_KEPT, _OPTIMIZER = "jax.kept", "jax.optimizer"


@dataclasses.dataclass
class Rules:
    """What shard() was given: predicates or regular expressions."""

    no_decay: object
    layers: object
    frozen: object


class Sharded:
    """A sharded tree, whose model is a libfsdp.Model. All ranks must make the same calls in the same order."""

    def __init__(self, params, context, rules, optimizer, held_groups, options):
        if context.device != DeviceKind.HOST:
            raise NotImplementedError(
                "libfsdp.jax.shard: the context is on a GPU, and libfsdp.jax works on host memory: make the context "
                "with device=libfsdp.DeviceKind.HOST"
            )
        self.context, self.tree, self.skipped_param = context, Tree(params), None
        self.kept, self._contributions, self._untrained = Kept(self.tree), collections.Counter(), set()
        self._frozen = set() if rules.frozen is None else self._choose(rules.frozen, "frozen")
        self.optimizer = None
        if not isinstance(optimizer, int):
            self.optimizer = OptaxOptimizer(optimizer, self.tree, self._frozen)
            self.optimizer.check_storage(options)
        self.model = context.create_model(optimizer=Optimizer.CALLER if self.optimizer else optimizer, **options)
        self._create_groups(find_groups(self.tree, rules.layers), self._choose(rules.no_decay, "no_decay"))
        if held_groups:
            self.model.set_schedule(ScheduleKind.ANY, held_groups=held_groups)
        if self.optimizer:
            self.optimizer.declare(self.model)
        self.model.seal()
        for name in self.tree.params:
            self._places[name].load_param(name, numpy.asarray(self.tree.leaves[name]))
        if self.optimizer:
            self.optimizer.attach(context, self.model)
        self.model.publish_weights()
        self._shapes = {name: self.tree.leaves[name].shape for name in self.tree.params}
        self.tree.leaves = None  # the library has the parameters now

    def _choose(self, rule, option):
        """The names of the parameters. A function may choose none for no_decay: all have weight decay then."""
        choose = rule_of(rule, option)
        found = {name for name in self.tree.params if choose(name, self.tree.leaves[name])}
        if not found and (option == "frozen" or not callable(rule)):
            raise ValueError(
                f"libfsdp.jax.shard: {option}={rule!r} chooses none of the {len(self.tree.params)} parameters, the "
                f"first of which is {self.tree.params[0]!r}: correct it, or leave {option}= out"
            )
        return found

    def _create_groups(self, groups, no_decay):
        self._places = {}
        for group, names in groups.items():
            params = []
            for name in names:
                flags = ParamFlag.NO_DECAY if name in no_decay else 0
                flags |= ParamFlag.FROZEN if name in self._frozen else 0
                leaf = self.tree.leaves[name]
                params.append(Param(name, leaf.shape, _dtype_of(leaf), flags=flags))
            made = self.model.create_group(group, params)
            self._places.update(dict.fromkeys(names, made))

    # -- weights ------------------------------------------------------------------------------------------------

    @in_jax_words
    def params(self, phase=Phase.EVAL, unsafe_zero_copy=False):
        """The tree, or the nnx module, with the full compute weights as JAX arrays. The arrays are copies, because JAX
        takes arrays for immutable and computes later.

        With unsafe_zero_copy the arrays are the library's own memory where this is possible. Before the next step, wait
        with jax.block_until_ready for everything computed from the arrays, and drop the arrays, because their contents
        change. The model must keep compute weights whole (any strategy but OPTIM_GRADS_PARAMS) or map them.
        """
        leaves = dict(self.kept.leaves)
        for group in self.model.groups.values():
            leaves.update(_gather(group, phase, unsafe_zero_copy))
        return self.tree.build(leaves)

    @property
    def layers(self):
        """The names of the groups, in the order of the tree."""
        return list(self.model.groups)

    @in_jax_words
    def layer_params(self, layer, phase=Phase.FORWARD, unsafe_zero_copy=False):
        """The full compute weights of one group. If the group is named by the path of a subtree, as "blocks/0", this is
        the subtree; else it is the whole tree, in which leaves of other groups are None. Arrays are as in params()."""
        group = self._layer(layer, "sharded.layer_params()")
        leaves = {**self.kept.leaves, **_gather(group, phase, unsafe_zero_copy)}
        return self.tree.build_layer(layer, [param.name for param in group.params], leaves)

    def _layer(self, layer, call):
        if layer not in self.model.groups:
            raise KeyError(f"{call}: there is no layer {layer!r}: the layers are {', '.join(self.model.groups)}")
        return self.model.groups[layer]

    @in_jax_words
    def full_params(self):
        """The tree with the whole main weights in fp32, as numpy arrays, and the leaves that are kept."""
        full = {name: group.read_param(name) for name, group in self._places.items()}
        return self.tree.build({**self.kept.leaves, **full})

    @in_jax_words
    def keep(self, tree):
        """Takes other values of the leaves that are kept, such as batch statistics, from a tree with all leaves or with
        some, or from an nnx module. Parameters in it are left out. Leaves of floating-point numbers become their means
        over the ranks, so every rank must make the call; other leaves stay as this rank gives them."""
        self.kept.take(self.tree.read(tree, "sharded.keep()"), "sharded.keep()", self.context)

    # -- what is trained ----------------------------------------------------------------------------------------

    def freeze(self, params):
        """Stops training the parameters that a predicate(name) or a regular expression chooses. Their weights and
        states stay as they are, also by weight decay. Call it between steps."""
        self._set_trained(params, False)

    def unfreeze(self, params):
        """Trains parameters again that freeze() has stopped."""
        self._set_trained(params, True)

    @in_jax_words
    def _set_trained(self, params, is_trained):
        call = "sharded.unfreeze()" if is_trained else "sharded.freeze()"
        rule = rule_of((lambda name, leaf: params(name)) if callable(params) else params, "the choice of parameters")
        names = [name for name in self._places if rule(name, None)]
        if not names:
            raise ValueError(f"{call}: {params!r} chooses none of the {len(self._places)} parameters")
        if is_trained and (never := next((name for name in names if name in self._frozen), None)):
            raise ValueError(
                f"{call}: {never!r} is frozen by shard(frozen=), and so has no gradient and no optimizer state: leave "
                "it out there, and call sharded.freeze() after shard()"
            )
        for name in names:
            if name not in self._frozen:
                self._places[name].set_param_trainable(name, is_trained)
                (self._untrained.discard if is_trained else self._untrained.add)(name)

    # -- step ---------------------------------------------------------------------------------------------------

    @in_jax_words
    def apply_grads(self, grads, lr=None, max_norm=0.0, **options):
        """Take a step of the optimizer with this rank's full gradients. The call waits until the gradients are
        computed, and returns their norm before clipping. lr and keywords, which are the fields of fsdp_adamw_options,
        are for AdamW of the library.

        grads has a gradient for each parameter that is trained, and may have others, which are left out.
        """
        if self._contributions:
            raise RuntimeError(
                "sharded.apply_grads(): gradients are accumulated: give these by sharded.accumulate(grads) too, then "
                "call sharded.apply(lr); or forget them by sharded.discard()"
            )
        self._check_rates("sharded.apply_grads()", lr, options)
        self._check_trained("sharded.apply_grads()")
        self.skipped_param = None
        found = self._read_grads(grads, "sharded.apply_grads()")
        if self.optimizer:
            self._put(found)
            return self._apply(None, max_norm, 1.0, False, {})
        names = [name for name in self._declared() if name not in self._frozen]
        return self.model.apply_grads([found.get(name) for name in names], lr, max_norm=max_norm, **options)

    @in_jax_words
    def accumulate(self, grads):
        """Add this rank's full gradients of a micro-batch to the sums of the step. Each rank must make as many calls.
        The sums are not divided by the number of micro-batches: divide the loss, or give apply() a scale."""
        self._put(self._read_grads(grads, "sharded.accumulate()"))

    @in_jax_words
    def accumulate_layer(self, layer, grads):
        """Add this rank's full gradients of one group, a tree as of layer_params(). All ranks must give the same layers
        in the same order, and every layer that is trained before apply()."""
        group, call = self._layer(layer, "sharded.accumulate_layer()"), f"sharded.accumulate_layer({layer!r})"
        self._put_layer(group, self._read_grads(grads, call, group))

    def _put(self, found):
        for group in reversed(self.model.groups.values()):
            self._put_layer(group, found)

    def _put_layer(self, group, found):
        trained = [param.name for param in group.params if param.name in found]
        for name in trained:
            group.put_grad(name, found[name])
        if trained:
            group.reduce_grad(is_last=False)
            self._contributions[group.name] += 1

    @in_jax_words
    def apply(self, lr=None, max_norm=0.0, scale=1.0, skip_nonfinite=False, **options):
        """Take a step of the optimizer with the accumulated gradients, multiplied by scale. Returns their norm before
        clipping. lr and keywords are as in apply_grads().

        With skip_nonfinite a step whose gradients have Inf or NaN is forgotten on every rank: weights, states and the
        number of steps stay. skipped_param is then the first parameter that has some, else None.
        """
        self._check_rates("sharded.apply()", lr, options)
        self._check_trained("sharded.apply()")
        self._check_contributions()
        return self._apply(lr, max_norm, scale, skip_nonfinite, options)

    def _apply(self, lr, max_norm, scale, skip_nonfinite, options):
        self.model.finish_grads(scale, is_last=True)
        self._contributions.clear()
        self.skipped_param = self.model.check_grads() if skip_nonfinite else None
        norm = self.model.clip_grads(max_norm) if max_norm else self.model.get_grad_norm()
        if self.skipped_param is not None:
            self.model.discard_step()
        elif self.optimizer:
            self.optimizer.step(self._untrained)
            self.model.publish_weights()
        else:
            self.model.step_adamw(lr, **options)
        return norm

    def _check_trained(self, call):
        if not self._trained():
            raise RuntimeError(
                f"{call}: all {len(self._places)} parameters are frozen, and nothing can be trained: call "
                "sharded.unfreeze() first"
            )

    def _check_contributions(self):
        if not self._contributions:
            raise RuntimeError("sharded.apply(): no gradients are accumulated: call sharded.accumulate(grads) first")
        counts = {self._places[name].name: self._contributions[self._places[name].name] for name in self._trained()}
        few, many = min(counts, key=counts.get), max(counts, key=counts.get)
        if counts[few] != counts[many]:
            raise RuntimeError(
                f"sharded.apply(): layer {few!r} has {counts[few]} gradients and layer {many!r} {counts[many]}: call "
                "sharded.accumulate_layer() as often for each layer, or sharded.discard()"
            )

    def _check_rates(self, call, lr, options):
        if self.optimizer and (given := "lr" if lr is not None else next(iter(options), None)):
            raise TypeError(
                f"{call}: {given} is for AdamW of the library, and the model is trained by an optimizer of optax: give "
                "it to that optimizer, as optax.sgd(learning_rate)"
            )
        if not self.optimizer and lr is None:
            raise TypeError(f"{call}: AdamW needs lr")

    # -- numbers of optax ---------------------------------------------------------------------------------------

    def numbers(self):
        """{name: number} of the state of optax that belongs to no parameter, such as "0/count", or
        "hyperparams/learning_rate" of optax.inject_hyperparams."""
        return self._need_optax("sharded.numbers()").numbers()

    def set_numbers(self, numbers):
        """Changes some of numbers(). Give the same values on every rank."""
        known = self.numbers()
        if unknown := next((name for name in numbers if name not in known), None):
            names = ", ".join(known) or "no number"
            raise KeyError(f"sharded.set_numbers(): the optimizer has {names}, not {unknown!r}")
        self.optimizer.set_numbers(numbers)

    def _need_optax(self, call):
        if not self.optimizer:
            raise RuntimeError(
                f"{call}: the model is trained by AdamW of the library: give shard() an optimizer of optax"
            )
        return self.optimizer

    @in_jax_words
    def discard(self):
        """Forget the gradients of this step, also after an error."""
        self._contributions.clear()
        self.model.discard_step()

    def _declared(self):
        return [param.name for group in self.model.groups.values() for param in group.params]

    def _trained(self, group=None):
        """Names of the parameters that are trained now, of one group or of all."""
        names = self._places if group is None else [param.name for param in group.params]
        return [name for name in names if name not in self._frozen and name not in self._untrained]

    def _read_grads(self, grads, call, group=None):
        """{name: numpy array} of the parameters that are trained now."""
        names = [] if group is None else [param.name for param in group.params]
        found = self.tree.read(grads, call, self.tree.place(group.name, names) if group else ())
        trained = self._trained(group)
        if missing := next((name for name in trained if name not in found), None):
            raise KeyError(
                f"{call}: there is no gradient of {missing!r}, which is trained: give zeros, or stop training it by "
                "sharded.freeze()"
            )
        for name in trained:
            if found[name].shape != self._shapes[name]:
                raise ValueError(
                    f"{call}: the gradient of {name!r} has the shape {found[name].shape}, and the parameter "
                    f"{self._shapes[name]}"
                )
        ready = jax.block_until_ready({name: found[name] for name in trained})
        return {name: numpy.asarray(leaf) for name, leaf in ready.items()}

    # -- checkpoints --------------------------------------------------------------------------------------------

    @in_jax_words
    def save(self, folder, **options):
        """Save a checkpoint with the optimizer's states and rank 0's leaves that are kept. Keywords are the fields of
        fsdp_save_options."""
        with self.context.begin_checkpoint(folder, **options) as checkpoint:
            checkpoint.add_model(self.model)
            checkpoint.add_bytes(_KEPT, self.kept.pack())
            if self.optimizer:
                checkpoint.add_bytes(_OPTIMIZER, self.optimizer.pack())
            checkpoint.commit()
            checkpoint.wait()

    @in_jax_words
    def load(self, folder, **options):
        """Load the folder's newest checkpoint, of any number of ranks. Keywords are the fields of fsdp_load_options.
        Returns the fsdp_loaded."""
        with self.context.open_checkpoint(folder) as checkpoint:
            kept, numbers = self._read(checkpoint, _KEPT, self.kept), {}
            if self.optimizer:
                numbers = self._read(checkpoint, _OPTIMIZER, self.optimizer)
            self.model.begin_update()
            try:
                loaded = checkpoint.load_model(self.model, **options)
            except BaseException:
                with contextlib.suppress(Exception):  # report the first error
                    self.model.publish_weights()
                raise
            self.model.publish_weights()
        self.kept.leaves.update(kept)
        if self.optimizer:
            self.optimizer.set_numbers(numbers)
        return loaded

    @staticmethod
    def _read(checkpoint, name, part):
        """A checkpoint of another program has none of these bytes, and the values stay as they are."""
        try:
            packed = checkpoint.read_bytes(name)
        except InvalidArgument:
            return {}
        return part.unpack(packed)

    def close(self):
        self.model.close()


def _gather(group, phase, unsafe_zero_copy):
    """{name: array of JAX} of the group's full compute weights."""
    with group.unsharded(phase):
        return {
            # jax.device_put takes memory of numpy over where it is aligned; a copy has no other owner.
            name: jax.device_put(view if unsafe_zero_copy else numpy.array(view))
            for name, view in group.weights(phase).items()
        }


def _dtype_of(leaf):
    return read_numpy(numpy.empty(0, leaf.dtype))[1]
