"""Names and shapes of tensors: ours beside those of Hugging Face checkpoints."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harts_titan.attention import LatentAttention
from harts_titan.kda import DeltaAttention, LowRankLinear
from harts_titan.model import HartsBlock

EXPERT = "{}"  # stands for the expert's index in a Hugging Face name

Names = dict[str, str]


def is_view(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` lives in the memory of ``whole``, so that filling it filled ``whole``."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (part, whole)]
    return local[0].untyped_storage().data_ptr() == local[1].untyped_storage().data_ptr()


GATE_UP, _GATE, _UP = (f".moe.experts.{x}_proj" for x in ("gate_up", "gate", "up"))


def split_experts(state: dict[str, Any]) -> dict[str, Any]:
    """Return gate and up projections of experts as two views of the tensor that holds both."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        if name.endswith(GATE_UP):
            for place, part in enumerate((_GATE, _UP)):
                result[name.removesuffix(GATE_UP) + part] = value.select(1, place)
        else:
            result[name] = value
    return result


def join_experts(state: dict[str, Any], joined: dict[str, Tensor]) -> dict[str, Any]:
    """Return what ``split_experts`` was given; views of ``joined`` are not copied."""
    result: dict[str, Any] = {}
    for name, value in state.items():
        if name.endswith(_GATE):
            up, target = state[name.removesuffix(_GATE) + _UP], name.removesuffix(_GATE) + GATE_UP
            whole = joined.get(target)
            filled = whole is not None and is_view(value, whole) and is_view(up, whole)
            result[target] = whole if filled else torch.stack([value, up], dim=1)
        elif not name.endswith(_UP):
            result[name] = value
    return result


def block_tensors(block: HartsBlock.Config) -> list[str]:
    """Return the native names of a block's tensors."""
    names = ["attention_norm.weight", "ffn_norm.weight"]
    attention = block.attention
    if isinstance(attention, DeltaAttention.Config):
        names += [f"attention.{x}_proj.weight" for x in ("q", "k", "v", "beta", "o")]
        names += [f"attention.short_conv.{x}" for x in ("query", "key", "value")]
        names += ["attention.decay.A_log", "attention.decay.dt_bias", "attention.norm.weight"]
        for gate in ("decay_proj", "gate_proj"):
            low_rank = isinstance(getattr(attention, gate), LowRankLinear.Config)
            parts = (".down_proj", ".up_proj") if low_rank else ("",)
            names += [f"attention.{gate}{part}.weight" for part in parts]
    else:
        latent = ("q_down_proj", "q_norm", "q_proj", "kv_down_proj", "kv_norm", "kv_up_proj")
        grouped = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
        parts = latent if isinstance(attention, LatentAttention.Config) else grouped
        names += [
            f"attention.{part}.weight"
            for part in (*parts, "o_proj", "gate_proj")
            if getattr(attention, part) is not None
        ]
    projections = ("gate_proj", "up_proj", "down_proj")
    if block.moe is None:
        return names + [f"feed_forward.{x}.weight" for x in projections]
    names += ["moe.router.gate.weight", "moe.expert_bias"]
    names += [f"moe.experts.{x}" for x in projections]
    if block.moe.shared_experts is not None:
        names += [f"moe.shared_experts.{x}.weight" for x in projections]
    return names


def attention_names(prefix: str, out: str) -> Names:
    """Names within an attention layer that the families share."""
    theirs = {
        "q_proj.weight": "q_proj.weight",
        "q_proj.weight.low_rank": "q_b_proj.weight",
        "q_down_proj.weight": "q_a_proj.weight",
        "q_norm.weight": "q_a_layernorm.weight",
        "kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
        "kv_norm.weight": "kv_a_layernorm.weight",
        "kv_up_proj.weight": "kv_b_proj.weight",
        "k_proj.weight": "k_proj.weight",
        "v_proj.weight": "v_proj.weight",
        "beta_proj.weight": "b_proj.weight",
        "o_proj.weight": f"{out}.weight",
        "norm.weight": "o_norm.weight",
        "short_conv.query": "q_conv1d.weight",
        "short_conv.key": "k_conv1d.weight",
        "short_conv.value": "v_conv1d.weight",
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "decay_proj.weight": "f_proj.weight",
        "decay_proj.down_proj.weight": "f_a_proj.weight",
        "decay_proj.up_proj.weight": "f_b_proj.weight",
        "gate_proj.weight": "g_proj.weight",
        "gate_proj.down_proj.weight": "g_a_proj.weight",
        "gate_proj.up_proj.weight": "g_b_proj.weight",
    }
    return {f"attention.{native}": f"{prefix}.{name}" for native, name in theirs.items()}


def layer_names(moe: str, experts: tuple[str, str, str], bias: str) -> Names:
    """Names of the norms and feed-forward layers."""
    projections = ("gate_proj", "up_proj", "down_proj")
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "moe.router.gate.weight": f"{moe}.gate.weight",
        "moe.expert_bias": f"{moe}.gate.{bias}",
    }
    for projection, expert in zip(projections, experts, strict=True):
        names[f"feed_forward.{projection}.weight"] = f"mlp.{projection}.weight"
        shared = f"shared_experts.{projection}.weight"
        names[f"moe.{shared}"] = f"{moe}.{shared}"
        names[f"moe.experts.{projection}"] = f"{moe}.experts.{EXPERT}.{expert}.weight"
    return names
