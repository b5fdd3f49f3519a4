"""Hugging Face weights: parity with transformers, in and out, and every refusal."""

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harts_titan import DecoderNumbers, decoder_config, model_numbers, model_registry
from harts_titan.batch import microbatch_input, position_labels
from harts_titan.checkpoint import (
    INDEX_FILE,
    KimiLinearStateDictAdapter,
    LingStateDictAdapter,
    load_hf_checkpoint,
    save_hf_checkpoint,
)
from harts_titan.hf_config import decoder_numbers, hf_config
from harts_titan.model import HartsModel
from planner import plan_microbatch

transformers = pytest.importorskip("transformers")

ADAPTER = {"bailing_hybrid": LingStateDictAdapter, "kimi_linear": KimiLinearStateDictAdapter}
KINDS = ("ling", "ling_full_query", "ling_softplus", "kimi")
COMMON = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}


def make_reference(kind: str) -> torch.nn.Module:
    """A small random transformers model; its routing bias and gates are away from zero."""
    torch.manual_seed(KINDS.index(kind))
    if kind == "kimi":
        model = transformers.KimiLinearForCausalLM(
            transformers.KimiLinearConfig(
                **COMMON,
                linear_head_dim=16,
                linear_num_heads=2,
                layer_types=["linear_attention", "full_attention"] * 2,
            )
        )
    else:
        model = transformers.BailingHybridForCausalLM(
            transformers.BailingHybridConfig(
                **COMMON,
                q_lora_rank=None if kind == "ling_full_query" else 8,
                head_dim=16,
                layer_group_size=2,
                first_k_dense_replace=1,
                n_group=4,
                topk_group=2,
                num_mtp_layers=0,
                kda_safe_gate=kind != "ling_softplus",
            )
        )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.1, 0.1)
            elif tensor.ndim > 1 and "A_log" not in name:
                tensor.normal_(std=0.15)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
    return model.eval()


def make_ours(folder, dtype: torch.dtype = torch.float32) -> HartsModel:
    config = json.loads((folder / "config.json").read_text())
    model = HartsModel(decoder_config(decoder_numbers(config))).to(dtype)
    load_hf_checkpoint(model, folder, ADAPTER[config["model_type"]])
    return model


@pytest.fixture(scope="module", autouse=True)
def torch_kernels():
    """Where fla is installed, transformers would call its Triton kernels; take the torch ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bailing_hybrid", "kimi_linear"):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            for function in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):
                patch.setattr(module, function, inspect.unwrap(getattr(module, function)))
        yield


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A transformers model, its folder, and ours loaded from that folder."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param)
    reference.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX_FILE).is_file()
    return reference, folder, make_ours(folder)


def run_ours(model: HartsModel, trajectories: Sequence[np.ndarray]):
    """Log-probabilities of every next token, and the final hidden states of the rows."""
    layout = plan_microbatch(trajectories)
    masks = [np.arange(len(x)) > 0 for x in trajectories]
    inputs = microbatch_input(
        layout, position_labels(trajectories, masks), trajectories=np.arange(len(trajectories))
    )
    return layout, model(inputs.token, inputs, model.empty_interface())


def logits_of(model: HartsModel, tokens: np.ndarray) -> torch.Tensor:
    layout, output = run_ours(model, [tokens])
    return (output.hidden @ model.lm_head.weight.T)[torch.from_numpy(layout.row)]


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130, 400])
def test_logits_equal_transformers(pair, length):
    reference, _, ours = pair
    tokens = np.random.default_rng(length).integers(0, 64, length)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)[None]).logits[0]
        actual = logits_of(ours, tokens)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def expanded_logprobs(reference: torch.nn.Module, trajectories: Sequence[np.ndarray]):
    """Log-probability of every token after the first, trajectory by trajectory."""
    result = []
    for tokens in trajectories:
        if len(tokens) == 1:
            continue
        ids = torch.from_numpy(tokens)
        logits = reference(ids[None]).logits[0, :-1]
        result.append(logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1))
    return torch.cat(result)


def published_gradients(reference: torch.nn.Module, folder, tmp_path) -> dict[str, torch.Tensor]:
    """The gradients of a transformers model under the names of the published checkpoint."""
    gradients = type(reference)(reference.config)
    with torch.no_grad():
        for ours, theirs in zip(gradients.parameters(), reference.parameters(), strict=True):
            ours.copy_(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
    gradients.save_pretrained(tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_tree_equals_transformers_run_trajectory_by_trajectory(pair, tmp_path):
    reference, folder, ours = pair
    rng = np.random.default_rng(7)
    shared, branch = rng.integers(0, 64, 70), rng.integers(0, 64, 40)
    trajectories = [
        np.concatenate([shared, branch, rng.integers(0, 64, 9)]),
        np.concatenate([shared, branch[:5], rng.integers(0, 64, 66)]),
        np.concatenate([shared, branch]),
        np.concatenate([shared, branch]),
        np.concatenate([shared[:3], rng.integers(0, 64, 30)]),
        rng.integers(0, 64, 1),
    ]
    expected = expanded_logprobs(reference, trajectories)
    _, output = run_ours(ours, trajectories)
    actual = output.logprob[: len(expected)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    cotangent = torch.linspace(-1, 1, len(expected))
    for model, logprob in ((reference, expected), (ours, actual)):
        model.zero_grad()
        (logprob * cotangent).sum().backward()
    theirs = published_gradients(reference, folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    adapter = ADAPTER[config["model_type"]](ours.config, str(folder))
    mine = adapter.to_hf({name: x.grad for name, x in ours.named_parameters()})
    assert set(theirs) - set(mine) == {x for x in theirs if "bias" in x and "dt_bias" not in x}
    worst = max(
        ((gradient - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-6)).item()
        for name, gradient in mine.items()
    )
    assert worst < 2e-5


def test_transformers_runs_what_we_save(pair, tmp_path):
    reference, folder, _ = pair
    config = json.loads((folder / "config.json").read_text())
    with torch.no_grad():
        changed = make_ours(folder)
        for parameter in changed.parameters():
            parameter.mul_(1.01)
        adapter = ADAPTER[config["model_type"]]
        save_hf_checkpoint(changed, tmp_path, adapter, source=folder, shard_bytes=100_000)
        # The configuration comes from our numbers, not from the source.
        (tmp_path / "config.json").write_text(json.dumps(hf_config(decoder_numbers(config))))
        again = type(reference).from_pretrained(tmp_path, attn_implementation="eager").eval()
        tokens = np.random.default_rng(0).integers(0, 64, 100)
        expected = again(torch.from_numpy(tokens)[None]).logits[0]
        actual = logits_of(changed, tokens)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert set(json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]) == set(
        json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    )
    assert (actual - expected).abs().max() / expected.abs().max() < 1e-5


SMALL = DecoderNumbers(
    vocab_size=16,
    dim=8,
    num_layers=2,
    full_attention=(1,),
    num_heads=2,
    head_dim=4,
    latent_dim=8,
    nope_dim=4,
    rope_dim=4,
    value_dim=4,
    rope_theta=1e4,
    head_gate=True,
    dense_layers=1,
    dense_hidden_dim=8,
    num_experts=4,
    top_k=2,
    expert_hidden_dim=8,
    shared_hidden_dim=8,
    norm_eps=1e-6,
)


def make_small(tmp_path):
    """A saved checkpoint of one file, its tensors, and its model."""
    torch.manual_seed(0)
    model = HartsModel(decoder_config(SMALL))
    with torch.no_grad():
        model.init_states()
    folder = tmp_path / "source"
    save_hf_checkpoint(model, folder, LingStateDictAdapter)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for stale in folder.iterdir():
        stale.unlink()
    save_file(tensors, folder / "model.safetensors")
    return model, folder, tensors


def resave(folder, tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


def test_load_fills_every_tensor_in_place(tmp_path):
    model, folder, _ = make_small(tmp_path)
    other = HartsModel(model.config)
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            tensor.fill_(-7)
    pointers = {name: x.data_ptr() for name, x in other.named_parameters()}
    load_hf_checkpoint(other, folder, LingStateDictAdapter)
    assert pointers == {name: x.data_ptr() for name, x in other.named_parameters()}
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=0, atol=0)


def load_and_save_sharded(rank, config, folder, target, store, result):
    """One of two processes: shard, load, save; rank 0 writes the gathered parameters."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = HartsModel(config)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_hf_checkpoint(model, folder, LingStateDictAdapter)
    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    save_hf_checkpoint(model, target, LingStateDictAdapter, source=folder, shard_bytes=2_000)
    if rank == 0:
        torch.save(full, result)
    dist.destroy_process_group()


def test_sharded_parameters_load_and_save(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    target, result = tmp_path / "target", tmp_path / "full.pt"
    arguments = (model.config, folder, target, tmp_path / "store", result)
    torch.multiprocessing.spawn(load_and_save_sharded, arguments, nprocs=2)
    for name, tensor in torch.load(result).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=0)
    weight_map = json.loads((target / INDEX_FILE).read_text())["weight_map"]
    assert set(weight_map) == set(tensors)
    for name, file in weight_map.items():
        torch.testing.assert_close(load_file(target / file)[name], tensors[name], rtol=0, atol=0)


def test_names_a_missing_tensor(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    resave(folder, tensors)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.3\.up_proj"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)


def test_names_an_unknown_tensor(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    tensors["model.layers.0.attention.k_norm.weight"] = torch.zeros(3)
    resave(folder, tensors)
    with pytest.raises(ValueError, match=r"model has no model\.layers\.0\.attention\.k_norm"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)


def test_names_a_misshapen_tensor(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    tensors["model.layers.0.attention.b_proj.weight"] = torch.zeros(3, 8)
    resave(folder, tensors)
    with pytest.raises(ValueError, match=r"b_proj\.weight needs \(2, 8\), got \(3, 8\)"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)


def test_names_a_folder_without_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="found neither"):
        LingStateDictAdapter(make_small(tmp_path)[0].config, None).get_hf_storage_reader(
            str(tmp_path)
        )


def test_refuses_a_folder_whose_files_disagree(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, folder / "stale.safetensors")
    with pytest.raises(ValueError, match=r"stale\.safetensors .* holds lm_head\.weight"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)
    (folder / "stale.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(ValueError, match=r"stale\.safetensors: needs whole safetensors"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="needs a weight_map"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)


def test_refuses_to_save_over_or_from_nothing(tmp_path):
    model, folder, _ = make_small(tmp_path)
    with pytest.raises(ValueError, match="without safetensors"):
        save_hf_checkpoint(model, folder, LingStateDictAdapter, source=folder)
    with pytest.raises(ValueError, match="found neither"):
        save_hf_checkpoint(model, tmp_path / "out", LingStateDictAdapter, source=tmp_path)


def test_names_a_tensor_that_the_format_has_no_name_for():
    numbers = dataclasses.replace(model_numbers("debug"), num_kv_heads=1)
    with pytest.raises(ValueError, match=r"no name for attention\.k_norm\.weight"):
        LingStateDictAdapter(decoder_config(numbers), None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_refuses_quantized_tensors(tmp_path, dtype):
    model, folder, tensors = make_small(tmp_path)
    resave(folder, tensors | {"lm_head.weight": tensors["lm_head.weight"].to(dtype)})
    with pytest.raises(ValueError, match=r"got others: lm_head\.weight"):
        load_hf_checkpoint(model, folder, LingStateDictAdapter)


def test_refuses_quantized_checkpoints(tmp_path):
    model, folder, _ = make_small(tmp_path)
    with pytest.raises(ValueError, match="quantized"):
        LingStateDictAdapter(model.config, str(folder)).get_hf_storage_reader(str(folder), True)


def test_carries_the_multi_token_prediction_layer_unchanged(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    extra = {
        "model.layers.2.eh_proj.weight": torch.randn(8, 16),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(8, 8),
    }
    resave(folder, tensors | extra)
    load_hf_checkpoint(model, folder, LingStateDictAdapter)
    target = tmp_path / "target"
    save_hf_checkpoint(model, target, LingStateDictAdapter, source=folder, shard_bytes=2_000)
    weight_map = json.loads((target / INDEX_FILE).read_text())["weight_map"]
    for name, tensor in (tensors | extra).items():
        saved = load_file(target / weight_map[name])[name]
        torch.testing.assert_close(saved, tensor, rtol=0, atol=0)


def test_keeps_the_names_of_the_source(tmp_path):
    model, folder, tensors = make_small(tmp_path)
    renamed = {
        name.replace(".attention.", ".self_attn.").replace("word_embeddings", "embed_tokens"): x
        for name, x in tensors.items()
    }
    resave(folder, renamed)
    load_hf_checkpoint(model, folder, LingStateDictAdapter)
    adapter = LingStateDictAdapter(model.config, str(folder))
    assert set(adapter.to_hf(model.state_dict())) == set(renamed)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "dense layers must come first"),
        ({"layer_types": None}, "layer_group_size"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"score_function": "softmax"}, "score_function needs 'sigmoid', got 'softmax'"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"expert_swiglu_limit_list": [4.0]}, "expert_swiglu_limit_list needs 2 limits"),
    ],
)
def test_config_json_names_what_is_wrong(tmp_path, change, message):
    config = hf_config(SMALL)
    assert decoder_numbers(config) == SMALL
    with pytest.raises(ValueError, match=message):
        decoder_numbers(config | change)


def test_config_json_clamps_of_ling3_flash():
    flash = model_numbers("ling3_flash")
    config = hf_config(dataclasses.replace(flash, expert_limits=(), shared_limits=()))
    config["expert_swiglu_limit_list"] = [0] * 35 + [4] * 7 + [9]  # the last is the MTP layer's
    config["share_expert_swiglu_limit_list"] = [0] * 34 + [5] * 6 + [7] * 2
    assert decoder_numbers(config) == flash


def test_a_run_starts_from_and_ends_in_a_hugging_face_checkpoint(tmp_path):
    model = HartsModel(model_registry("debug").model)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    source, out = tmp_path / "source", tmp_path / "out"
    save_hf_checkpoint(model, source, LingStateDictAdapter, shard_bytes=2_000_000)
    flags = ("enable", "initial_load_in_hf", "last_save_model_only", "last_save_in_hf")
    command = [sys.executable, "-m", "harts_titan.train", "--config", "harts_debug"]
    command += ["--training.steps", "1", "--hf_assets_path", str(source), "--dump_folder", str(out)]
    command += [f"--checkpoint.{flag}" for flag in flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    saved, loaded = (
        {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
        for folder in (out / "checkpoint" / "step-1", source)
    )
    assert saved.keys() == loaded.keys()
    moved = max((saved[name] - loaded[name]).abs().max().item() for name in saved)
    assert 0 < moved < 2e-3  # one step of AdamW with its warm-up, from the loaded weights
