"""HartsModel: a hybrid-attention decoder that runs once per compact row (paper section 3)."""

# Shape letters: R own rows, C complete rows, D model dimension, V vocabulary, T targets,
# M rows with a target, E experts, L layers with a mixture of experts.

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module, ModuleDict

from harts_ops import compact_logprob
from harts_titan.attention import (
    GroupedQueryAttention,
    KeyValueInterface,
    LatentAttention,
    MLAInterface,
)
from harts_titan.batch import BlockPlan, MicrobatchInput, take_rows
from harts_titan.kda import DeltaAttention, KDAInterface
from harts_titan.moe import FeedForward, LayerStatistics, MoE, MoEInterface


class LayerInterface(NamedTuple):
    """What one layer of a producer leaves for its consumers."""

    attention: KDAInterface | MLAInterface | KeyValueInterface
    moe: MoEInterface | tuple[()]  # empty in a layer without experts


class ModelInterface(NamedTuple):
    """What a producer leaves for its consumers."""

    layers: tuple[LayerInterface, ...]
    hidden: Tensor  # [rows, D], final hidden states after the last norm


class ModelStatistics(NamedTuple):
    """Statistics of the microbatch's mixtures of experts; the first two are differentiable."""

    z_sum: Tensor  # sums over layers
    balance_sum: Tensor
    counts: Tensor  # int64[L, E]
    prob_sum: Tensor  # [L, E]


class ModelOutput(NamedTuple):
    """Result of a microbatch; a producer has no log-probabilities and no statistics."""

    hidden: Tensor  # [R, D]
    logprob: Tensor | None  # [T] nats, in the order of the input's labels
    entropy: Tensor | None  # [T] nats, of the distributions the targets are drawn from
    statistics: ModelStatistics | None  # None without a mixture of experts
    interface: ModelInterface | None  # of a producer


class HartsBlock(Module):
    """Decoder block; plain rows, a producer's and a consumer's take the same path.

    Only a producer's leaves an interface: its gradient would cost plain rows a pass over each part.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """One of the attention kinds, and a dense or a routed feed-forward layer."""

        attention: DeltaAttention.Config | LatentAttention.Config | GroupedQueryAttention.Config
        attention_norm: RMSNorm.Config
        ffn_norm: RMSNorm.Config
        feed_forward: FeedForward.Config | None = None
        moe: MoE.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        if (config.feed_forward is None) == (config.moe is None):
            raise ValueError("a block needs either feed_forward or moe")
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.ffn_norm = config.ffn_norm.build()
        self.feed_forward = None if config.feed_forward is None else config.feed_forward.build()
        self.moe = None if config.moe is None else config.moe.build()

    def empty_interface(self, dtype: torch.dtype, device: torch.device) -> LayerInterface:
        """Return the interface of rows without a producer."""
        moe = () if self.moe is None else self.moe.empty_interface(dtype, device)
        return LayerInterface(self.attention.empty_interface(dtype, device), moe)

    def forward(
        self, hidden_RD: Tensor, plan: BlockPlan, interface: LayerInterface, *, producer: bool
    ) -> tuple[Tensor, LayerInterface | LayerStatistics | None]:
        """Return the hidden states and, of a producer, what consumers need of them.

        Otherwise the second result is the statistics of the layer's experts, if it has any.
        """
        attended, attention = self.attention(
            self.attention_norm(hidden_RD), plan, interface.attention, producer=producer
        )
        hidden_RD = hidden_RD + attended
        normed = self.ffn_norm(hidden_RD)
        if self.moe is None:
            assert self.feed_forward is not None
            hidden_RD = hidden_RD + self.feed_forward(normed)
            return hidden_RD, LayerInterface(attention, ()) if producer else None
        routed, result = self.moe(normed, plan, interface.moe, producer=producer)
        return hidden_RD + routed, LayerInterface(attention, result) if producer else result


class LogprobHead(Linear):
    """Language-model head that returns log-probabilities of labels, never logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """What is done to the logits."""

        temperature: float = 1.0
        softcap: float | None = None
        """Replace logits z by softcap * tanh(z / softcap)."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.temperature = config.temperature
        self.softcap = config.softcap

    def forward(  # type: ignore[override]
        self, hidden_MD: Tensor, row_T: Tensor, label_T: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each label, and the entropy it was drawn with."""
        result = compact_logprob(
            hidden_MD,
            self.weight,
            row_T,
            label_T,
            temperature=self.temperature,
            softcap=self.softcap,
            return_entropy=entropy,
        )
        if isinstance(result, Tensor):
            return result, None
        logprob_T, entropy_M = result
        return logprob_T, entropy_M.index_select(0, row_T)


class HartsModel(BaseModel):
    """Decoder for one microbatch or producer at a time."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The parts; ``harts_titan.decoder_config`` makes one from a model's numbers."""

        tok_embeddings: Embedding.Config
        layers: list[HartsBlock.Config]
        norm: RMSNorm.Config
        lm_head: LogprobHead.Config

        def update_from_config(self, *, config, **kwargs) -> None:
            """Apply a run's configuration; nothing depends on it on a single device."""

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            """Return the parameters, and the forward and backward FLOPs of a row.

            Attention counts ``seq_len`` keys a row; what sharing saves is the trainer's to count.
            """
            total = sum(parameter.numel() for parameter in model.parameters())
            flops = 6 * (self.num_active_parameters(model) - self._num_embedding())
            for layer in self.layers:
                attention = layer.attention
                if isinstance(attention, LatentAttention.Config):
                    dim = attention.nope_dim + attention.rope_dim + attention.value_dim
                    flops += 6 * attention.num_heads * dim * seq_len
                elif isinstance(attention, GroupedQueryAttention.Config):
                    flops += 12 * attention.num_heads * attention.head_dim * seq_len
            return total, flops

        def num_active_parameters(self, model: Module) -> int:
            """Return the parameters that one row uses."""
            active = sum(parameter.numel() for parameter in model.parameters())
            for layer in self.layers:
                if layer.moe is not None:
                    experts, used = layer.moe.experts, layer.moe.router.top_k
                    unused = experts.num_experts - used
                    active -= unused * 3 * experts.dim * experts.hidden_dim
            return active

        def _num_embedding(self) -> int:
            return self.tok_embeddings.num_embeddings * self.tok_embeddings.embedding_dim

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = config.tok_embeddings.build()
        self.layers = ModuleDict(
            {str(index): layer.build() for index, layer in enumerate(config.layers)}
        )
        self.norm = config.norm.build()
        self.lm_head = config.lm_head.build()

    def moe_layers(self) -> list[MoE]:
        """Return the mixtures of experts of this model part, in layer order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def record_expert_counts(self, counts_LE: Tensor) -> None:
        """Add a microbatch's counts to those of the step."""
        for moe, counts_E in zip(self.moe_layers(), counts_LE, strict=True):
            moe.expert_counts.add_(counts_E)

    def set_balance_counts(self, counts_LE: Tensor) -> None:
        """Set the counts of the whole step, which balance_scope "global" reads."""
        for moe, counts_E in zip(self.moe_layers(), counts_LE, strict=True):
            moe.balance_counts.copy_(counts_E)

    def empty_interface(
        self, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> ModelInterface:
        """Return the interface of rows without a producer.

        Args:
            dtype: Compute dtype; the parameters' by default.
            device: The parameters' by default.
        """
        weight = next(self.parameters())
        dtype = weight.dtype if dtype is None else dtype
        device = weight.device if device is None else device
        blocks = (cast(HartsBlock, layer) for layer in self.layers.values())
        layers = tuple(block.empty_interface(dtype, device) for block in blocks)
        dim = self.config.tok_embeddings.embedding_dim
        return ModelInterface(layers, torch.zeros(2, dim, dtype=dtype, device=device))

    def forward(
        self,
        hidden: Tensor,
        inputs: MicrobatchInput,
        interface: ModelInterface,
        *,
        producer: bool = False,
        entropy: bool = False,
    ) -> ModelOutput:
        """Run one microbatch.

        Args:
            hidden: ``inputs.token``, or hidden states ``[R, D]`` in a later pipeline stage.
            inputs: The microbatch's or producer's plan and labels.
            interface: What its producer left; ``empty_interface()`` without a producer.
            producer: Keep every layer's interface; no head and no statistics.
            entropy: Whether to return entropies.
        """
        if self.tok_embeddings is not None:
            hidden = self.tok_embeddings(hidden)
        produced: list[LayerInterface] = []
        statistics: list[LayerStatistics] = []
        for layer, layer_interface in zip(self.layers.values(), interface.layers, strict=True):
            hidden, result = layer(hidden, inputs.plan, layer_interface, producer=producer)
            if producer:
                produced.append(result)
            elif result is not None:
                statistics.append(result)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if producer:
            kept = ModelInterface(tuple(produced), hidden)
            return ModelOutput(hidden, None, None, None, kept)
        logprob, entropies = None, None
        if self.lm_head is not None:
            rows = _target_rows(hidden, interface.hidden, inputs)
            logprob, entropies = self.lm_head(
                rows, inputs.target_row, inputs.label, entropy=entropy
            )
        return ModelOutput(hidden, logprob, entropies, _add_up(statistics), None)


def _target_rows(own: Tensor, cached: Tensor, inputs: MicrobatchInput) -> Tensor:
    """Return the final hidden states ``[M, D]`` of the rows that have a target."""
    cached_rows = take_rows(cached, inputs.plan.cached_producer_row).to(own.dtype)
    return take_rows(torch.cat([own, cached_rows]), inputs.target_source)


def _add_up(layers: list[LayerStatistics]) -> ModelStatistics | None:
    """Add up the layers' statistics, outside every recomputed region."""
    if not layers:
        return None
    z_sums, balance_sums, counts, prob_sums = zip(*layers, strict=True)
    return ModelStatistics(
        torch.stack(z_sums).sum(),
        torch.stack(balance_sums).sum(),
        torch.stack(counts),
        torch.stack(prob_sums),
    )
