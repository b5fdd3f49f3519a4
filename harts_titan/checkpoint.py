"""Hugging Face weights in and out: state-dict adapters of the supported model families."""

import itertools
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torchtitan.models.utils import MoEStateDictAdapter

from harts_titan.attention import LatentAttention
from harts_titan.kda import DeltaAttention, LowRankLinear
from harts_titan.model import HartsBlock, HartsModel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
EXPERT = "{}"  # stands for the expert's index in a Hugging Face name

Names = dict[str, str]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a checkpoint on disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def read_index(path: str | Path) -> dict[str, _Stored]:
    """Return the tensors of a safetensors checkpoint, from the headers alone.

    Args:
        path: Folder with ``model.safetensors``, or with shards and their index.
    Raises:
        ValueError: There is no checkpoint, a shard is damaged, its index names a tensor that its
            shard lacks, or a file that the index does not name holds one of its tensors.
    """
    folder = Path(path)
    if (folder / INDEX_FILE).is_file():
        weight_map = json.loads((folder / INDEX_FILE).read_text()).get("weight_map")
        if not weight_map:
            raise ValueError(f"{folder}: {INDEX_FILE} needs a weight_map, got none")
    elif (folder / SINGLE_FILE).is_file():
        weight_map = None
    else:
        raise ValueError(f"{folder}: needs {INDEX_FILE} or {SINGLE_FILE}, found neither")
    names = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
    found: dict[str, _Stored] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: {INDEX_FILE} names {name}, which is missing")
        found |= _read_header(folder / name)
    # torch's reader takes every file of the folder, so a stale one could fill the model.
    for file in sorted(set(folder.glob("*.safetensors")) - {folder / name for name in names}):
        if twice := sorted(_read_header(file).keys() & found.keys()):
            raise ValueError(f"{file} is not part of the checkpoint but holds {_listing(twice)}")
    missing = sorted(set(weight_map or ()) - set(found))
    if missing:
        raise ValueError(f"{folder}: the shards lack {_listing(missing)} of {INDEX_FILE}")
    return found


def _read_header(file: Path) -> dict[str, _Stored]:
    try:
        with safe_open(file, framework="pt") as shard:
            parts = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            return {
                name: _Stored(file, tuple(part.get_shape()), part.get_dtype())
                for name, part in parts.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{file}: needs whole safetensors, got: {error}") from error


def _listing(names: list[str], most: int = 8) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


class HybridStateDictAdapter(MoEStateDictAdapter):
    """Renames and reshapes between a ``HartsModel`` and a Hugging Face checkpoint.

    Published checkpoints of one family differ in a few names; where the assets folder holds a
    checkpoint, its names are used, so that what was loaded is saved under the same names. Its
    tensors that the model does not train (a multi-token-prediction layer) are carried along into
    what is saved. Expert tensors stay views of the stacked parameter, so no second copy of the
    model is made.

    Raises:
        ValueError: A tensor is missing, unknown or has another shape; the message names it.
    """

    block: ClassVar[Names]
    """Native name of a tensor outside blocks -> Hugging Face name."""
    layer: ClassVar[Names]
    """Native name within a block -> Hugging Face name within a layer."""
    aliases: ClassVar[tuple[tuple[str, str], ...]]
    """Parts of names that published checkpoints write differently."""

    def __init__(self, model_config: HartsModel.Config, hf_assets_path: str | None) -> None:
        self._source = {}
        if hf_assets_path and any(
            os.path.isfile(os.path.join(hf_assets_path, name)) for name in (INDEX_FILE, SINGLE_FILE)
        ):
            self._source = read_index(hf_assets_path)
            super().__init__(cast(Any, model_config), hf_assets_path)
        else:
            super().__init__(cast(Any, model_config), None)
            self.hf_assets_path = hf_assets_path
        self._blocks: list[HartsBlock.Config] = model_config.layers
        self._native: dict[str, Tensor] = {}
        self._asked: dict[str, Tensor] = {}
        self._names = self._resolve()
        self._carried = self._find_carried()

    def _resolve(self) -> Names:
        """Return native name -> Hugging Face name for every tensor of the model."""
        names = dict(self.block)
        for index, block in enumerate(self._blocks):
            for native in _block_tensors(block):
                key = f"{native}.low_rank" if self._is_low_rank_query(block, native) else native
                if key not in self.layer:
                    raise ValueError(f"the checkpoint format has no name for {key}")
                names[f"layers.{index}.{native}"] = f"model.layers.{index}.{self.layer[key]}"
        return {native: self._published(name) for native, name in names.items()}

    @staticmethod
    def _is_low_rank_query(block: HartsBlock.Config, native: str) -> bool:
        attention = block.attention
        return (
            native == "attention.q_proj.weight"
            and isinstance(attention, LatentAttention.Config)
            and attention.q_down_proj is not None
        )

    def _published(self, name: str) -> str:
        """Return the name that the assets' checkpoint uses, or the canonical one."""
        for chosen in itertools.product((False, True), repeat=len(self.aliases)):
            candidate = name
            for use, (canonical, other) in zip(chosen, self.aliases, strict=True):
                candidate = candidate.replace(canonical, other) if use else candidate
            if candidate.replace(EXPERT, "0") in self._source:
                return candidate
        return name

    def _find_carried(self) -> dict[str, _Stored]:
        """Return the assets' tensors beyond the decoder's layers; refuse any other surplus."""
        own: set[str] = set()
        for native, name in self._names.items():
            own.update(self._expand(native, name))
        surplus = sorted(set(self._source) - own)
        number = re.compile(r"^model\.layers\.(\d+)\.")
        unknown = [
            name
            for name in surplus
            if not ((found := number.match(name)) and int(found[1]) >= len(self._blocks))
        ]
        if unknown:
            raise ValueError(f"{self.hf_assets_path}: the model has no {_listing(unknown)}")
        return {name: self._source[name] for name in surplus}

    def _expand(self, native: str, name: str) -> list[str]:
        """Return the Hugging Face names of a native tensor: one, or one for each expert."""
        if EXPERT not in name:
            return [name]
        moe = self._blocks[int(native.split(".")[1])].moe
        assert moe is not None
        return [name.replace(EXPERT, str(expert)) for expert in range(moe.experts.num_experts)]

    def tensor_bytes(
        self, state_dict: dict[str, Any], hf_state_dict: dict[str, Any]
    ) -> dict[str, int]:
        """Return the bytes of each saved tensor, those of other processes' experts included."""
        sizes: dict[str, int] = {}
        for native, value in state_dict.items():
            keys = self._expand(native, self._names[native])
            sizes |= dict.fromkeys(keys, value.numel() * value.element_size() // len(keys))
        for name in self._carried:
            if name in hf_state_dict:
                tensor = hf_state_dict[name]
                sizes[name] = tensor.numel() * tensor.element_size()
        return sizes

    def _to_shape(self, native: str, tensor: Tensor) -> Tensor:
        """Return a view in the shape of the checkpoint."""
        return tensor.unsqueeze(1) if ".short_conv." in native else tensor

    def _from_shape(self, native: str, tensor: Tensor) -> Tensor:
        return tensor.squeeze(1) if ".short_conv." in native else tensor

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return views of the tensors under Hugging Face names, and the carried tensors."""
        unknown = sorted(set(state_dict) - set(self._names))
        if unknown:
            raise ValueError(f"the checkpoint format has no name for {_listing(unknown)}")
        result: dict[str, Any] = {}
        for native, value in state_dict.items():
            name = self._names[native]
            self._native[native] = value
            if EXPERT not in name:
                result[name] = self._to_shape(native, value)
            elif isinstance(value, DTensor):
                self.grouped_expert_weight_placements[native] = value.placements
                self.grouped_expert_weight_shape[native] = value.shape
                self.grouped_expert_weight_mesh[native] = value.device_mesh
                template = name.replace(EXPERT, "{1}")
                result.update(self._get_local_experts_weights(template, native, "", value))
            else:
                for expert, key in enumerate(self._expand(native, name)):
                    result[key] = value[expert]
        # A stage or a part of a model saves its own tensors only.
        if len(state_dict) == len(self._names):
            result.update(self._read_carried())
        self._asked = result
        return result

    def _read_carried(self) -> dict[str, Tensor]:
        """Return the carried tensors, mapped from their files rather than copied."""
        tensors: dict[str, Tensor] = {}
        by_file = itertools.groupby(self._carried.items(), key=lambda item: item[1].file)
        for file, items in by_file:
            with safe_open(file, framework="pt") as shard:
                tensors.update({name: shard.get_tensor(name) for name, _ in items})
        return tensors

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the native tensors; carried ones stay behind in the assets folder."""
        missing: list[str] = []
        result: dict[str, Any] = {}
        partial = self._native.keys() if hf_state_dict is self._asked else self._names.keys()
        for native in partial:
            name = self._names[native]
            sharded = isinstance(self._native.get(native), DTensor) and EXPERT in name
            keys = self._expand(native, name)
            if sharded:
                keys = keys[slice(*self.local_experts_indices[native])]
            parts = [hf_state_dict[key] for key in keys if key in hf_state_dict]
            if len(parts) < len(keys):
                missing.extend(key for key in keys if key not in hf_state_dict)
            elif EXPERT not in name:
                result[native] = self._from_shape(native, parts[0])
            elif native in self._native and _is_view(parts[0], self._native[native]):
                result[native] = self._native[native]
            else:
                result[native] = torch.stack(parts)
        self._native, self._asked = {}, {}
        if missing:
            raise ValueError(f"the checkpoint lacks {_listing(missing)}")
        return result

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """Return a reader of a checkpoint whose names and shapes have been checked."""
        if from_quantized:
            raise ValueError(f"{path}: quantized checkpoints are not supported; dequantize it")
        source = read_index(path)
        # torchtitan asks for a reader only when it loads: what is merely carried is not read.
        for name in self._carried:
            self._asked.pop(name, None)
        missing = sorted(set(self._asked) - set(source))
        if missing:
            raise ValueError(f"{path}: the checkpoint lacks {_listing(missing)}")
        misshapen = [
            f"{name} needs {tuple(tensor.shape)}, got {source[name].shape}"
            for name, tensor in self._asked.items()
            if tuple(tensor.shape) != source[name].shape
        ]
        if misshapen:
            raise ValueError(f"{path}: {_listing(misshapen)}")
        quantized = [name for name in self._asked if source[name].dtype not in FLOATS]
        if quantized:
            raise ValueError(
                f"{path}: needs tensors of {FLOATS}, got others: {_listing(quantized)}"
            )
        return HuggingFaceStorageReader(path)


def _is_view(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` lives in the memory of ``whole``, so that filling it filled ``whole``."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in (part, whole)]
    return local[0].untyped_storage().data_ptr() == local[1].untyped_storage().data_ptr()


def _block_tensors(block: HartsBlock.Config) -> list[str]:
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


def _attention_names(prefix: str, out: str) -> Names:
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


def _layer_names(moe: str, experts: tuple[str, str, str], bias: str) -> Names:
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


class LingStateDictAdapter(HybridStateDictAdapter):
    """Ling-3.0 (``bailing_hybrid``)."""

    block = {  # noqa: RUF012  # ClassVar in the base
        "tok_embeddings.weight": "model.word_embeddings.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    layer = _attention_names("attention", "dense") | _layer_names(
        "mlp", ("gate_proj", "up_proj", "down_proj"), "expert_bias"
    )
    aliases = (
        (".attention.", ".self_attn."),
        (".dense.", ".o_proj."),
        (".expert_bias", ".e_score_correction_bias"),
        (".word_embeddings.", ".embed_tokens."),
    )


class KimiLinearStateDictAdapter(HybridStateDictAdapter):
    """Kimi-Linear (``kimi_linear``)."""

    block = {  # noqa: RUF012  # ClassVar in the base
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    layer = _attention_names("self_attn", "o_proj") | _layer_names(
        "block_sparse_moe", ("w1", "w3", "w2"), "e_score_correction_bias"
    )
    # transformers writes its dense layers under the name of the routed ones.
    aliases = ((".mlp.", ".block_sparse_moe."),)

    def _to_shape(self, native: str, tensor: Tensor) -> Tensor:
        if native.endswith(".decay.A_log"):
            return tensor.unsqueeze(0).unsqueeze(0).unsqueeze(-1)
        return super()._to_shape(native, tensor)

    def _from_shape(self, native: str, tensor: Tensor) -> Tensor:
        if native.endswith(".decay.A_log"):
            return tensor.squeeze(-1).squeeze(0).squeeze(0)
        return super()._from_shape(native, tensor)


def load_hf_checkpoint(
    model: HartsModel, path: str | Path, adapter: type[HybridStateDictAdapter]
) -> None:
    """Fill a model, sharded or not, from a Hugging Face checkpoint, in place.

    Args:
        model: Allocated model; each process reads only what it holds.
        path: Folder with safetensors.
        adapter: The family's adapter.
    Raises:
        ValueError: A tensor is missing, unknown or has another shape.
    """
    names = adapter(model.config, str(path))
    wanted = names.to_hf(model.state_dict())
    reader = names.get_hf_storage_reader(str(path))
    dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    model.load_state_dict(names.from_hf(wanted))


def save_hf_checkpoint(
    model: HartsModel,
    path: str | Path,
    adapter: type[HybridStateDictAdapter],
    *,
    source: str | Path | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Save a model, sharded or not, as a Hugging Face checkpoint.

    Args:
        model: The model.
        path: Folder without safetensors to write them and their index to; ``config.json`` and
            the tokenizer are the caller's to copy from the source.
        adapter: The family's adapter.
        source: Checkpoint that the model was loaded from: its names are kept, and its tensors
            that the model does not train are carried over unchanged.
        shard_bytes: Most bytes of a shard.
    Raises:
        ValueError: The source is no checkpoint or has a tensor that the model does not know, or
            the folder holds safetensors already.
    """
    if source is not None:
        read_index(source)
    # What is there would be mixed with, or be mapped while overwritten by, what is saved.
    if any(Path(path).glob("*.safetensors")):
        raise ValueError(f"{path}: needs a folder without safetensors to save to, got some")
    names = adapter(model.config, None if source is None else str(source))
    state = model.state_dict()
    tensors = names.to_hf(state)
    shard, size, shards = 1, 0, {}
    for name, num_bytes in names.tensor_bytes(state, tensors).items():
        if size and size + num_bytes > shard_bytes:
            shard, size = shard + 1, 0
        size += num_bytes
        shards[name] = shard
    writer = HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=shards, save_distributed=True, enable_consolidation=True
    )
    dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        # The writer leaves each process's part beside the consolidated files.
        shutil.rmtree(Path(path) / "sharded", ignore_errors=True)
