# SPDX-License-Identifier: Apache-2.0
"""One rank's membership in the job; also several ranks as threads of one process."""

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
from .mesh import Mesh, handle_of
from .model import Model


class _Watch:
    """The interrupted hook of a context. It gives a wait up if a signal handler raises, as the handler of Ctrl-C does.

    Python runs signal handlers where its interpreter continues: at the entry of a function, before any "try" in it. A
    generator continues inside its "try". So the hook is next() of a generator, a callable in C, and no exception is
    raised where ctypes would only print it.
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
        """Return and forget the exception that this hook or the log hook raised during a call, or None."""
        raised, self.raised = self.raised, None
        return raised


_watches = {}  # what the library calls and reads until the context is destroyed: hooks, flags, and the objects that have them


def _destroy(number):
    watch = _watches.pop(number)  # before another context can have the number
    lib.destroy_context(number)
    watch.options = None


class Context(Owner):
    """This process's rank of the job, from the launcher's variables or from world_size, rank and rendezvous.

    Keywords are the fields of fsdp_context_options. Log lines go to the logger "libfsdp". Use the context in a with
    block. At the end of the block the context is closed. After an exception it is aborted instead, with the exception
    as the reason, so that other ranks end at once. Ctrl-C ends any wait with KeyboardInterrupt; the context has then
    failed.
    """

    _has_peers = True  # close() waits for them
    is_thread = False  # one of several ranks of this process

    def __init__(self, **options):
        self._create(_Watch(), options, lib.create_context)

    @classmethod
    def plan(cls, world_size, rank=0, **options):
        """Make a context that only plans (fsdp_create_plan_context)."""
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
        """Raise what a signal handler raised during a call of this context, or else the exception of the call's
        status."""
        if raised := self._watch.take():
            raise raised
        check(status)

    def own(self, destroy, call, *arguments):
        """Return the Handle of the object that a call makes. If a hook raised, the object is destroyed, whatever
        the call returned."""
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
        """The ranks that the error blames, in ascending order."""
        count = ctypes.c_uint64(0)
        check(lib.get_failed_ranks(self.handle, None, count))
        ranks = (ctypes.c_uint32 * count.value)()
        check(lib.get_failed_ranks(self.handle, ranks, count))
        return list(ranks[: count.value])

    # -- what ranks do together ---------------------------------------------------------------------------------

    def all_reduce_values(self, values, op=_abi.FSDP_VALUE_SUM, mesh=None):
        """Reduce numbers, or one number, over the ranks of the mesh or of the job. Returns a list, or one number."""
        is_one = not hasattr(values, "__len__")
        numbers = [values] if is_one else list(values)
        array = (ctypes.c_double * len(numbers))(*numbers)
        self.check(lib.all_reduce_values(self.handle, handle_of(mesh), array, len(array), op))
        return array[0] if is_one else list(array)

    def wait_stream(self, stream=None, timeout_ms=0):
        self.check(lib.wait_stream(self.handle, stream, timeout_ms))

    def create_mesh(self, **options):
        """Arrange ranks as a mesh. Keywords are the fields of fsdp_mesh_options; ranks is a list."""
        return Mesh(self, **options)

    def create_model(self, **options):
        """Create an empty model. Keywords are the fields of fsdp_model_options."""
        return Model(self, **options)

    def begin_checkpoint(self, folder, **options):
        """Begin a checkpoint, to add models and bytes to. Keywords are the fields of fsdp_save_options."""
        return Checkpoint.begin(self, folder, **options)

    def open_checkpoint(self, folder):
        """Open the folder's newest checkpoint, to load from it."""
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
        """Leave the job in good order, which waits for all ranks. The handle is given back, also if this fails."""
        if self._handle is None:
            return
        try:
            if self._has_peers:
                self.check(lib.close_context(self.handle))
        finally:
            self.destroy()

    def abort(self, reason=None):
        """Fail the context on this rank and for its peers. Any thread may call this, also while another call runs."""
        check(lib.abort_context(self.handle, None if reason is None else str(reason).encode()))

    def destroy(self):
        """Give the handle back without waiting for peers. Models live on as long as their views do."""
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
    """Make world_size contexts, one for each thread that will act as a rank of this process."""
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
    """Call function(context) on one thread for each rank. Returns the results in the order of the ranks.

    If a rank raises an exception, its context is aborted, so that the other ranks end. When all ranks have ended, the
    exception is raised here. Ctrl-C aborts all contexts.
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
