"""The dataloader: rollouts -> StepBatch, one per optimizer step; seeded synthetic trees."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from harts_titan.attention import DEFAULT_BLOCKS
from harts_titan.batch import StepBatch, step_batch
from harts_titan.loss import Couples, TargetMetadata, Totals
from planner import PlannerConfig, make_plan
from planner.rollouts import Rollouts, read_rollouts, renumber_tokens
from planner.stages import stage

# An objective that needs advantages says so itself; fine-tuning works without.
REQUIRED_COLUMNS = ("token_ids", "loss_mask")
Cursor = tuple[int, int]  # (epoch, next trajectory); of synthetic trees (step, 0)


class TokenIds(BaseTokenizer):
    """A tokenizer for rollouts that are token ids already: it only knows the vocabulary's size."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """The model's vocabulary."""

        vocab_size: int
        """Token ids are 0 .. vocab_size - 1."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__()
        self._vocab_size = config.vocab_size

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self._vocab_size

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Refuse: there is no text."""
        raise NotImplementedError("rollouts hold token ids; there is no text to encode")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Refuse: there is no text."""
        raise NotImplementedError("rollouts hold token ids; there is no text to decode")


@dataclass(kw_only=True, slots=True)
class SyntheticTrees:
    """Random rollout trees: prompts, branches that fork at a turn of an earlier branch, turns.

    Every turn is an observation and a generated action, and makes one trajectory: all tokens so
    far, with the action as target. The defaults give about 5,000 compact rows a step.
    """

    seed: int = 0
    """Seed of everything; a step depends on it and on its own number."""
    prompts: int = 2
    """Prompts of a step."""
    branches: int = 8
    """Rollouts of a prompt."""
    turns: int = 8
    """Turns of a rollout, those before its fork included."""
    prompt_length: int = 160
    """Mean tokens of a prompt."""
    turn_length: int = 56
    """Mean tokens of a turn; three in eight are the action."""


def synthetic_rollouts(config: SyntheticTrees, step: int, vocab_size: int) -> Rollouts:
    """Return the rollout trees of one step; equal arguments give equal trees.

    Rewards are random; advantages are GRPO's over the rollouts of a prompt, and behaviour
    log-probabilities are near those of an untrained model.

    Raises:
        ValueError: Settings that make no tree.
    """
    # A turn of fewer tokens has no observation or no action.
    least = {"seed": 0, "prompts": 1, "branches": 1, "turns": 1, "prompt_length": 1}
    for name, value in {**least, "turn_length": 3}.items():
        if getattr(config, name) < value:
            got = getattr(config, name)
            raise ValueError(f"dataloader.synthetic.{name} must be at least {value}, got {got}")
    rng = np.random.default_rng((config.seed, step))
    columns: dict[str, list[Any]] = {
        name: [] for name in ("token_ids", "loss_mask", "advantage", "logprobs", "reward", "group")
    }

    def tokens(mean: int) -> np.ndarray:
        count = rng.integers(max(1, mean // 2), mean + mean // 2 + 1)
        return rng.integers(0, vocab_size, count)

    for group in range(config.prompts):
        prompt = tokens(config.prompt_length)
        reward = rng.random(config.branches).round()
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        histories: list[list[np.ndarray]] = []
        for branch in range(config.branches):
            kept = int(rng.integers(0, config.turns)) if histories else 0
            turns = list(histories[rng.integers(len(histories))][: 2 * kept]) if histories else []
            for _ in range(kept, config.turns):
                turns += [tokens(config.turn_length * 5 // 8), tokens(config.turn_length * 3 // 8)]
                ids = np.concatenate([prompt, *turns])
                mask = np.arange(len(ids)) >= len(ids) - len(turns[-1])
                noise = 0.1 * rng.standard_normal(len(ids))
                values = (
                    ids,
                    mask,
                    np.full(len(ids), advantage[branch]),
                    np.where(mask, noise - np.log(vocab_size), 0.0),
                    reward[branch],
                    group,
                )
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
            histories.append(turns)
    return Rollouts(
        source=f"synthetic trees, step {step}",
        token_ids=tuple(columns["token_ids"]),
        loss_mask=tuple(columns["loss_mask"]),
        advantage=tuple(columns["advantage"]),
        logprobs=tuple(columns["logprobs"]),
        reward=np.array(columns["reward"]),
        group=np.array(columns["group"]),
    )


def dense_vocabulary(rollouts: Rollouts, vocab_size: int) -> Rollouts:
    """Renumber token ids by their rank among the ids present: every fork stays where it is.

    Raises:
        ValueError: There are more ids than the model has.
    """
    renumbered, num_ids = renumber_tokens(rollouts)
    if num_ids > vocab_size:
        raise ValueError(
            f"{rollouts.source}, token_ids: has {num_ids} different ids, "
            f"the model's vocabulary {vocab_size}"
        )
    logger.warning(f"{rollouts.source}: renumbered {num_ids} token ids densely (debugging only)")
    return renumbered


def check_rollouts(rollouts: Rollouts, *, vocab_size: int, limits: dict[str, int]) -> None:
    """Check what depends on the model and the run.

    Args:
        rollouts: What was read.
        vocab_size: Token ids of the model.
        limits: Settings that bound the tokens of a trajectory, by name.
    Raises:
        ValueError: A token id outside the vocabulary, or a trajectory beyond a limit; names file,
            row and field.
    """
    setting = min(limits, key=lambda name: limits[name])
    for row, tokens in zip(rollouts.row, rollouts.token_ids, strict=True):
        where = f"{rollouts.source}, row {row}, token_ids"
        if len(tokens) > limits[setting]:
            raise ValueError(
                f"{where}: has {len(tokens)} tokens, {setting} allows {limits[setting]}"
            )
        if tokens.max() >= vocab_size or tokens.min() < 0:
            wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
            raise ValueError(
                f"{where}: holds id {wrong}, the model's vocabulary is 0..{vocab_size - 1}; "
                "to debug a small model, set dataloader.vocabulary=dense"
            )


def preference_pairs(rollouts: Rollouts) -> np.ndarray | None:
    """Return the pairs of a step ``int64[P, 2]`` as (chosen, rejected), by reward.

    Without rewards the mean advantage decides.

    Raises:
        ValueError: A pair does not have exactly two trajectories, or they tie.
    """
    if rollouts.pair is None:
        return None
    score = rollouts.reward
    if score is None:
        if rollouts.advantage is None:
            raise ValueError(f"{rollouts.source}: pairs need the column reward or advantage")
        score = np.array([values.mean() for values in rollouts.advantage])
    pairs = []
    for pair in np.unique(rollouts.pair[rollouts.pair >= 0]):
        members = np.flatnonzero(rollouts.pair == pair)
        rows = rollouts.row[members].tolist()
        where = f"{rollouts.source}, rows {rows}: pair {pair}"
        if len(members) != 2:
            raise ValueError(f"{where} needs two trajectories in a step, got {len(members)}")
        if score[members[0]] == score[members[1]]:
            raise ValueError(f"{where} needs two different rewards, got {score[members[0]]} twice")
        pairs.append(members[np.argsort(-score[members])])
    return np.array(pairs, np.int64).reshape(-1, 2)


def coupling_keys(rollouts: Rollouts, couples: Couples) -> np.ndarray | None:
    """Return a key per trajectory ``int64[N]``, equal for coupled ones and -1 for free ones."""
    if couples == "none":
        return None
    return rollouts.pair if couples == "pair" else rollouts.group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTargets:
    """The targets of a whole step, from which each consumer takes its own."""

    rollouts: Rollouts
    positions: tuple[np.ndarray, ...]  # per trajectory, the tokens that carry loss
    pairs: np.ndarray | None  # int64[P, 2] trajectories
    totals: Totals

    @classmethod
    def of(cls, rollouts: Rollouts, *, paired: bool = True) -> "StepTargets":
        """Count the targets of a step.

        Args:
            rollouts: The step's trajectories.
            paired: Whether its objective reads pairs; otherwise the column is not looked at.
        """
        positions = tuple(np.flatnonzero(mask) for mask in rollouts.loss_mask)
        pairs = preference_pairs(rollouts) if paired else None
        counts = [len(position) for position in positions]
        totals = Totals(
            targets=sum(counts),
            trajectories=sum(count > 0 for count in counts),
            pairs=0 if pairs is None else len(pairs),
        )
        return cls(rollouts=rollouts, positions=positions, pairs=pairs, totals=totals)

    def metadata(self, trajectories: np.ndarray) -> TargetMetadata:
        """Return the metadata of some trajectories' targets, in that order.

        Args:
            trajectories: Indices ``int64[N]`` of the step's trajectories.
        """
        positions = [self.positions[index] for index in trajectories]
        count = np.array([len(position) for position in positions], np.int64)

        def per_target(values: Sequence[np.ndarray] | None) -> Tensor | None:
            if values is None:
                return None
            picked = [values[i][p] for i, p in zip(trajectories, positions, strict=True)]
            return torch.from_numpy(np.concatenate(picked).astype(np.float64))

        def per_trajectory(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values[trajectories])

        rollouts = self.rollouts
        return TargetMetadata(
            trajectory=torch.from_numpy(np.repeat(np.arange(len(count)), count)),
            target_count=torch.from_numpy(count),
            totals=self.totals,
            advantage=per_target(rollouts.advantage),
            behaviour_logprob=per_target(rollouts.logprobs),
            reference_logprob=per_target(rollouts.ref_logprobs),
            weight=per_trajectory(rollouts.weight),
            reward=per_trajectory(rollouts.reward),
            group=per_trajectory(rollouts.group),
            pairs=self._pairs_within(trajectories),
        )

    def places(self, trajectories: np.ndarray) -> Tensor:
        """Return where some trajectories' targets stand among all of the step, ``int64[T]``."""
        first = np.cumsum([0, *(len(position) for position in self.positions)])
        ranges = [np.arange(first[i], first[i + 1]) for i in trajectories]
        return torch.from_numpy(np.concatenate(ranges))

    def _pairs_within(self, trajectories: np.ndarray) -> Tensor | None:
        if self.pairs is None:
            return None
        local = np.full(len(self.positions), -1)
        local[trajectories] = np.arange(len(trajectories))
        pairs = local[self.pairs]
        return torch.from_numpy(pairs[(pairs >= 0).all(axis=1)])


class RolloutDataLoader(BaseDataLoader):
    """Plans one optimizer step after another over all replicas, and yields this replica's part."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Where rollouts come from and how steps are made of them."""

        dataset: str = ""
        """Not used: name a file with dataset_path."""
        dataset_path: str | None = None
        """Rollout file (.jsonl, .parquet, .npz); without it, steps are synthetic trees."""
        planner: PlannerConfig = field(default_factory=PlannerConfig)
        """What to plan for; its dp is set to the run's replicas."""
        trajectories_per_step: int = 0
        """Trajectories of a step in file order; 0 takes the whole file."""
        limit: int = 0
        """Use only the first trajectories of the file; 0 uses all."""
        epochs: int = 1
        """How often the file is read."""
        vocabulary: Literal["exact", "dense"] = "exact"
        """dense renumbers token ids, so that a small debug model can train on any file."""
        couples: Couples = "none"
        """Trajectories that the planner keeps together where they fit; the trainer sets this to
        what its objective couples."""
        attention_blocks: tuple[int, int, int, int] | None = None
        """Block sizes of the attention block lists: queries and keys forward, then backward. None:
        the trainer takes those of the fastest attention backend."""
        plan_ahead: bool = True
        """Plan the next step in a thread while the current one trains."""
        synthetic: SyntheticTrees = field(default_factory=SyntheticTrees)
        """The trees of a run without a file."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int = 1,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        if local_batch_size != 1:
            raise ValueError(f"training.local_batch_size must be 1, got {local_batch_size}")
        for name, least in {"trajectories_per_step": 0, "limit": 0, "epochs": 1}.items():
            if getattr(config, name) < least:
                got = getattr(config, name)
                raise ValueError(f"dataloader.{name} must be at least {least}, got {got}")
        self.config = config
        self.planner = replace(config.planner, dp=dp_world_size)
        self.replica = dp_rank
        self.vocab_size = tokenizer.get_vocab_size()
        self.seq_len = seq_len
        self.cursor: Cursor = (0, 0)
        self.rollouts = self._read() if config.dataset_path else None

    def _read(self) -> Rollouts:
        config = self.config
        assert config.dataset_path is not None
        limit = config.limit or None
        rollouts = read_rollouts(config.dataset_path, limit=limit, required=REQUIRED_COLUMNS)
        if config.vocabulary == "dense":
            rollouts = dense_vocabulary(rollouts, self.vocab_size)
        self._check(rollouts)
        return rollouts

    def _check(self, rollouts: Rollouts) -> None:
        limits = {
            "training.seq_len": self.seq_len,
            "dataloader.planner.capacity": self.planner.capacity,
        }
        check_rollouts(rollouts, vocab_size=self.vocab_size, limits=limits)

    def _rollouts_at(self, cursor: Cursor) -> tuple[Rollouts, Cursor] | None:
        """Return a step's rollouts and the cursor after it, or None at the end of the data."""
        epoch, first = cursor
        if self.rollouts is None:
            rollouts = synthetic_rollouts(self.config.synthetic, epoch, self.vocab_size)
            self._check(rollouts)
            return rollouts, (epoch + 1, 0)
        if epoch >= self.config.epochs:
            return None
        size = len(self.rollouts)
        last = min(size, first + (self.config.trajectories_per_step or size))
        if last - first < self.planner.dp:
            logger.warning(
                f"{self.rollouts.source}: the last step of epoch {epoch} has {last - first} "
                f"trajectories for {self.planner.dp} replicas; the run ends here"
            )
            return None
        after = (epoch, last) if last < size else (epoch + 1, 0)
        return self.rollouts.select(np.arange(first, last)), after

    def _step_at(self, cursor: Cursor) -> tuple[StepBatch, StepTargets, Cursor] | None:
        found = self._rollouts_at(cursor)
        if found is None:
            return None
        rollouts, after = found
        targets = StepTargets.of(rollouts, paired=self.config.couples == "pair")
        start = time.perf_counter()
        coupling = coupling_keys(rollouts, self.config.couples)
        plan = make_plan(rollouts.token_ids, self.planner, coupling=coupling)
        planned = time.perf_counter()
        step = step_batch(
            plan,
            rollouts.token_ids,
            rollouts.loss_mask,
            self.replica,
            attention_blocks=self.config.attention_blocks or DEFAULT_BLOCKS,
            metadata=targets.metadata,
        )
        metrics = {
            **step.metrics,
            "plan_s": planned - start,
            "layout_s": time.perf_counter() - planned,
        }
        return replace(step, metrics=metrics), targets, after

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        with ThreadPoolExecutor(1, thread_name_prefix="plan") as executor:
            ahead: Future | None = None
            warned = False
            for number in count():
                if ahead is None:
                    with stage(f"planning step {number + 1} of this run", logger.info):
                        found = self._step_at(self.cursor)
                else:
                    found = ahead.result()
                if found is None:
                    logger.info(
                        f"{self.config.dataset_path}: the rollouts end after {number} "
                        f"step{'' if number == 1 else 's'} of this run "
                        f"(dataloader.epochs = {self.config.epochs})"
                    )
                    return
                step, targets, self.cursor = found
                if not targets.totals.targets and not warned:
                    warned = True
                    rollouts = targets.rollouts
                    logger.warning(
                        f"{rollouts.source}, rows {rollouts.row[0]} to {rollouts.row[-1]}: step "
                        f"{number + 1} of this run has an empty loss_mask and trains on no token"
                    )
                if self.config.plan_ahead:
                    ahead = executor.submit(self._step_at, self.cursor)
                yield {"input": step, "targets": targets}, step.labels

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor of the next step; it is the same on every replica."""
        epoch, trajectory = self.cursor
        return {"epoch": epoch, "trajectory": trajectory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved cursor.

        Raises:
            ValueError: The file has no such trajectory.
        """
        if not state_dict:
            return
        epoch, trajectory = state_dict["epoch"], state_dict["trajectory"]
        if self.rollouts is not None and not 0 <= trajectory < len(self.rollouts):
            raise ValueError(
                f"{self.rollouts.source}: the checkpoint continues at trajectory {trajectory}, "
                f"the file has {len(self.rollouts)}"
            )
        self.cursor = (epoch, trajectory)
