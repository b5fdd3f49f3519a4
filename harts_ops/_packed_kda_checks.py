"""What `packed_kda` refuses: shapes, dtypes and options that disagree."""

import torch
from torch import Tensor

PACKED_KDA_PLAN = (
    "packed_row",
    "row_packed",
    "packed_order",
    "packed_ptr",
    "cu_seqlens",
    "chunk_indices",
    "chunk_offsets",
    "round_ptr",
    "source",
    "export_slot",
    "reader_ptr",
    "reader",
    "num_rounds",
    "max_sequences",
    "max_chunks",
    "num_exports",
)


def require_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"need {name} {list(shape)}, got {list(x.shape)}")


def check_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    halo: tuple[Tensor | None, ...],
    packed_ptr: Tensor,
) -> None:
    if q.ndim != 3 or v.ndim != 3:
        raise ValueError(
            f"need q [R, HK, K] and v [R, HV, V], got {list(q.shape)} and {list(v.shape)}"
        )
    (rows, key_heads, width), heads = q.shape, v.shape[1]
    if 0 in (key_heads, heads, width, v.shape[2]):
        raise ValueError(
            f"need heads and widths of at least 1, got q {list(q.shape)} and v {list(v.shape)}"
        )
    if heads % key_heads != 0:
        raise ValueError(f"need HV a multiple of HK, got {heads} value and {key_heads} key heads")
    require_shape("k", k, (rows, key_heads, width))
    require_shape("v", v, (rows, heads, v.shape[2]))
    require_shape("gate", gate, (rows, heads, width))
    require_shape("beta", beta, (rows, heads))
    num_halo = packed_ptr.shape[0] - 1 - rows
    if num_halo < 0:
        raise ValueError(
            f"need packed_ptr [R + H + 1], got {list(packed_ptr.shape)} for R = {rows}"
        )
    present = [x is not None for x in halo]
    if any(present) and not all(present):
        raise ValueError("need all of halo_k, halo_v, halo_gate and halo_beta, or none of them")
    for name, x, own in zip(("k", "v", "gate", "beta"), halo, (k, v, gate, beta), strict=True):
        if x is not None:
            require_shape(f"halo_{name}", x, (num_halo, *own.shape[1:]))


def check_gate(
    gate: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate_form: str,
    lower_bound: float,
) -> None:
    if gate_form not in ("log_decay", "lower_bound", "softplus"):
        raise ValueError(f"need gate_form log_decay, lower_bound or softplus, got {gate_form!r}")
    if gate_form == "log_decay":
        if A_log is not None or dt_bias is not None:
            raise ValueError("gate_form log_decay takes neither A_log nor dt_bias")
        return
    if A_log is None:
        raise ValueError(f"gate_form {gate_form} needs A_log [HV], got None")
    if gate_form == "lower_bound" and not -float("inf") < lower_bound < 0:
        raise ValueError(f"need a finite lower_bound < 0, got {lower_bound}")
    _, heads, width = gate.shape
    require_shape("A_log", A_log, (heads,))
    if dt_bias is not None and dt_bias.ndim != 1:
        require_shape("dt_bias", dt_bias, (heads, width))
    elif dt_bias is not None:
        require_shape("dt_bias", dt_bias, (heads * width,))


def check_dtypes(
    values: tuple[Tensor | None, ...],
    parameters: tuple[Tensor | None, ...],
    external_states: Tensor | None,
) -> None:
    dtypes = {x.dtype for x in values if x is not None}
    dtype = min(dtypes, key=str)
    if len(dtypes) > 1 or not dtype.is_floating_point:
        found = sorted(str(x) for x in dtypes)
        raise ValueError(f"need q, k, v, halo_k and halo_v of one floating dtype, got {found}")
    compute = torch.promote_types(dtype, torch.float32)
    for x in parameters:
        if x is not None and x.dtype not in (dtype, compute):
            raise ValueError(
                f"need gate, beta, A_log and dt_bias in {dtype} or {compute}, got {x.dtype}"
            )
    if external_states is not None and external_states.dtype != compute:
        raise ValueError(f"need external_states in {compute}, got {external_states.dtype}")


def check_devices(device: torch.device, **tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise ValueError(f"need {name} on {device} as q, got {x.device}")


def check_plan(
    plan: tuple[Tensor, ...], rows: int, num_rounds: int, num_exports: int, chunk_size: int
) -> None:
    if chunk_size < 1:
        raise ValueError(f"need chunk_size >= 1, got {chunk_size}")
    packed_row, source, export_slot, reader_ptr = plan[0], plan[8], plan[9], plan[10]
    num_sequences, num_packed = source.shape[0], packed_row.shape[0]
    if reader_ptr.shape[0] < num_exports + 2:
        raise ValueError(
            f"need reader_ptr [1 + E + X + 1], got {list(reader_ptr.shape)} for X = {num_exports}"
        )
    shapes = (
        (num_packed,), (rows,), (num_packed,), tuple(plan[3].shape), (num_sequences + 1,),
        (export_slot.shape[0], 2), (num_sequences + 1,), (num_rounds + 1,), (num_sequences,),
        (export_slot.shape[0],), tuple(reader_ptr.shape), (num_sequences,),
    )  # fmt: skip
    for name, x, shape in zip(PACKED_KDA_PLAN, plan, shapes, strict=False):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"need {name} in int32 or int64, got {x.dtype}")
        require_shape(name, x, shape)
