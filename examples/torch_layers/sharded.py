# SPDX-License-Identifier: Apache-2.0
"""A torch module whose layers' weights and gradients belong to libfsdp. torch does the math, on its own streams.

Each layer is a group. Its parameters are views of libfsdp's buffers, whose addresses are fixed from the seal on; hooks
around forward and backward say when they are read. A gradient is handed over when autograd has it, and not kept."""
import ctypes as c

import torch

import libfsdp as fsdp

DTYPES = {torch.float32: fsdp.FLOAT32, torch.bfloat16: fsdp.BFLOAT16}


class DeviceMemory:
    """Memory of the GPU that libfsdp owns, as torch.as_tensor takes it: bytes, since bfloat16 has no type string."""

    def __init__(self, address, size_bytes):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size_bytes,), "typestr": "|u1", "version": 3}


def view(tensor, shape, dtype, device):
    """torch's view of an fsdp_tensor, without a copy."""
    size_bytes = tensor.element_count * dtype.itemsize
    if device.type == "cuda":
        data = torch.as_tensor(DeviceMemory(tensor.data, size_bytes), device=device)
    else:
        data = torch.frombuffer((c.c_uint8 * size_bytes).from_address(tensor.data), dtype=torch.uint8)
    return data.view(dtype).view(shape)


class Group:
    """One layer."""

    def __init__(self, owner, name, module):
        self.owner, self.name, self.module = owner, name, module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.handle = c.c_void_p()
        self.to_come = 0  # gradients of this backward pass that autograd has not yet given

    def declare(self):
        params = (fsdp.Param * len(self.params))()
        for at, param in zip(params, self.params):
            name = f"{self.name}.{next(n for n, p in self.module.named_parameters() if p is param)}"
            shape = (c.c_uint64 * param.dim())(*param.shape)
            flags = fsdp.NO_DECAY if param.dim() < 2 else 0
            at.__init__(name=name.encode(), shape=shape, dimension_count=param.dim(), dtype=DTYPES[self.owner.dtype],
                        flags=flags)
        self.owner.call("fsdp_create_group", self.owner.model, self.name.encode(), params, c.c_uint64(len(params)),
                        c.c_uint64(c.sizeof(fsdp.Param)), None, c.byref(self.handle))

    def load(self):
        for i, param in enumerate(self.params):
            data = param.detach().float().contiguous()
            torch.cuda.synchronize() if data.is_cuda else None
            self.owner.call("fsdp_load_param", self.handle, c.c_uint64(i), c.c_void_p(data.data_ptr()), fsdp.FLOAT32,
                            c.c_uint64(data.numel()), fsdp.EVERY_RANK, c.c_uint32(0))

    def attach(self):
        """Makes the parameters views of libfsdp's buffers, and adds the hooks that make libfsdp's calls in order."""
        self.unshard(fsdp.EVAL)  # views exist while the group is unsharded; the addresses stay
        for i, param in enumerate(self.params):
            tensor = fsdp.Tensor()
            self.owner.call("fsdp_get_param", self.handle, c.c_uint64(i), fsdp.EVAL, c.byref(tensor))
            param.data = view(tensor, param.shape, self.owner.dtype, self.owner.device)
            param.register_post_accumulate_grad_hook(lambda p, i=i: self.put(i, p))
        self.reshard(fsdp.EVAL)
        self.module.register_forward_pre_hook(lambda module, inputs: self.unshard(self.phase()))
        self.module.register_forward_hook(lambda module, inputs, output: self.reshard(self.phase()))
        self.module.register_full_backward_pre_hook(lambda module, grads: self.begin_backward())

    def phase(self):
        return fsdp.FORWARD if torch.is_grad_enabled() else fsdp.EVAL

    def unshard(self, phase):
        self.owner.call("fsdp_unshard", self.handle, phase, c.c_uint32(0), self.owner.stream())

    def reshard(self, phase):
        self.owner.call("fsdp_reshard", self.handle, phase, c.c_uint32(0), self.owner.stream())

    def begin_backward(self):
        self.unshard(fsdp.BACKWARD)
        self.to_come = len(self.params)

    def put(self, i, param):
        """autograd has added up a gradient: libfsdp takes a copy in the main grads' pool, and torch may forget its own."""
        grad = param.grad
        self.owner.call("fsdp_put_grad", self.handle, c.c_uint64(i), c.c_void_p(grad.data_ptr()), DTYPES[grad.dtype],
                        c.c_uint64(grad.numel()), c.c_uint32(0), self.owner.stream())
        param.grad = None
        self.to_come -= 1
        if self.to_come == 0:  # the layer's weights are not read again
            self.reshard(fsdp.BACKWARD)
            self.owner.call("fsdp_reduce_grad", self.handle, c.c_uint32(fsdp.LAST if self.owner.last else 0),
                            self.owner.stream())


class Sharded:
    """layers: (name, module) in the order of the forward pass; together they have all parameters."""

    def __init__(self, layers, dtype, device, transport="auto", force=False, path=None):
        self.library, self.dtype, self.device = fsdp.Library(path), dtype, device
        self.call = self.library.call
        self.last = True
        self.context, self.model = c.c_void_p(), c.c_void_p()
        self.create_context(transport)
        options = fsdp.ModelOptions(reduce_dtype=fsdp.FLOAT32, flags=fsdp.FORCE_COMMUNICATION if force else 0)
        self.call("fsdp_create_model", self.context, c.byref(options), c.byref(self.model))
        self.groups = [Group(self, name, module) for name, module in layers]
        for group in self.groups:
            group.declare()
        self.call("fsdp_seal_model", self.model)
        for group in self.groups:
            group.load()
        self.call("fsdp_publish_weights", self.model, self.stream())
        for group in self.groups:
            group.attach()

    def create_context(self, transport):
        options = fsdp.ContextOptions(device_transport=fsdp.TRANSPORTS[transport])
        if self.device.type == "cuda":
            options.device, options.device_index = fsdp.DEVICE_CUDA, 1 + self.device.index
        self.call("fsdp_create_context", c.byref(options), c.byref(self.context))
        rank, size = c.c_uint32(), c.c_uint32()
        self.call("fsdp_get_rank", self.context, c.byref(rank))
        self.call("fsdp_get_world_size", self.context, c.byref(size))
        self.rank, self.world_size = rank.value, size.value

    def stream(self):
        """The stream that torch works on now, on this thread: autograd may use another one."""
        return c.c_void_p(torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None)

    def step(self, lr, max_norm, scale=1.0):
        """Takes a step after the last backward pass. Returns the norm of the gradients."""
        norm = c.c_double()
        self.call("fsdp_finish_grads", self.model, c.c_double(scale), c.c_uint32(0), self.stream())
        self.call("fsdp_clip_grads", self.model, None, c.c_double(max_norm), self.stream(), c.byref(norm))
        options = fsdp.AdamW(beta2=0.95, weight_decay=0.1)
        self.call("fsdp_step_adamw", self.model, c.c_double(lr), c.byref(options), self.stream())
        return norm.value

    def mean(self, value):
        values = (c.c_double * 1)(value)
        self.call("fsdp_all_reduce_values", self.context, None, values, c.c_uint64(1), fsdp.MEAN)
        return values[0]

    def memory(self):
        """Bytes of libfsdp's memory on this rank, by role."""
        return {role: self.role_bytes(number) for number, role in enumerate(fsdp.ROLES)}

    def role_bytes(self, role):
        count = c.c_uint64()
        self.call("fsdp_get_role_bytes", self.model, role, c.c_uint32(self.rank), c.byref(count))
        return count.value

    def close(self):
        self.library._calls.fsdp_destroy_model(self.model)
        self.call("fsdp_close_context", self.context)
        self.library._calls.fsdp_destroy_context(self.context)
