# SPDX-License-Identifier: Apache-2.0
"""A parameter group: parameters that are gathered and reduced together."""

import ctypes

from . import _abi
from ._library import check, lib, make
from .constants import EVERY_RANK, DeviceKind, Dtype, Phase, Plane
from .tensor import Tensor, empty, read_grad, read_value

_FORWARD = int(Phase.FORWARD)
_NONE = (None, Dtype.FLOAT32, 0, None)  # (address, dtype, element count, what keeps it alive) of no array


class Param:
    """A parameter to declare: name, shape, dtype of the compute weights. Keywords are further fields of fsdp_param.

    With matrix=True the last two dimensions are a matrix, which Model.matrices() brings whole to one rank. splits=[...]
    has the rows of each matrix into which these dimensions are cut, for example those of q, k and v.
    """

    def __init__(
        self,
        name,
        shape,
        dtype=Dtype.FLOAT32,
        *,
        global_shape=None,
        global_offset=None,
        matrix=None,
        splits=None,
        **fields,
    ):
        self.name, self.shape, self.dtype = name, tuple(shape), Dtype(dtype)
        self.global_shape, self.global_offset, self.fields = global_shape, global_offset, fields
        self.matrix, self.splits = splits is not None if matrix is None else matrix, splits

    @property
    def is_trainable(self):
        return not self.fields.get("flags", 0) & _abi.FSDP_PARAM_FROZEN

    @property
    def piece(self):
        """The number of its piece of the group."""
        return self.fields.get("piece") or 0

    def declared(self):
        """The fsdp_param that declares it."""
        sizes = {
            name: (ctypes.c_uint64 * len(values))(*values)
            for name, values in (
                ("shape", self.shape),
                ("global_shape", self.global_shape),
                ("global_offset", self.global_offset),
                ("matrix_splits", self.splits),
            )
            if values is not None
        }
        return make(
            _abi.fsdp_param,
            dict(
                self.fields,
                name=self.name,
                dtype=self.dtype,
                dimension_count=len(self.shape),
                matrix=int(self.matrix),
                matrix_split_count=len(self.splits or ()),
                **sizes,
            ),
        )


class PieceWeights(dict):
    """{name: array} of one piece. The parameters of other pieces are refused by their names."""

    def __init__(self, group, piece, arrays):
        super().__init__(arrays)
        self.group, self.piece = group, piece

    def __missing__(self, name):
        own = self.group.params[self.group.index(name)].piece
        if own == self.piece:
            raise KeyError(f"parameter {name!r} is quantized: see plane()")
        raise KeyError(
            f"parameter {name!r} is in piece {own} of group {self.group.name!r}, and these weights are of piece "
            f"{self.piece}: take unsharded(piece={own})"
        )


class _Unsharded:
    """The context manager of `with group.unsharded() as weights`. It keeps no state of a visit, so one object serves
    all visits."""

    __slots__ = ("group", "phase", "piece", "weights", "hold", "unshard", "reshard")

    def __init__(self, group, phase, stream, piece):
        self.group, self.phase, self.piece, self.weights = group, int(phase), piece, None
        self.unshard, self.reshard, self.hold = group.hold(phase, stream, piece)

    def __enter__(self):
        if status := self.unshard(*self.hold):
            self.group.check(status)
        weights = self.weights
        if weights is None:
            weights = self.group.weights(self.phase, self.piece)
            if self.group.model.has_fixed_addresses:
                self.weights = weights
        return weights

    def __exit__(self, kind, error, trace):
        status = self.reshard(*self.hold)
        if status and kind is None:  # else the block's own exception is told
            self.group.check(status)


class Group:
    """A group, made by Model.create_group. Calls take a parameter by its name or by its index in the group."""

    def __init__(self, model, name, params, number):
        self.model, self.name, self.params, self.handle = model, name, params, number
        self._context = model.context
        self._indices = {param.name: index for index, param in enumerate(params)}
        self._unsharded, self._weights = {}, {}

    def __repr__(self):
        return f"Group({self.name!r}, {[param.name for param in self.params]})"

    def check(self, status):
        self._context.check(status)

    def forget(self):
        """Called when the model is closed: from now on calls are refused. Arrays that a program keeps stay readable."""
        self.handle = None
        self._unsharded, self._weights = {}, {}

    def index(self, param):
        """The index of a parameter that is given by its name or by its index."""
        if isinstance(param, int):
            return param
        if param not in self._indices:
            raise KeyError(f"group {self.name!r} has {', '.join(self._indices) or 'no parameter'}, not {param!r}")
        return self._indices[param]

    def _shape(self, index):
        return self.params[index].shape if 0 <= index < len(self.params) else (1,)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def info(self):
        """The fsdp_group_info."""
        found = _abi.fsdp_group_info()
        check(lib.get_group_info(self.handle, found))
        return found

    def param_info(self, param):
        """The fsdp_param as declared, with the current lr_scale."""
        found = _abi.fsdp_param()
        check(lib.get_param_info(self.handle, self.index(param), found))
        return found

    def chunk(self, param, rank=None):
        """The fsdp_chunk of a rank, by default of this rank."""
        found = _abi.fsdp_chunk()
        check(lib.get_chunk(self.handle, self.index(param), self._context.rank if rank is None else rank, found))
        return found

    def _value(self, data):
        return _NONE if data is None else read_value(data, self._context.device)

    # -- loading and reading ------------------------------------------------------------------------------------

    def load_param(self, param, data, root=EVERY_RANK):
        """Load a whole parameter from any array, inside the update window. data may be None on ranks other than the
        root."""
        address, dtype, count, kept = self._value(data)
        self.check(lib.load_param(self.handle, self.index(param), address, dtype, count, root, 0))

    def read_param(self, param, dtype=Dtype.FLOAT32, root=EVERY_RANK):
        """Return the whole main weight as a new array; None on ranks other than the root."""
        index = self.index(param)
        return self._read(root, dtype, index, lambda *to: lib.read_param(self.handle, index, *to))

    def load_plane(self, param, plane, data, root=EVERY_RANK):
        """Load a whole plane of a frozen quantized parameter as it is. data is an array of bytes for codes and E8M0
        scales, of float32 for other scales. It may be None on ranks other than the root."""
        address, dtype, count, kept = self._value(data)
        if dtype == Dtype.UINT8:
            codes = plane in (Plane.ROW, Plane.COLUMN)
            dtype = Dtype.FLOAT8_E4M3 if codes else Dtype.E8M0
        self.check(lib.load_plane(self.handle, self.index(param), plane, address, dtype, count, root, 0))

    def load_state(self, param, name, data, root=EVERY_RANK):
        address, dtype, count, kept = self._value(data)
        self.check(lib.load_state(self.handle, self.index(param), name.encode(), address, dtype, count, root, 0))

    def read_state(self, param, name, dtype=Dtype.FLOAT32, root=EVERY_RANK):
        index = self.index(param)
        return self._read(root, dtype, index, lambda *to: lib.read_state(self.handle, index, name.encode(), *to))

    def load_grad(self, param, data, root=EVERY_RANK):
        """Replace a whole main gradient by any array, in an update window with gradients. data may be None on ranks
        other than the root."""
        address, dtype, count, kept = self._value(data)
        self.check(lib.load_grad(self.handle, self.index(param), address, dtype, count, root, 0))

    def read_grad(self, param, dtype=Dtype.FLOAT32, root=EVERY_RANK):
        """Return the whole main gradient, as the optimizer will see it, as a new array; None on ranks other than the
        root."""
        index = self.index(param)
        return self._read(root, dtype, index, lambda *to: lib.read_grad(self.handle, index, *to))

    def _read(self, root, dtype, index, call):
        array, address = empty(self._shape(index), dtype)
        self.check(call(address, dtype, _count(self._shape(index)), root, 0))
        return array if root in (EVERY_RANK, self._context.rank) else None

    def load_chunk(self, param, data, row_offset, row_count):
        """Load rows that this rank owns (see chunk)."""
        address, dtype, _, kept = read_value(data, self._context.device)
        self.check(lib.load_chunk(self.handle, self.index(param), address, dtype, row_offset, row_count, 0))

    def set_param_lr_scale(self, param, lr_scale):
        self.check(lib.set_param_lr_scale(self.handle, self.index(param), lr_scale))

    def set_param_trainable(self, param, trainable):
        """Stop training a parameter, or train it again. Call this between steps, with the same values on every rank."""
        self.check(lib.set_param_trainable(self.handle, self.index(param), int(trainable)))

    # -- gathering ----------------------------------------------------------------------------------------------

    def prefetch(self, phase=Phase.FORWARD, stream=None):
        self.check(lib.prefetch(self.handle, phase, 0, stream))

    def hold(self, phase, stream, piece):
        """Return (the call that takes a hold, the one that returns it, the arguments of both)."""
        if piece is None:
            return lib.unshard, lib.reshard, (self.handle, int(phase), 0, stream)
        return lib.unshard_piece, lib.reshard_piece, (self.handle, number_of_piece(piece), int(phase), 0, stream)

    def unshard(self, phase=Phase.FORWARD, stream=None, *, piece=None):
        """Take a hold of the group, or of one of its pieces (0, 1, ...), which reshard() returns.
        `with group.unsharded() as weights` does both."""
        unshard, _, hold = self.hold(phase, stream, piece)
        self.check(unshard(*hold))

    def reshard(self, phase=Phase.FORWARD, stream=None, *, piece=None):
        """Return a hold that unshard() took with the same phase and piece."""
        _, reshard, hold = self.hold(phase, stream, piece)
        self.check(reshard(*hold))

    def restore_view(self):
        """Show the true weights again after a write through views of them."""
        self.check(lib.restore_view(self.handle))

    def unsharded(self, phase=_FORWARD, stream=None, *, piece=None):
        """`with group.unsharded() as weights:` holds the group; weights[name] are read-only arrays of the full compute
        weights. With piece (0, 1, ...) only this piece is gathered and held, and weights has its parameters.

        Read the arrays only inside the block. An array that is kept longer stays mapped, but has undefined contents.
        """
        key = phase if stream is None and piece is None else (phase, stream, piece)
        found = self._unsharded.get(key)
        if found is None:
            found = self._unsharded[key] = _Unsharded(self, phase, stream, piece)
        return found

    def tensors(self, phase=Phase.FORWARD, piece=None):
        """{name: Tensor} of the full compute weights, for DLPack: of the group, or of one piece. Legal while the group,
        or this piece, is unsharded. Quantized parameters are left out: see plane()."""
        views = self._views(phase) if piece is None else self._piece_views(phase, piece)
        if seen := next((view for _, view in views if view.device), None):  # quantized ones of a piece have none
            self.model.saw(seen)
        return {param.name: Tensor(view, self.model._handle) for param, view in views if view.data}

    def _views(self, phase):
        found = (_abi.fsdp_tensor * len(self.params))()
        self.check(lib.get_params(self.handle, phase, found, len(found), ctypes.sizeof(_abi.fsdp_tensor)))
        return list(zip(self.params, found))

    def _piece_views(self, phase, piece):
        views = []
        for index, param in enumerate(self.params):
            if param.piece == piece:
                views.append((param, _abi.fsdp_tensor()))
                if not param.fields.get("quantization"):
                    self.check(lib.get_param(self.handle, index, phase, views[-1][1]))
        if piece and not views:
            raise ValueError(f"group {self.name!r} has no piece {piece}")
        return views

    def plane(self, param, plane=Plane.ROW, phase=Phase.FORWARD):
        """The Tensor of a plane of a quantized parameter: with Plane.ROW its codes (bytes), with Plane.ROW_SCALE their
        scales. Legal while the group is unsharded."""
        found = _abi.fsdp_tensor()
        self.check(lib.get_plane(self.handle, self.index(param), phase, plane, found))
        return Tensor(found, self.model._handle)

    def swizzle_scales(self, param, plane=Plane.ROW_SCALE, phase=Phase.FORWARD, to=None, stream=None):
        """Return the scales of an MXFP8 plane as a bytearray, in the order in which GEMMs read them. With `to`, which
        is (address, bytes) of memory on the model's device, they are written there. On a GPU `to` must be given."""
        index, size, made = self.index(param), ctypes.c_uint64(), None
        self.check(lib.swizzle_scales(self.handle, index, phase, plane, None, size, stream))
        if to is None:
            if self._context.device != DeviceKind.HOST:
                raise ValueError(f"swizzle_scales: the scales are on a GPU: give it {size.value} bytes there")
            made = bytearray(size.value)
            to = ctypes.addressof((ctypes.c_char * len(made)).from_buffer(made)), len(made)
        address, size.value = to
        self.check(lib.swizzle_scales(self.handle, index, phase, plane, address, size, stream))
        return made

    def weights(self, phase=Phase.FORWARD, piece=None):
        """{name: array} of the full compute weights, of the group or of one piece. If their addresses are fixed (all
        schedules but ScheduleKind.ANY), the arrays are made once for each phase."""
        key = int(phase), piece
        found = self._weights.get(key)
        if found is None:
            found = {name: view.array() for name, view in self.tensors(phase, piece).items()}
            if piece is not None:
                found = PieceWeights(self, piece, found)
            if self.model.has_fixed_addresses:
                self._weights[key] = found
        return found

    # -- gradients ----------------------------------------------------------------------------------------------

    def acquire_grad(self, param, flags=0, stream=None, wait=True):
        """Return (the full gradient to write into, whether to add to it instead of overwriting it).

        With wait=False the call raises Busy and changes nothing if peers have yet to read a buffer that it needs. The
        same holds for acquire_grads and put_grad.
        """
        found, accumulate = _abi.fsdp_tensor(), ctypes.c_int32()
        flags = flags if wait else flags | _abi.FSDP_GRAD_NO_WAIT
        self.check(lib.acquire_grad(self.handle, self.index(param), flags, stream, found, accumulate))
        return Tensor(found, self.model._handle).array(), bool(accumulate.value)

    def acquire_grads(self, flags=_abi.FSDP_GRAD_ZEROED, stream=None, wait=True):
        """Return {name: full gradient} of all trained parameters, to add to. With flags=0 return
        {name: (gradient, accumulate)}."""
        flags = flags if wait else flags | _abi.FSDP_GRAD_NO_WAIT
        found, accumulate = (_abi.fsdp_tensor * len(self.params))(), (ctypes.c_int32 * len(self.params))()
        self.check(
            lib.acquire_grads(
                self.handle, flags, stream, found, len(found), ctypes.sizeof(_abi.fsdp_tensor), accumulate
            )
        )
        grads = {
            param.name: (Tensor(view, self.model._handle).array(), bool(adds))
            for param, view, adds in zip(self.params, found, accumulate)
            if view.data
        }
        return {name: grad for name, (grad, _) in grads.items()} if flags & _abi.FSDP_GRAD_ZEROED else grads

    def put_grad(self, param, grad, stream=None, wait=True):
        """Hand in a full gradient, as any array. None means "no gradient" (see MissingGrad)."""
        address, dtype, count, kept = _NONE if grad is None else read_grad(grad, self._context.device)
        flags = 0 if wait else _abi.FSDP_GRAD_NO_WAIT
        if status := lib.put_grad(self.handle, self.index(param), address, dtype, count, flags, stream):
            self.check(status)

    def complete_grad(self, param, stream=None):
        """Declare this gradient complete: nothing more is written into it in this contribution. With max_pending_bytes,
        its part of the group is reduced once all gradients of the part are complete."""
        if status := lib.complete_grad(self.handle, self.index(param), 0, stream):
            self.check(status)

    def reduce_grad(self, is_last=True, stream=None):
        """End this contribution: its gradients are complete. is_last marks the last contribution of the step."""
        if status := lib.reduce_grad(self.handle, _abi.FSDP_LAST if is_last else 0, stream):
            self.check(status)


def number_of_piece(piece):
    """The piece as a number that fsdp.h has room for; ctypes would cut others."""
    if not 0 <= piece < 2**32 - 1:
        raise ValueError(f"piece {piece!r}: pieces are numbered from 0")
    return piece


def _count(shape):
    count = 1
    for size in shape:
        count *= size
    return count
