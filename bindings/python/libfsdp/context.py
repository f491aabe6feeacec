# SPDX-License-Identifier: Apache-2.0
"""One rank's membership in the job, and the ranks as threads of one process."""

import contextlib
import ctypes
import functools
import threading

from . import _abi, log
from ._library import check, lib, make
from .checkpoint import Checkpoint
from .constants import DeviceKind
from .errors import Error, PeerFailed, error_of
from .handle import Handle, Owner
from .mesh import Mesh
from .model import Model


class _Watch:
    """The interrupted hook of a context: gives a wait up when a handler of a signal raises, as that of Ctrl-C does.

    Python runs handlers where its interpreter goes on: at the entry of a function, before any "try" of it. A generator
    goes on inside its "try", so the hook is next() of one, a callable in C; nothing is raised where ctypes would only
    print it.
    """

    def __init__(self):
        self.raised = self.options = None
        self.log_hook = log.make_hook(lambda raised: setattr(self, "raised", raised))
        self.hook = _abi.fsdp_interrupted_hook(functools.partial(next, self._watch()))

    def _watch(self):
        answer = 0
        while True:
            try:
                while True:
                    yield answer
                    answer = int(self.raised is not None)
            except GeneratorExit:
                raise
            except BaseException as raised:
                self.raised, answer = raised, 1

    def take(self):
        """What was raised during a call, here or as a line was logged, or None."""
        raised, self.raised = self.raised, None
        return raised


_watches = {}  # what the library calls and reads until the context is destroyed: hooks, flags, and the objects that have them


def _destroy(number):
    watch = _watches.pop(number)  # before another context can have the number
    lib.destroy_context(number)
    watch.options = None


class Context(Owner):
    """This process's rank of the job: from the launcher's variables, or of world_size, rank and rendezvous.

    Keywords are the fields of fsdp_context_options. Log lines go to the logger "libfsdp". Use it in a with block: at
    its end the context is closed, or, after an exception, aborted with the exception as the reason, so that other ranks
    end at once. Ctrl-C ends any wait with KeyboardInterrupt; the context has then failed.
    """

    _has_peers = True  # close() waits for them
    is_thread = False  # one of several ranks of this process

    def __init__(self, **options):
        self._create(_Watch(), options, lib.create_context)

    @classmethod
    def plan(cls, world_size, rank=0, **options):
        """A context that only plans (fsdp_create_plan_context)."""
        made = cls.__new__(cls)
        made._has_peers = False
        made._create(_Watch(), options, lib.create_plan_context, world_size, rank)
        return made

    def _create(self, watch, options, call, *arguments):
        number = ctypes.c_void_p()
        status = call(*arguments, _context_options(watch, options), number)
        self._watch = watch
        if not status:
            self._begin(number.value, watch, options)
        try:
            self.check(status)
        except BaseException:
            self.destroy()  # the call may have succeeded all the same
            raise

    def _begin(self, number, watch, options):
        self.device = DeviceKind(options.get("device") or DeviceKind.HOST)  # of its models; see Model.device
        # None: the thread's current GPU, whose index only the library knows
        self.device_index = options["device_index"] - 1 if options.get("device_index") else None
        self._watch = watch
        _watches[number] = watch
        self._handle = Handle(_destroy, number)

    def check(self, status):
        """Raises what a status of one of this context's calls stands for, and what a signal's handler raised during the
        call."""
        if raised := self._watch.take():
            raise raised
        check(status)

    def own(self, destroy, call, *arguments):
        """The Handle of what a call makes; it is given back if a hook raised, whatever the call has returned."""
        number = ctypes.c_void_p()
        status = call(*arguments, number)
        handle = None if status else Handle(destroy, number.value)
        try:
            self.check(status)
        except BaseException:
            if handle:
                handle.destroy()
            raise
        return handle

    # -- what it is ---------------------------------------------------------------------------------------------

    def _number(self, call):
        value = ctypes.c_uint32()
        check(call(self.handle, value))
        return value.value

    @property
    def rank(self):
        return self._number(lib.get_rank)

    @property
    def world_size(self):
        return self._number(lib.get_world_size)

    @property
    def error(self):
        """The Error that failed the context for good, or None."""
        found = _abi.fsdp_error()
        check(lib.get_context_error(self.handle, found))
        return error_of(found)

    @property
    def failed_ranks(self):
        """The ranks that the error blames, ascending."""
        count = ctypes.c_uint64(0)
        check(lib.get_failed_ranks(self.handle, None, count))
        ranks = (ctypes.c_uint32 * count.value)()
        check(lib.get_failed_ranks(self.handle, ranks, count))
        return list(ranks[: count.value])

    # -- what ranks do together ---------------------------------------------------------------------------------

    def all_reduce_values(self, values, op=_abi.FSDP_VALUE_SUM, mesh=None):
        """The values (numbers, or one) reduced over the ranks of the mesh, or of the job: a list, or one."""
        is_one = not hasattr(values, "__len__")
        numbers = [values] if is_one else list(values)
        array = (ctypes.c_double * len(numbers))(*numbers)
        self.check(lib.all_reduce_values(self.handle, mesh.handle if mesh else None, array, len(array), op))
        return array[0] if is_one else list(array)

    def wait_stream(self, stream=None, timeout_ms=0):
        self.check(lib.wait_stream(self.handle, stream, timeout_ms))

    def create_mesh(self, **options):
        """Keywords are the fields of fsdp_mesh_options; ranks is a list."""
        return Mesh(self, **options)

    def create_model(self, **options):
        """An empty model. Keywords are the fields of fsdp_model_options."""
        return Model(self, **options)

    def begin_checkpoint(self, folder, **options):
        """A checkpoint to add models and bytes to; keywords are the fields of fsdp_save_options."""
        return Checkpoint.begin(self, folder, **options)

    def open_checkpoint(self, folder):
        """The folder's newest checkpoint, to load from."""
        return Checkpoint.open(self, folder)

    # -- what it tells ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def span(self, name):
        """A span in the timeline around a with block."""
        self.check(lib.begin_span(self.handle, name.encode()))
        try:
            yield self
        finally:
            check(lib.end_span(self.handle))

    def write_trace(self, path):
        check(lib.write_trace(self.handle, str(path).encode()))

    def write_flight_record(self, path):
        check(lib.write_flight_record(self.handle, str(path).encode()))

    # -- how it ends --------------------------------------------------------------------------------------------

    def close(self):
        """Leave the job in good order, which waits for all ranks, and give the handle back, also if that fails."""
        if self._handle is None:
            return
        try:
            if self._has_peers:
                self.check(lib.close_context(self.handle))
        finally:
            self.destroy()

    def abort(self, reason=None):
        """Fail the context, here and for its peers. From any thread, also while another call runs."""
        check(lib.abort_context(self.handle, None if reason is None else str(reason).encode()))

    def destroy(self):
        """Give the handle back without waiting for anybody. Models live on as long as their views do."""
        handle, self._handle = self._handle, None
        if handle:
            handle.destroy()
            self.check(_abi.FSDP_OK)  # a line that was logged may have raised

    def __exit__(self, kind, error, trace):
        if error is None:
            self.close()
        elif self._handle:
            self.abort(f"{kind.__name__}: {error}")
            self.destroy()


def _context_options(watch, options):
    options.setdefault("log", watch.log_hook)
    options.setdefault("log_level", log.wanted_level())
    options.setdefault("interrupted", watch.hook)
    watch.options = make(_abi.fsdp_context_options, options)  # which keeps what its fields point to
    return watch.options


def create_local_contexts(world_size, **options):
    """A context for each of world_size threads that act as ranks of one process."""
    numbers = (ctypes.c_void_p * world_size)()
    shared = _Watch()
    if world_size != 1:
        # One set of options serves all contexts, and so would one hook: a generator that only one thread may be in.
        options.setdefault("interrupted", _abi.fsdp_interrupted_hook())
        options.setdefault("log", log.shared_hook)
    check(lib.create_local_contexts(world_size, _context_options(shared, options), numbers))
    contexts = []
    for number in numbers:
        made, watch = Context.__new__(Context), shared if world_size == 1 else _Watch()
        watch.options = shared.options
        made._begin(number, watch, options)
        made.is_thread = world_size > 1
        contexts.append(made)
    return contexts


def run_local(world_size, function, **options):
    """function(context) on a thread for each rank; what they return, in the order of ranks.

    An exception of a rank aborts its context, so that the others end; when all have, it is raised here. Ctrl-C aborts
    all of them.
    """
    contexts = create_local_contexts(world_size, **options)
    results, errors = [None] * world_size, []

    def run(rank):
        try:
            with contexts[rank] as context:
                results[rank] = function(context)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    interrupted = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:
                interrupted = interrupted or error
                _abort_all(contexts, error)
    if interrupted or errors:
        # Those that only tell of a peer came after what the peer has raised, if perhaps sooner into the list.
        raise interrupted or min(errors, key=lambda error: isinstance(error, PeerFailed))
    return results


def _abort_all(contexts, error):
    for context in contexts:
        with contextlib.suppress(Error):  # one that has ended by itself
            context.abort(f"{type(error).__name__}: {error}")
