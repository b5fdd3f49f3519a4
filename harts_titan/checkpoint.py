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
from harts_titan.checkpoint_names import (
    EXPERT,
    GATE_UP,
    Names,
    attention_names,
    block_tensors,
    is_view,
    join_experts,
    layer_names,
    split_experts,
)
from harts_titan.model import HartsBlock, HartsModel

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")


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
        self._joined: dict[str, Tensor] = {}
        self._asked: dict[str, Tensor] = {}
        self._names = self._resolve()
        self._carried = self._find_carried()

    def _resolve(self) -> Names:
        """Return native name -> Hugging Face name for every tensor of the model."""
        names = dict(self.block)
        for index, block in enumerate(self._blocks):
            for native in block_tensors(block):
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
        for native, value in split_experts(state_dict).items():
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
        self._joined = {name: x for name, x in state_dict.items() if name.endswith(GATE_UP)}
        state_dict = split_experts(state_dict)
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
            elif native in self._native and is_view(parts[0], self._native[native]):
                result[native] = self._native[native]
            else:
                result[native] = torch.stack(parts)
        joined = self._joined
        self._native, self._joined, self._asked = {}, {}, {}
        if missing:
            raise ValueError(f"the checkpoint lacks {_listing(missing)}")
        return join_experts(result, joined)

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


class LingStateDictAdapter(HybridStateDictAdapter):
    """Ling-3.0 (``bailing_hybrid``)."""

    block = {  # noqa: RUF012  # ClassVar in the base
        "tok_embeddings.weight": "model.word_embeddings.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    layer = attention_names("attention", "dense") | layer_names(
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
    layer = attention_names("self_attn", "o_proj") | layer_names(
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
