"""Hugging Face ``config.json`` <-> the numbers of a decoder."""

from itertools import groupby
from typing import Any

from harts_titan import DecoderNumbers, Limits

MODEL_TYPES = ("bailing_hybrid", "kimi_linear")
ONLY = {
    "tie_word_embeddings": False,
    "score_function": "sigmoid",
    "moe_router_activation_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "rope_interleave": True,
}
"""The one supported value of fields that change the model but not its tensors."""


def decoder_numbers(config: dict[str, Any]) -> DecoderNumbers:
    """Return the numbers of a model from its ``config.json``.

    Accepts the names of the published checkpoints and those that transformers writes.

    Args:
        config: The parsed file.
    Raises:
        ValueError: The model type or a field's value is not supported, or a required field is
            missing.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"config.json: model_type needs one of {MODEL_TYPES}, got {kind!r}")
    for name, value in ONLY.items():
        if config.get(name) not in (None, value):
            raise ValueError(f"config.json: {name} needs {value!r}, got {config[name]!r}")

    def get(*names: str, default: Any = None) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            raise ValueError(f"config.json: needs {' or '.join(names)}, got neither")
        return default

    return DecoderNumbers(
        vocab_size=get("vocab_size"),
        dim=get("hidden_size"),
        num_layers=get("num_hidden_layers"),
        full_attention=_full_attention(config),
        num_heads=get("num_attention_heads"),
        latent_dim=get("kv_lora_rank"),
        q_rank=config.get("q_lora_rank"),
        nope_dim=get("qk_nope_head_dim"),
        rope_dim=get("qk_rope_head_dim"),
        value_dim=get("v_head_dim"),
        dense_layers=_dense_layers(config),
        dense_hidden_dim=get("intermediate_size"),
        num_experts=get("num_experts", "num_local_experts"),
        top_k=get("num_experts_per_tok", "num_experts_per_token"),
        num_groups=get("n_group", "num_expert_group", default=1),
        top_groups=get("topk_group", default=1),
        expert_hidden_dim=get("moe_intermediate_size"),
        shared_hidden_dim=get("moe_intermediate_size")
        * get("num_shared_experts", "n_shared_experts", default=1),
        routed_scaling=get("routed_scaling_factor", default=1.0),
        norm_eps=get("rms_norm_eps"),
        **(_ling(config, get) if kind == "bailing_hybrid" else _kimi(config, get)),
    )


def _ling(config: dict[str, Any], get: Any) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope_type needs default, got {kind!r}")
    return {
        "head_dim": get("linear_head_dim", "head_dim"),
        "conv_width": get("short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
        "gate_form": "lower_bound" if get("kda_safe_gate", default=True) else "softplus",
        "lower_bound": get("kda_lower_bound", default=-5.0),
        "rope_theta": rope.get("rope_theta") or get("rope_theta"),
        "head_gate": True,
        "expert_limits": _limits(config, "expert_swiglu_limit_list"),
        "shared_limits": _limits(config, "share_expert_swiglu_limit_list"),
    }


def _limits(config: dict[str, Any], name: str) -> Limits:
    """Return the clamps of a list with one limit for each layer, 0 for none."""
    values, num_layers = config.get(name) or [], config["num_hidden_layers"]
    if not isinstance(values, list) or 0 < len(values) < num_layers:
        raise ValueError(f"config.json: {name} needs {num_layers} limits, got {values!r}")
    runs = groupby(range(min(len(values), num_layers)), key=lambda layer: values[layer])
    spans = [(limit, list(layers)) for limit, layers in runs if limit]
    return tuple((layers[0], layers[-1], float(limit)) for limit, layers in spans)


def _kimi(config: dict[str, Any], get: Any) -> dict[str, Any]:
    linear = config.get("linear_attn_config") or {}
    return {
        "head_dim": linear.get("head_dim") or get("linear_head_dim"),
        "conv_width": linear.get("short_conv_kernel_size")
        or get("linear_conv_kernel_dim", default=4),
        "gate_form": "softplus",
        "low_rank_gates": True,
    }


def _full_attention(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the indices of the layers with full attention."""
    if config.get("layer_types") is not None:
        kinds = config["layer_types"]
        return tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
    linear = config.get("linear_attn_config") or {}
    if "full_attn_layers" in linear:
        return tuple(index - 1 for index in linear["full_attn_layers"])
    if "layer_group_size" not in config:
        raise ValueError("config.json: needs layer_types, full_attn_layers or layer_group_size")
    group = config["layer_group_size"]
    return tuple(range(group - 1, config["num_hidden_layers"], group))


def _dense_layers(config: dict[str, Any]) -> int:
    """Return how many leading layers have a dense feed-forward."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return config.get("first_k_dense_replace", 0)
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise ValueError(f"config.json: dense layers must come first, got mlp_layer_types {kinds}")
    return dense


def hf_config(numbers: DecoderNumbers) -> dict[str, Any]:
    """Return the ``config.json`` with which transformers runs a saved model.

    Args:
        numbers: Numbers of a Ling-3.0 model (head-wise output gates) or a Kimi-Linear model.
    Raises:
        ValueError: No supported model type has these numbers.
    """
    n = numbers
    if n.num_kv_heads is not None or not n.num_experts:
        raise ValueError("config.json needs latent attention and a mixture of experts")
    if n.expert_limits or n.shared_limits:
        raise ValueError("transformers has no clamp of the experts' activations")
    kimi = n.low_rank_gates
    layers = range(n.num_layers)
    common = {
        "architectures": ["KimiLinearForCausalLM" if kimi else "BailingHybridForCausalLM"],
        "model_type": "kimi_linear" if kimi else "bailing_hybrid",
        "vocab_size": n.vocab_size,
        "hidden_size": n.dim,
        "intermediate_size": n.dense_hidden_dim,
        "moe_intermediate_size": n.expert_hidden_dim,
        "num_hidden_layers": n.num_layers,
        "num_attention_heads": n.num_heads,
        "num_key_value_heads": n.num_heads,
        "num_experts": n.num_experts,
        "num_experts_per_token": n.top_k,
        "num_shared_experts": n.shared_hidden_dim // n.expert_hidden_dim,
        "num_expert_group": n.num_groups,
        "topk_group": n.top_groups,
        "routed_scaling_factor": n.routed_scaling,
        "moe_renormalize": True,
        "kv_lora_rank": n.latent_dim,
        "q_lora_rank": n.q_rank,
        "qk_nope_head_dim": n.nope_dim,
        "qk_rope_head_dim": n.rope_dim,
        "v_head_dim": n.value_dim,
        "rms_norm_eps": n.norm_eps,
        "layer_types": [
            "full_attention" if index in n.full_attention else "linear_attention"
            for index in layers
        ],
        "mlp_layer_types": ["dense" if index < n.dense_layers else "sparse" for index in layers],
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kimi:
        return common | {
            "linear_head_dim": n.head_dim,
            "linear_num_heads": n.num_heads,
            "linear_conv_kernel_dim": n.conv_width,
        }
    if not n.head_gate or n.rope_theta is None:
        raise ValueError("bailing_hybrid needs head-wise output gates and a rotary embedding")
    return common | {
        "head_dim": n.head_dim,
        "short_conv_kernel_size": n.conv_width,
        "kda_safe_gate": n.gate_form == "lower_bound",
        "kda_lower_bound": n.lower_bound,
        "first_k_dense_replace": n.dense_layers,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": n.rope_theta},
    }
