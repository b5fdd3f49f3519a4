"""Tree execution equals the trajectory-expanded model of tests/oracle.py, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import FullAC

from harts_titan import loss as objectives
from harts_titan.batch import MicrobatchInput
from harts_titan.loss import TargetMetadata, Totals
from harts_titan.model import HartsModel, ModelOutput
from harts_titan.parallelize import HartsSelectiveAC
from planner.rollouts import read_rollouts
from tests import oracle
from tests.titan.small_models import (
    CHUNK,
    LING,
    NUMBERS,
    assert_gradients_equal,
    gradients,
    plain_input,
    random_masks,
    random_model,
    relative_error,
)
from tests.trees import named_trees, random_trajectories

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-10
POLICIES = {"none": None, "selective": HartsSelectiveAC.Config(), "full": FullAC.Config()}


class Case:
    """A microbatch, run by the model and by the oracle."""

    def __init__(
        self,
        trajectories: list[np.ndarray],
        *,
        model: HartsModel | None = None,
        numbers=LING,
        align: int = 1,
        seed: int = 0,
    ) -> None:
        self.numbers = numbers
        self.trajectories = [np.asarray(x, np.int64) % numbers.vocab_size for x in trajectories]
        self.model = random_model(numbers, seed) if model is None else model
        self.masks = random_masks(np.random.default_rng(seed), self.trajectories)
        self.inputs = plain_input(
            self.trajectories, self.masks, align=align, chunk_size=numbers.chunk_size
        )
        self.state = {
            name: value.detach().clone().requires_grad_(value.is_floating_point())
            for name, value in self.model.state_dict().items()
        }
        self.expanded = oracle.expand(numbers, self.state, self.trajectories)
        assert self.expanded.margin > 1e-9, "a routing tie: choose another seed"

    def run(self) -> ModelOutput:
        inputs, interface = self.inputs, self.model.empty_interface()
        return self.model(inputs.token, inputs, interface, entropy=True)

    def of_targets(self, values: list[Tensor]) -> list[Tensor]:
        """Pick the targets of each trajectory; entry i is of the prediction after token i."""
        return [
            value[torch.from_numpy(np.flatnonzero(mask[1:]))]
            for value, mask in zip(values, self.masks, strict=True)
        ]

    def oracle_gradients(self, loss: Tensor) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_parameters()]
        found = torch.autograd.grad(
            loss, [self.state[name] for name in names], materialize_grads=True
        )
        return dict(zip(names, found, strict=True))

    def check_log_probabilities(self, output: ModelOutput) -> None:
        count = self.inputs.num_targets
        for got, values in (
            (output.logprob, self.expanded.logprob),
            (output.entropy, self.expanded.entropy),
        ):
            assert got is not None
            want = torch.cat(self.of_targets(values))
            assert relative_error(got[:count], want) <= TOLERANCE
            assert len(want) == count

    def check_statistics(self, output: ModelOutput, scope: str, step_counts: Tensor) -> None:
        routing, statistics = self.expanded.routing, output.statistics
        assert statistics is not None
        counts = [oracle.expert_counts(layer, self.numbers.num_experts) for layer in routing]
        assert torch.equal(statistics.counts, torch.stack(counts))
        z_sum, balance_sum = self.aux_losses(scope, step_counts)
        assert relative_error(statistics.z_sum, z_sum) <= TOLERANCE
        assert relative_error(statistics.balance_sum, balance_sum) <= TOLERANCE

    def aux_losses(self, scope: str, step_counts: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.expanded.routing
        balance = [
            oracle.balance_sum(layer, scope, counts)
            for layer, counts in zip(routing, step_counts, strict=True)
        ]
        return torch.stack([oracle.z_sum(x) for x in routing]).sum(), torch.stack(balance).sum()

    def check_everything(self) -> None:
        """Log-probabilities, entropies, statistics, and the gradients of a loss of them all."""
        output, count = self.run(), self.inputs.num_targets
        self.check_log_probabilities(output)
        assert output.logprob is not None and output.entropy is not None
        weight = torch.linspace(-1, 1.5, count, dtype=torch.float64)
        loss = (weight * (output.logprob[:count] + 0.3 * output.entropy[:count])).sum()
        values = zip(self.expanded.logprob, self.expanded.entropy, strict=True)
        want = [logprob + 0.3 * entropy[:-1] for logprob, entropy in values]
        want_loss = (weight * torch.cat(self.of_targets(want))).sum()
        if output.statistics is not None:
            step_counts = output.statistics.counts
            self.check_statistics(output, "trajectory", step_counts)
            z_sum, balance_sum = self.aux_losses("trajectory", step_counts)
            loss = loss + 0.1 * output.statistics.z_sum + output.statistics.balance_sum
            want_loss = want_loss + 0.1 * z_sum + balance_sum
        loss.backward()
        assert_gradients_equal(gradients(self.model), self.oracle_gradients(want_loss))


@pytest.mark.parametrize("name", named_trees(CHUNK))
def test_hand_drawn_trees_equal_their_trajectories(name):
    Case(named_trees(CHUNK)[name]).check_everything()


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("model", NUMBERS)
def test_random_trees_equal_their_trajectories(model, align):
    for seed in range(3):
        trajectories = random_trajectories(np.random.default_rng(seed), chunk_size=CHUNK)
        Case(trajectories, numbers=NUMBERS[model], align=align, seed=seed).check_everything()


@pytest.mark.parametrize("file", ["tau_airline.treestep_spliced", "toolbench_dfs.treestep"])
def test_real_trees_equal_their_trajectories(file):
    rollouts = read_rollouts(DATA / f"{file}.npz")
    # Every 24th token keeps the trees' shape at a length the oracle can run.
    trajectories = [np.asarray(tokens)[::24] for tokens in rollouts.token_ids[:24]]
    Case(trajectories, align=8).check_everything()


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_equals_the_oracle_and_changes_nothing(policy):
    trajectories = named_trees(CHUNK)["everything"]
    results = {}
    for name in ("none", policy):
        case = Case(trajectories)
        if POLICIES[name] is not None:
            POLICIES[name].build().apply(case.model)
        output = case.run()
        case.check_statistics(output, "trajectory", output.statistics.counts)
        (output.logprob.sum() + output.statistics.z_sum + output.statistics.balance_sum).backward()
        results[name] = (output.logprob, gradients(case.model))
    torch.testing.assert_close(results[policy], results["none"], rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["trajectory", "microbatch", "global"])
def test_balance_loss_of_each_scope_equals_the_oracle(scope):
    rng = np.random.default_rng(5)
    microbatches = [random_trajectories(rng, num_trajectories=5) for _ in range(2)]
    model = random_model()
    for moe in model.moe_layers():
        moe.balance_scope = scope
    cases = [Case(trajectories, model=model) for trajectories in microbatches]
    step_counts = torch.stack([case.run().statistics.counts for case in cases]).sum(0)
    model.set_balance_counts(step_counts)
    got, want = [], {}
    for case in cases:
        output = case.run()
        case.check_statistics(output, scope, step_counts)
        output.statistics.balance_sum.backward()
        got.append(output.statistics.balance_sum.item())
        _, balance_sum = case.aux_losses(scope, step_counts)
        for name, gradient in case.oracle_gradients(balance_sum).items():
            want[name] = want.get(name, 0) + gradient
    for parameter in model.parameters():
        # The last layer's statistics do not depend on what follows the router.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    assert_gradients_equal(gradients(model), want)
    assert sum(got) > 0


def _metadata(case: Case, targets: oracle.Targets, pairs: list[tuple[int, int]]) -> TargetMetadata:
    counts = torch.tensor([len(x) for x in targets.logprob])
    trajectory = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return TargetMetadata(
        trajectory=trajectory,
        target_count=counts,
        totals=Totals(
            targets=int(counts.sum()), trajectories=int((counts > 0).sum()), pairs=len(pairs)
        ),
        advantage=torch.tensor(targets.advantage, dtype=torch.float64)[trajectory],
        behaviour_logprob=torch.cat(targets.behaviour),
        reference_logprob=torch.cat(targets.reference),
        pairs=torch.tensor(pairs),
    )


PAIRS = [(0, 3), (4, 1), (2, 5)]
OBJECTIVES = {
    "sft": (objectives.SupervisedFineTuning.Config(), oracle.supervised_loss),
    "ppo": (
        objectives.PolicyGradient.Config(entropy_coefficient=0.1),
        lambda t: oracle.clipped_loss(t, low=0.2, high=0.2, entropy=0.1),
    ),
    "grpo": (
        objectives.grpo(),
        lambda t: oracle.clipped_loss(t, low=0.2, high=0.2, normalisation="sequence_mean", kl=0.04),
    ),
    "dapo": (objectives.dapo(), lambda t: oracle.clipped_loss(t, low=0.2, high=0.28)),
    "dr_grpo": (
        objectives.dr_grpo(fixed_length=32),
        lambda t: oracle.clipped_loss(t, low=0.2, high=0.2, normalisation="fixed", length=32),
    ),
    "gspo": (
        objectives.gspo(clip_low=0.1, clip_high=0.1),
        lambda t: oracle.sequence_loss(t, low=0.1, high=0.1),
    ),
    "cispo": (
        objectives.cispo(),
        lambda t: oracle.weighted_logprob_loss(t, low=1.0, high=0.28),
    ),
    "dpo": (
        objectives.DirectPreference.Config(),
        lambda t: oracle.preference_loss(t, PAIRS, 0.1),
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_equals_the_oracle(name):
    config, plain = OBJECTIVES[name]
    rng = np.random.default_rng(3)
    case = Case(random_trajectories(rng, chunk_size=CHUNK))
    logprob = case.of_targets(case.expanded.logprob)
    targets = oracle.Targets(
        logprob=logprob,
        entropy=case.of_targets(case.expanded.entropy),
        behaviour=[x.detach() + 0.3 * torch.randn_like(x) for x in logprob],
        reference=[x.detach() + 0.3 * torch.randn_like(x) for x in logprob],
        advantage=rng.normal(size=len(logprob)).tolist(),
    )
    output, count = case.run(), case.inputs.num_targets
    metadata = _metadata(case, targets, PAIRS)
    got = config.build()(output.logprob[:count], output.entropy[:count], metadata)
    want = plain(targets)
    assert relative_error(got, want) <= TOLERANCE
    got.backward()
    # Routers get no gradient through a shared expert alone, so all parameters take part.
    for parameter in case.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_gradients_equal(gradients(case.model), case.oracle_gradients(want))


def test_a_microbatch_without_targets_has_statistics_only():
    trajectories = [np.arange(5), np.array([0, 1, 9])]
    inputs = plain_input(trajectories, [np.zeros(len(x), bool) for x in trajectories])
    model = random_model()
    output: ModelOutput = model(inputs.token, inputs, model.empty_interface())
    assert isinstance(inputs, MicrobatchInput) and inputs.num_targets == 0
    assert output.logprob[:0].numel() == 0 and not output.logprob.any()
    assert output.statistics.counts.sum(1).tolist() == [8 * LING.top_k] * 3
