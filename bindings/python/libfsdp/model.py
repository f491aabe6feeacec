# SPDX-License-Identifier: Apache-2.0
"""The ordered set of groups that train together."""

import contextlib
import ctypes
import json
import os

from . import _abi, tensor
from ._library import check, lib, make, read_text
from .capture import Capture
from .constants import DeviceKind, Dtype, ScheduleKind
from .group import Group, Param, number_of_piece
from .handle import Owner
from .matrices import Matrices
from .mesh import handle_of
from .shard import Shard, ShardChunks


class Model(Owner):
    """A model, made by Context.create_model. Declare groups, seal, load parameters, publish; then train.

    close() gives the handle back, and so does the end of a with block. The memory is unmapped with its last view.
    """

    def __init__(self, context, mesh=None, **options):
        options["mesh"] = handle_of(mesh)
        self.context, self.groups, self._device, self._states = context, {}, None, []
        self.has_fixed_addresses = True  # of gathered weights
        made = make(_abi.fsdp_model_options, options)
        self._handle = context.own(lib.destroy_model, lib.create_model, context.handle, made)

    def close(self):
        for group in self.groups.values():
            group.forget()
        super().close()

    # -- declaring ----------------------------------------------------------------------------------------------

    def create_group(self, name, params, mesh=None, **options):
        """Declare a group of Params. mesh: the ranks that share the group, by default the model's. Keywords are the
        other fields of fsdp_group_options."""
        options["mesh"] = handle_of(mesh)
        params = [param if isinstance(param, Param) else Param(*param) for param in params]
        array = (_abi.fsdp_param * len(params))(*[param.declared() for param in params])
        number = ctypes.c_void_p()
        status = lib.create_group(
            self.handle,
            name.encode(),
            array,
            len(params),
            ctypes.sizeof(_abi.fsdp_param),
            make(_abi.fsdp_group_options, options),
            number,
        )
        if not status:  # it is the model's, whatever a hook raised
            self.groups[name] = Group(self, name, params, number.value)
        self.context.check(status)
        return self.groups[name]

    def set_schedule(self, kind, visits=None, held_groups=0):
        """Set the order of visits. visits is a list of (group_index, phase) or (group_index, phase, piece), for
        ScheduleKind.VISITS. piece is 0, 1, ..., or None for the whole group. held_groups is for ScheduleKind.ANY."""
        options = _abi.fsdp_schedule_options(held_groups=held_groups)
        if visits is not None:
            options.visits = (_abi.fsdp_visit * len(visits))(*(_visit(*visit) for visit in visits))
            options.visit_count, options.visit_stride = len(visits), ctypes.sizeof(_abi.fsdp_visit)
        self.context.check(lib.set_schedule(self.handle, kind, options))
        self.has_fixed_addresses = kind != ScheduleKind.ANY

    def add_optimizer_state(self, name, dtype=Dtype.FLOAT32):
        self.context.check(lib.add_optimizer_state(self.handle, name.encode(), dtype))
        self._states.append(name)

    def set_arena(self, role, address, size_bytes, owner=None):
        """Hand in the caller's memory for a role. owner is kept alive as long as the model or a view of its memory."""
        status = lib.set_arena(self.handle, role, address, size_bytes)
        if not status:
            self._handle.kept.append(owner)
        self.context.check(status)

    def check(self):
        """All that seal() would refuse, as text, one violation a line; "" if there is none."""
        return read_text(lib.check_model, self.handle)

    def seal(self):
        """Fix the layout, allocate all memory, compare all ranks. Afterwards the update window is open."""
        self.context.check(lib.seal_model(self.handle))

    # -- what it is ---------------------------------------------------------------------------------------------

    def find_group(self, name):
        """Return the group of that name."""
        number = ctypes.c_void_p()
        check(lib.find_group(self.handle, name.encode(), number))
        return next(group for group in self.groups.values() if group.handle == number.value)

    def find_param(self, name):
        """Return (group, param_index) of the parameter of that name."""
        number, index = ctypes.c_void_p(), ctypes.c_uint64()
        check(lib.find_param(self.handle, name.encode(), number, index))
        return next(group for group in self.groups.values() if group.handle == number.value), index.value

    @property
    def info(self):
        """The fsdp_model_info."""
        found = _abi.fsdp_model_info()
        check(lib.get_model_info(self.handle, found))
        return found

    @property
    def stats(self):
        """This rank's counters: an fsdp_stats."""
        found = _abi.fsdp_stats()
        check(lib.get_stats(self.handle, found))
        return found

    @property
    def device(self):
        """(kind, index) of the device that has the sealed model's memory, as a view of the memory says."""
        if self.context.device == DeviceKind.HOST:
            return DeviceKind.HOST, 0
        if self._device is None:
            self._look_at_states()
        if self._device is None and self.context.device_index is not None:
            self._device = self.context.device, self.context.device_index
        if self._device is None:
            raise ValueError(
                "a model without optimizer states, on a GPU that is not known: name it by device_index, as the context "
                "is made, or take a group's weights first"
            )
        return self._device

    def saw(self, found):
        """Remember the device that an fsdp_tensor of this model names."""
        self._device = DeviceKind(found.device), found.device_index

    def _look_at_states(self):
        count, found = ctypes.c_uint64(), _abi.fsdp_tensor()
        check(lib.get_shard_count(self.handle, count))
        for index in range(count.value):
            for name in [*self._states, "exp_avg"]:  # a parameter need not have all of the model's states
                if not lib.get_shard_state(self.handle, index, name.encode(), found):
                    return self.saw(found)

    def describe(self):
        """Describe the layout, as the parsed JSON."""
        return json.loads(read_text(lib.describe_model, self.handle))

    def role_bytes(self, role=_abi.FSDP_ROLE_ALL, rank=None):
        """The planned bytes of a role on a rank, by default on this rank."""
        count = ctypes.c_uint64()
        check(lib.get_role_bytes(self.handle, role, self.context.rank if rank is None else rank, count))
        return count.value

    def allocated_bytes(self, role=_abi.FSDP_ROLE_ALL):
        count = ctypes.c_uint64()
        check(lib.get_allocated_bytes(self.handle, role, count))
        return count.value

    def shards(self):
        """This rank's shards, in declaration order."""
        count = ctypes.c_uint64()
        check(lib.get_shard_count(self.handle, count))
        return [Shard(self, index) for index in range(count.value)]

    def shard_chunks(self, stream=None):
        """This rank's shards at home in a file (Home.FILE), chunk by chunk, for an optimizer of your own:

            for chunk in model.shard_chunks():
                chunk.main_weight -= lr * chunk.main_grad

        Each chunk is in memory until the loop goes on. Publishing is refused until a loop has come to the end; after a
        break or an exception, a new loop goes on with the chunks that are left."""
        return ShardChunks(self, stream)

    # -- a step -------------------------------------------------------------------------------------------------

    def finish_grads(self, scale=1.0, stream=None, is_last=False):
        """End the step's gradients and open the update window.

        With is_last, on all ranks, this call ends the contributions of groups that were reduced without is_last. A
        group without any contribution gets zeros.
        """
        self.context.check(lib.finish_grads(self.handle, scale, _abi.FSDP_LAST if is_last else 0, stream))

    def get_grad_norm(self, mesh=None, stream=None):
        norm = ctypes.c_double()
        self.context.check(lib.get_grad_norm(self.handle, handle_of(mesh), stream, norm))
        return norm.value

    @property
    def last_norm(self):
        norm = ctypes.c_double()
        self.context.check(lib.get_last_norm(self.handle, norm))
        return norm.value

    def get_param_grad_norms(self, stream=None):
        """{name of the parameter: norm}"""
        return self._get_norms(lib.get_param_grad_norms, stream)

    def get_param_weight_norms(self, stream=None):
        """{name of the parameter: norm of its main weights}; NaN if it is frozen and has no numbers. At any time."""
        return self._get_norms(lib.get_param_weight_norms, stream)

    def _get_norms(self, get, stream):
        names = [param.name for group in self.groups.values() for param in group.params]
        norms = (ctypes.c_double * len(names))()
        self.context.check(get(self.handle, stream, norms, len(names)))
        return dict(zip(names, norms))

    def count_zero_grads(self, stream=None):
        """The number of zeros in the main gradients with which the step will change weights."""
        zeros = ctypes.c_uint64()
        self.context.check(lib.count_zero_grads(self.handle, stream, zeros))
        return zeros.value

    def scale_grads(self, factor, stream=None):
        self.context.check(lib.scale_grads(self.handle, factor, stream))

    def clip_grads(self, max_norm, mesh=None, stream=None):
        """Clip all main gradients to max_norm. Returns the norm before clipping."""
        norm = ctypes.c_double()
        self.context.check(lib.clip_grads(self.handle, handle_of(mesh), max_norm, stream, norm))
        return norm.value

    def check_grads(self, stream=None):
        """The name of the first parameter whose gradient has Inf or NaN on any rank, or None."""
        found, name = ctypes.c_int32(), ctypes.c_char_p()
        self.context.check(lib.check_grads(self.handle, stream, found, name))
        return name.value.decode() if found.value else None

    def matrices(self, source=None, target=None, dtype=None, stream=None):
        """Bring each matrix of the model whole to one rank, inside the update window:
        `for matrix in model.matrices(): matrix.array[:] = f(matrix.array)`.

        source and target are None for the main gradients, "main_weight", or the name of a state. Without a target the
        rows go back to the source. This call collects the matrices, and the end of the loop returns the rows. A loop
        that is left early, by an exception say, leaves the matrices collected: discard the step on every rank.
        """
        return Matrices(self, stream, source=source, target=target, dtype=dtype)

    def matrix_plan(self):
        """Describe the matrices' owners, costs, waves and bytes, as the parsed JSON."""
        return json.loads(read_text(lib.get_matrix_plan, self.handle))

    def step_adamw(self, lr, *, stream=None, **options):
        """Take one step of AdamW and publish. Keywords are the fields of fsdp_adamw_options."""
        self.context.check(lib.step_adamw(self.handle, lr, make(_abi.fsdp_adamw_options, options), stream))

    def apply_grads(self, grads, lr, *, max_norm=0.0, stream=None, **options):
        """Take a whole step. grads has a full gradient (or None) for each parameter that was not declared frozen, group
        by group. Returns the norm of the gradients before clipping."""
        array, kept = (_abi.fsdp_grad * len(grads))(), []
        for at, grad in zip(array, grads):
            if grad is not None:
                at.data, at.dtype, at.element_count, owner = tensor.read_grad(grad, self.context.device)
                kept.append(owner)
        norm = ctypes.c_double()
        self.context.check(
            lib.apply_grads(
                self.handle,
                array,
                len(grads),
                ctypes.sizeof(_abi.fsdp_grad),
                lr,
                max_norm,
                make(_abi.fsdp_adamw_options, options),
                stream,
                norm,
            )
        )
        return norm.value

    def publish_weights(self, stream=None):
        self.context.check(lib.publish_weights(self.handle, stream))

    def begin_update(self, stream=None):
        self.context.check(lib.begin_update(self.handle, stream))

    @contextlib.contextmanager
    def update(self, stream=None):
        """A with block inside the update window. At its end the weights are published."""
        self.begin_update(stream)
        yield self
        self.publish_weights(stream)

    def discard_step(self, stream=None):
        """Discard this step, in any state between two publishes."""
        self.context.check(lib.discard_step(self.handle, stream))

    def check_replicas(self, stream=None):
        self.context.check(lib.check_replicas(self.handle, 0, stream))

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder, **options):
        """Save a checkpoint in the folder. Keywords are the fields of fsdp_save_options."""
        self.context.check(lib.save(self.handle, os.fsencode(folder), make(_abi.fsdp_save_options, options)))

    def load(self, folder, **options):
        """Load the folder's newest checkpoint; then publish. Keywords are the fields of fsdp_load_options. Returns the
        fsdp_loaded."""
        loaded = _abi.fsdp_loaded()
        self.context.check(lib.load(self.handle, os.fsencode(folder), make(_abi.fsdp_load_options, options), loaded))
        return loaded

    def load_weights(self, path, renames=(), **options):
        """Load weights from safetensors files. renames are dicts of the fields of fsdp_rename."""
        array = (_abi.fsdp_rename * max(len(renames), 1))(*[make(_abi.fsdp_rename, dict(rename)) for rename in renames])
        loaded = _abi.fsdp_loaded()
        self.context.check(
            lib.load_weights(
                self.handle,
                os.fsencode(path),
                array if renames else None,
                len(renames),
                ctypes.sizeof(_abi.fsdp_rename),
                make(_abi.fsdp_load_options, options),
                loaded,
            )
        )
        return loaded

    def describe_load(self):
        """Describe the last load, as the parsed JSON: the names of the tensors loaded, missing and unexpected."""
        return json.loads(read_text(lib.describe_load, self.handle))

    # -- CUDA graphs --------------------------------------------------------------------------------------------

    def begin_capture(self, stream):
        self.context.check(lib.begin_capture(self.handle, stream))

    def end_capture(self, stream):
        return Capture(self, self.context.own(lib.destroy_capture, lib.end_capture, self.handle, stream))


def _visit(group_index, phase, piece=None):
    return _abi.fsdp_visit(group_index, phase, 0 if piece is None else number_of_piece(piece) + 1)
