# SPDX-License-Identifier: Apache-2.0
"""Weights that the library gathers as 8-bit codes with scales, shown to torch as numbers."""

import torch

from ..constants import Phase, Plane, Quantization

_ROWS, _COLUMNS = (Plane.ROW, Plane.ROW_SCALE), (Plane.COLUMN, Plane.COLUMN_SCALE)


class QuantizedWeights:
    """The quantized parameters of one group. While the group is held, each has a tensor of its numbers in torch's
    memory; between holds these tensors have no memory."""

    def __init__(self, layer, kinds):
        self.layer, self.kinds, self.is_filled = layer, kinds, False
        with torch.inference_mode(False):  # the tensors may outlast an inference mode
            self.tensors = {index: self._make(index) for index in kinds}

    def _make(self, index):
        _, param = self.layer.params[index]
        made = torch.empty(param.shape, dtype=self.layer.dtypes[index], device=param.device)
        made.untyped_storage().resize_(0)
        return made

    def fill(self, phase):
        """Makes the numbers of the codes that a hold of this phase has gathered. They stay until the last hold ends: a
        backward pass within a hold of the forward pass or a recomputation takes the numbers of the codes by rows."""
        if self.is_filled:
            return
        self.is_filled = True
        for index, made in self.tensors.items():
            made.untyped_storage().resize_(made.numel() * made.element_size())
            with torch.no_grad():
                made.copy_(self._numbers(index, phase))

    def empty(self):
        if self.is_filled:
            self.is_filled = False
            for made in self.tensors.values():
                made.untyped_storage().resize_(0)

    def _numbers(self, index, phase):
        """Codes times scales, in fp32."""
        kind = self.kinds[index]
        is_by_column = kind == Quantization.MXFP8 and phase == Phase.BACKWARD
        codes, scales = (self._plane(index, plane, phase) for plane in (_COLUMNS if is_by_column else _ROWS))
        numbers = codes.view(torch.float8_e4m3fn).float()
        if kind == Quantization.MXFP8:
            scales = scales.view(torch.float8_e8m0fnu).float()
            return numbers * scales.repeat_interleave(32, -2 if is_by_column else -1)
        if kind == Quantization.FP8_BLOCK:
            rows, columns = numbers.shape[-2:]
            scales = scales.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]
        return numbers * scales

    def _plane(self, index, plane, phase):
        return torch.from_dlpack(self.layer.group.plane(index, plane, phase))
