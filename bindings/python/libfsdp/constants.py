# SPDX-License-Identifier: Apache-2.0
"""The constants of fsdp.h as enums, without their prefixes. A call that takes an enum also takes the integer."""

import enum

from . import _abi

EVERY_RANK = _abi.FSDP_EVERY_RANK


def _read(kind, name, prefix, *, only=None):
    """Make an enum of all constants that begin with the prefix, or only of the listed ones."""
    names = only or [constant[len(prefix) :] for constant in vars(_abi) if constant.startswith(prefix)]
    made = kind(name, {short: getattr(_abi, prefix + short) for short in names}, module=__name__)
    made.__doc__ = f"{prefix}* of fsdp.h."
    return made


Status = _read(
    enum.IntEnum,
    "Status",
    "FSDP_",
    only=[
        "OK",
        "INVALID_ARGUMENT",
        "INVALID_HANDLE",
        "INVALID_STATE",
        "UNSUPPORTED",
        "OUT_OF_MEMORY",
        "BUSY",
        "MISMATCH",
        "PEER_FAILED",
        "TIMEOUT",
        "ABORTED",
        "INTERRUPTED",
        "SYSTEM",
        "INTERNAL",
    ],
)
Origin = _read(enum.IntEnum, "Origin", "FSDP_ORIGIN_")
Dtype = _read(enum.IntEnum, "Dtype", "FSDP_", only=["FLOAT32", "BFLOAT16", "FLOAT16", "FLOAT8_E4M3", "E8M0", "UINT8"])
DeviceKind = _read(enum.IntEnum, "DeviceKind", "FSDP_DEVICE_")
DeviceTransport = _read(enum.IntEnum, "DeviceTransport", "FSDP_TRANSPORT_")
LogLevel = _read(enum.IntEnum, "LogLevel", "FSDP_LOG_")
ValueOp = _read(enum.IntEnum, "ValueOp", "FSDP_VALUE_")
Strategy = _read(enum.IntEnum, "Strategy", "FSDP_STRATEGY_")
GradOp = _read(enum.IntEnum, "GradOp", "FSDP_GRAD_OP_")
UnshardMode = _read(enum.IntEnum, "UnshardMode", "FSDP_UNSHARD_")
ViewKind = _read(enum.IntEnum, "ViewKind", "FSDP_VIEWS_")
ReducePolicy = _read(enum.IntEnum, "ReducePolicy", "FSDP_REDUCE_POLICY_")
OuterStrategy = _read(enum.IntEnum, "OuterStrategy", "FSDP_OUTER_")
Optimizer = _read(enum.IntEnum, "Optimizer", "FSDP_OPTIMIZER_")
MainStorage = _read(enum.IntEnum, "MainStorage", "FSDP_MAIN_")
Home = _read(enum.IntEnum, "Home", "FSDP_HOME_")
Phase = _read(enum.IntEnum, "Phase", "FSDP_", only=["FORWARD", "BACKWARD", "RECOMPUTE", "EVAL"])
ScheduleKind = _read(enum.IntEnum, "ScheduleKind", "FSDP_SCHEDULE_")
Role = _read(enum.IntEnum, "Role", "FSDP_ROLE_")
Granule = _read(enum.IntEnum, "Granule", "FSDP_GRANULE_")
Quantization = _read(enum.IntEnum, "Quantization", "FSDP_QUANTIZE_")
BackwardWeights = _read(enum.IntEnum, "BackwardWeights", "FSDP_BACKWARD_WEIGHTS_")
MatrixLayout = _read(enum.IntEnum, "MatrixLayout", "FSDP_MATRIX_")
MissingGrad = _read(enum.IntEnum, "MissingGrad", "FSDP_MISSING_GRAD_")
ScaleRounding = _read(enum.IntEnum, "ScaleRounding", "FSDP_SCALE_", only=["EXACT", "POWER_OF_TWO"])
ScaleRule = _read(enum.IntEnum, "ScaleRule", "FSDP_SCALE_", only=["ROUND_UP", "FLOOR"])
PlanePolicy = _read(enum.IntEnum, "PlanePolicy", "FSDP_PLANES_")
Plane = _read(enum.IntEnum, "Plane", "FSDP_PLANE_")
BytesOwner = _read(enum.IntEnum, "BytesOwner", "FSDP_BYTES_")
CheckpointState = _read(enum.IntEnum, "CheckpointState", "FSDP_CHECKPOINT_")
ContextFlag = _read(enum.IntFlag, "ContextFlag", "FSDP_CONTEXT_")
ModelFlag = _read(enum.IntFlag, "ModelFlag", "FSDP_MODEL_")
ParamFlag = _read(enum.IntFlag, "ParamFlag", "FSDP_PARAM_")
GroupFlag = _read(enum.IntFlag, "GroupFlag", "FSDP_GROUP_")
AdamWFlag = _read(enum.IntFlag, "AdamWFlag", "FSDP_ADAMW_")
GradFlag = _read(enum.IntFlag, "GradFlag", "FSDP_GRAD_", only=["ZEROED", "NO_WAIT"])
SaveFlag = _read(enum.IntFlag, "SaveFlag", "FSDP_SAVE_")
LoadFlag = _read(enum.IntFlag, "LoadFlag", "FSDP_LOAD_")
RenameFlag = _read(enum.IntFlag, "RenameFlag", "FSDP_RENAME_")
