"""The trajectory-expanded model and losses: what every result of a tree must equal.

Plain PyTorch, token by token where that is the definition, from the state dict and the numbers
of a ``HartsModel``. It shares no code with the product.
"""

# Shape letters: N trajectories, L their padded length, D model dimension, H heads, J key-value
# heads, K and V key and value head dimensions, E experts, k experts of a token, S positions.

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from harts_titan import DecoderNumbers


@dataclass(frozen=True)
class Routing:
    """One layer's routing of every trajectory."""

    logits: list[Tensor]  # per trajectory [length, E]
    index: list[Tensor]  # per trajectory [length, k]


@dataclass(frozen=True)
class Expanded:
    """What the model says about each trajectory on its own."""

    hidden: list[Tensor]  # per trajectory [length, D], after the last norm
    logprob: list[Tensor]  # per trajectory [length - 1], entry i of token i + 1
    entropy: list[Tensor]  # per trajectory [length], of the distribution after each token
    routing: list[Routing]  # per layer with experts
    margin: float  # smallest distance of a routing decision from a tie


@dataclass
class Oracle:
    """The model, as functions of a state dict."""

    numbers: DecoderNumbers
    state: dict[str, Tensor]
    lengths: list[int] = field(default_factory=list)
    routing: list[Routing] = field(default_factory=list)
    margin: float = math.inf

    def linear(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" in self.state:
            return x @ self.state[f"{name}.weight"].T
        return self.linear(self.linear(x, f"{name}.down_proj"), f"{name}.up_proj")

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.state[f"{name}.weight"]

    def expand(self, trajectories: Sequence[np.ndarray]) -> Expanded:
        """Run the model on every trajectory, padded to one length; causality keeps them apart."""
        n = self.numbers
        self.lengths = [len(tokens) for tokens in trajectories]
        tokens_NL = torch.zeros(len(trajectories), max(self.lengths), dtype=torch.int64)
        for index, tokens in enumerate(trajectories):
            tokens_NL[index, : len(tokens)] = torch.as_tensor(np.asarray(tokens, np.int64))
        x = self.state["tok_embeddings.weight"][tokens_NL]
        for layer in range(n.num_layers):
            name = f"layers.{layer}"
            normed = self.rms_norm(x, f"{name}.attention_norm", n.norm_eps)
            x = x + self.attention(normed, layer, f"{name}.attention")
            normed = self.rms_norm(x, f"{name}.ffn_norm", n.norm_eps)
            if layer < n.dense_layers or not n.num_experts:
                x = x + self.feed_forward(normed, f"{name}.feed_forward", None)
            else:
                x = x + self.moe(normed, layer, f"{name}.moe")
        x = self.rms_norm(x, "norm", n.norm_eps)
        logits = x @ self.state["lm_head.weight"].T
        logp = logits - logits.logsumexp(-1, keepdim=True)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp[:, :-1].gather(-1, tokens_NL[:, 1:, None]).squeeze(-1)
        return Expanded(
            hidden=[x[i, :length] for i, length in enumerate(self.lengths)],
            logprob=[chosen[i, : length - 1] for i, length in enumerate(self.lengths)],
            entropy=[entropy[i, :length] for i, length in enumerate(self.lengths)],
            routing=self.routing,
            margin=self.margin,
        )

    def attention(self, x: Tensor, layer: int, name: str) -> Tensor:
        n = self.numbers
        if layer not in n.full_attention:
            return self.delta_attention(x, name)
        if n.num_kv_heads is None:
            query, key, value = self.latent_heads(x, name)
        else:
            query, key, value = self.grouped_heads(x, name)
        score = torch.einsum("nqhk,nchk->nhqc", query, key) / math.sqrt(query.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, -math.inf).softmax(-1)
        out = torch.einsum("nhqc,nchv->nqhv", weight, value)
        if n.head_gate:
            out = out * self.linear(x, f"{name}.gate_proj").sigmoid()[..., None]
        return self.linear(out.flatten(-2), f"{name}.o_proj")

    def latent_heads(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n = self.numbers
        query = x
        if n.q_rank is not None:
            query = self.rms_norm(self.linear(x, f"{name}.q_down_proj"), f"{name}.q_norm", 1e-6)
        query = self.linear(query, f"{name}.q_proj").unflatten(-1, (n.num_heads, -1))
        latent = self.linear(x, f"{name}.kv_down_proj")
        k_rope = latent[..., None, n.latent_dim :]
        latent = self.rms_norm(latent[..., : n.latent_dim], f"{name}.kv_norm", 1e-6)
        up = self.linear(latent, f"{name}.kv_up_proj").unflatten(-1, (n.num_heads, -1))
        if n.rope_theta is not None:
            k_rope = self.rotate(k_rope, interleaved=True)
            rotated = self.rotate(query[..., n.nope_dim :], interleaved=True)
            query = torch.cat([query[..., : n.nope_dim], rotated], -1)
        k_rope = k_rope.expand(-1, -1, n.num_heads, -1)
        return query, torch.cat([up[..., : n.nope_dim], k_rope], -1), up[..., n.nope_dim :]

    def grouped_heads(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n = self.numbers
        query, key, value = (
            self.linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, n.head_dim)) for part in "qkv"
        )
        query = self.rms_norm(query, f"{name}.q_norm", n.norm_eps)
        key = self.rms_norm(key, f"{name}.k_norm", n.norm_eps)
        if n.rope_theta is not None:
            query = self.rotate(query, interleaved=False)
            key = self.rotate(key, interleaved=False)
        repeat = query.shape[2] // key.shape[2]
        return query, key.repeat_interleave(repeat, 2), value.repeat_interleave(repeat, 2)

    def rotate(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate pairs of dimensions by position times frequency, as complex numbers."""
        n = self.numbers
        dim = n.rope_dim or n.head_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        frequency = (1.0 / n.rope_theta**exponent).float().double()
        angle = torch.arange(x.shape[1]).double()[:, None] * frequency
        turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
        rotary, rest = x[..., :dim], x[..., dim:]
        if interleaved:
            turned = torch.view_as_complex(rotary.unflatten(-1, (-1, 2)).contiguous()) * turn
            return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)
        turned = torch.complex(rotary[..., : dim // 2], rotary[..., dim // 2 :]) * turn
        return torch.cat([turned.real, turned.imag, rest], -1)

    def delta_attention(self, x: Tensor, name: str) -> Tensor:
        n = self.numbers
        query, key, value = (
            self.convolve(
                self.linear(x, f"{name}.{part[0]}_proj"), self.state[f"{name}.short_conv.{part}"]
            ).unflatten(-1, (n.num_heads, -1))
            for part in ("query", "key", "value")
        )
        query, key = (
            part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key)
        )
        gate = self.linear(x, f"{name}.decay_proj") + self.state[f"{name}.decay.dt_bias"]
        gate = gate.unflatten(-1, (n.num_heads, -1))
        rate = self.state[f"{name}.decay.A_log"].exp()[:, None]
        if n.gate_form == "lower_bound":
            decay = (n.lower_bound * (rate * gate).sigmoid()).exp()
        else:
            decay = (-rate * torch.nn.functional.softplus(gate)).exp()
        beta = self.linear(x, f"{name}.beta_proj").sigmoid()
        state = x.new_zeros(x.shape[0], n.num_heads, n.head_dim, n.head_dim)
        outputs = []
        for i in range(x.shape[1]):
            state = state * decay[:, i, ..., None]
            error = value[:, i] - torch.einsum("nhkv,nhk->nhv", state, key[:, i])
            change = torch.einsum("nhk,nhv->nhkv", key[:, i], error)
            state = state + beta[:, i, :, None, None] * change
            outputs.append(torch.einsum("nhkv,nhk->nhv", state, query[:, i]))
        out = torch.stack(outputs, 1) * n.head_dim**-0.5
        out = self.rms_norm(out, f"{name}.norm", n.norm_eps)
        gate = self.linear(x, f"{name}.gate_proj").unflatten(-1, (n.num_heads, -1))
        return self.linear((out * gate.sigmoid()).flatten(-2), f"{name}.o_proj")

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Causal depthwise convolution with zeros before the start, then SiLU."""
        width = weight.shape[1]
        out = torch.zeros_like(x)
        for tap in range(width):
            back = width - 1 - tap
            shifted = torch.cat([torch.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]], 1)
            out = out + shifted[:, : x.shape[1]] * weight[:, tap]
        return out * out.sigmoid()

    def feed_forward(self, x: Tensor, name: str, limit: float | None) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(_swiglu(gate, up, limit), f"{name}.down_proj")

    def moe(self, x_NLD: Tensor, layer: int, name: str) -> Tensor:
        """Route and run the experts of each token, one expert at a time."""
        n = self.numbers
        logits = self.linear(x_NLD, f"{name}.router.gate")
        score = logits.sigmoid()
        index = self.select(score.detach() + self.state[f"{name}.expert_bias"])
        weight = score.gather(-1, index)
        weight = n.routed_scaling * weight / (weight.sum(-1, keepdim=True) + 1e-20)
        limit = _limit(n.expert_limits, layer)
        out = torch.zeros_like(x_NLD)
        for expert in range(n.num_experts):
            gate, up = self.state[f"{name}.experts.gate_up_proj"][expert]
            down = self.state[f"{name}.experts.down_proj"][expert]
            share = (weight * (index == expert)).sum(-1, keepdim=True)
            out = out + share * (_swiglu(x_NLD @ gate.T, x_NLD @ up.T, limit) @ down.T)
        self.routing.append(
            Routing(
                [logits[i, :length] for i, length in enumerate(self.lengths)],
                [index[i, :length] for i, length in enumerate(self.lengths)],
            )
        )
        if n.shared_hidden_dim:
            limit = _limit(n.shared_limits, layer)
            out = out + self.feed_forward(x_NLD, f"{name}.shared_experts", limit)
        return out

    def select(self, choice: Tensor) -> Tensor:
        """Return the chosen experts of each token; keeps the smallest margin of a decision."""
        n = self.numbers
        if n.num_groups > 1:
            grouped = choice.unflatten(-1, (n.num_groups, -1))
            group = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
            kept = self._best(group, n.top_groups)
            allowed = torch.zeros_like(group).scatter(-1, kept, 1.0).bool()
            choice = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
        return self._best(choice, n.top_k)

    def _best(self, value: Tensor, count: int) -> Tensor:
        ordered, index = value.sort(dim=-1, descending=True, stable=True)
        if count < value.shape[-1]:
            gap = ordered[..., count - 1] - ordered[..., count]
            margin = min(gap[i, :length].min().item() for i, length in enumerate(self.lengths))
            self.margin = min(self.margin, margin)
        return index[..., :count]


def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    activation = gate * gate.sigmoid()
    if limit is not None:
        return activation.clamp(max=limit) * up.clamp(-limit, limit)
    return activation * up


def _limit(limits: Sequence[tuple[int, int, float]], layer: int) -> float | None:
    found = [limit for first, last, limit in limits if first <= layer <= last]
    return found[0] if found else None


def expand(
    numbers: DecoderNumbers, state: dict[str, Tensor], trajectories: Sequence[np.ndarray]
) -> Expanded:
    """Run the model of ``state`` on every trajectory on its own."""
    return Oracle(numbers, state).expand(trajectories)


def expert_counts(routing: Routing, num_experts: int) -> Tensor:
    """Return how many positions chose each expert, int64[E]."""
    return torch.bincount(torch.cat(routing.index).flatten(), minlength=num_experts)


def z_sum(routing: Routing) -> Tensor:
    """Return the sum over positions of the squared log-sum-exp of the router's logits."""
    return torch.stack([logits.logsumexp(-1).square().sum() for logits in routing.logits]).sum()


def _probabilities(logits: Tensor) -> Tensor:
    score = logits.sigmoid()
    return score / score.sum(-1, keepdim=True)


def balance_sum(routing: Routing, scope: str, step_counts: Tensor) -> Tensor:
    """Return the balance loss before the division of ``weighted_moe_aux``'s caller.

    Args:
        routing: One layer, the trajectories of one microbatch.
        scope: trajectory, microbatch or global.
        step_counts: Expert counts of the whole step, for the scope global.
    """
    num_experts = len(step_counts)
    top_k = routing.index[0].shape[-1]
    total = sum(len(logits) for logits in routing.logits)
    if scope == "trajectory":
        terms = []
        for logits, index in zip(routing.logits, routing.index, strict=True):
            counts = torch.bincount(index.flatten(), minlength=num_experts)
            loss = (counts * _probabilities(logits).sum(0)).sum()
            terms.append(num_experts / (top_k * len(logits) ** 2) * loss)
        return torch.stack(terms).sum()
    prob_sum = torch.cat([_probabilities(logits) for logits in routing.logits]).sum(0)
    if scope == "microbatch":
        counts = expert_counts(routing, num_experts)
        return num_experts / (top_k * total) * (counts * prob_sum).sum()
    return num_experts / top_k * (step_counts * prob_sum).sum()


@dataclass(frozen=True)
class Targets:
    """What a plain objective reads: one entry per trajectory, each over its targets."""

    logprob: list[Tensor]
    entropy: list[Tensor]
    behaviour: list[Tensor]
    reference: list[Tensor]
    advantage: list[float]

    def mean(self, losses: list[Tensor], normalisation: str, length: int = 1) -> Tensor:
        """Average per-target losses over a batch that is these trajectories."""
        counts = [len(loss) for loss in losses]
        sequences = sum(count > 0 for count in counts)
        weights = {
            "token_mean": [1 / sum(counts)] * len(counts),
            "sequence_mean": [1 / (sequences * max(1, count)) for count in counts],
            "fixed": [1 / (sequences * length)] * len(counts),
        }[normalisation]
        return torch.stack([w * x.sum() for w, x in zip(weights, losses, strict=True)]).sum()


def supervised_loss(targets: Targets) -> Tensor:
    """Minus the mean log-probability of a target."""
    return targets.mean([-logprob for logprob in targets.logprob], "token_mean")


def clipped_loss(
    targets: Targets,
    *,
    low: float,
    high: float,
    normalisation: str = "token_mean",
    length: int = 1,
    kl: float = 0.0,
    entropy: float = 0.0,
) -> Tensor:
    """PPO's clipped loss, k3 KL to the reference and entropy bonus."""
    losses = []
    for x, advantage in enumerate(targets.advantage):
        ratio = (targets.logprob[x] - targets.behaviour[x]).exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        gap = targets.reference[x] - targets.logprob[x]
        losses.append(loss + kl * (gap.exp() - gap - 1) - entropy * targets.entropy[x])
    return targets.mean(losses, normalisation, length)


def sequence_loss(targets: Targets, *, low: float, high: float) -> Tensor:
    """GSPO: one clipped ratio per trajectory, the geometric mean of its tokens' ratios."""
    losses = []
    for x, advantage in enumerate(targets.advantage):
        if len(targets.logprob[x]):
            ratio = (targets.logprob[x] - targets.behaviour[x]).mean().exp()
            clipped = ratio.clamp(1 - low, 1 + high)
            losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean()


def weighted_logprob_loss(targets: Targets, *, low: float, high: float) -> Tensor:
    """CISPO: log-probabilities weighted by the clipped ratio, which is a constant."""
    losses = []
    for x, advantage in enumerate(targets.advantage):
        ratio = (targets.logprob[x] - targets.behaviour[x]).exp().detach()
        losses.append(-ratio.clamp(1 - low, 1 + high) * advantage * targets.logprob[x])
    return targets.mean(losses, "token_mean")


def preference_loss(targets: Targets, pairs: Sequence[tuple[int, int]], beta: float) -> Tensor:
    """DPO over (chosen, rejected) trajectories."""
    losses = []
    for chosen, rejected in pairs:
        margins = [(targets.logprob[x] - targets.reference[x]).sum() for x in (chosen, rejected)]
        losses.append((1 + (-beta * (margins[0] - margins[1])).exp()).log())
    return torch.stack(losses).mean()
