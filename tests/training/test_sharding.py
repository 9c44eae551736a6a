"""The optimizer's state over several ranks: the same bits, and checkpoints that know no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import exact_shares, exact_total, run_ranks
from phase_fixtures import Crash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline import recipe
from pipeline.data.stream import StreamConfig, Unit, thread_pool_units
from pipeline.dpsgd import (
    ParameterLayout,
    PublicGradient,
    ReleasedGradient,
    public_gradient,
    release,
    release_gradient,
)
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import KeyedNoise
from pipeline.storage import Location
from pipeline.training import sharding
from pipeline.training.checkpoint import all_checkpoints, load_checkpoint
from pipeline.training.phase import run_phase
from pipeline.training.ranks import Ranks
from pipeline.training.settings import PhaseSettings
from pipeline.training.sharding import PhaseOptimizer, open_optimizer

OPTIMIZERS = {
    "adamw": {"learning_rate": 1e-2, "weight_decay": 0.3},
    "sgd": {"name": "sgd", "learning_rate": 1e-2, "weight_decay": 0.3},
}
SHARDED = {"workers": 2, "shard_optimizer": True}
WHOLE = {"workers": 2, "shard_optimizer": False}
NUM_STEPS = 4


def make_model() -> nn.Module:
    """Matrices and vectors of odd lengths, so that slices cut through both; 517 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 27), nn.LayerNorm(27), nn.Linear(27, 3, bias=False), Scale())


class Scale(nn.Module):
    """A vector and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)


def make_phase(optimizer: str, resources: dict[str, Any]) -> recipe.Phase:
    content = {"name": "some", "kind": "public", "data": "some", "steps": 9, "batch_size": 8}
    return recipe.Phase.model_validate(
        content | {"optimizer": OPTIMIZERS[optimizer], "resources": resources}
    )


def gradient_of(
    step: int, layout: ParameterLayout, rank: int, world_size: int, optimizer: PhaseOptimizer
) -> ReleasedGradient:
    """The release of a step whose sum, over all ranks, is the same in every world."""
    total = exact_total(layout.num_coordinates, step)
    return release_gradient(
        exact_shares(total, rank, world_size),
        step=step,
        noise_std=0.7,
        divisor=10.0,
        noise_source=KeyedNoise(noise_key=AttemptKey.seeded(4).noise_key()),
        layout=layout,
        gathers=not optimizer.is_sharded,
    )


def train(
    rank: int,
    world_size: int,
    *,
    name: str,
    resources: dict[str, Any],
    steps: range,
    start_from: Path | None = None,
    reset: str = "none",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimizer state after these steps."""
    model = make_model()
    ranks = Ranks(torch.device("cpu"))
    phase = make_phase(name, resources)
    optimizer = open_optimizer(model, phase, ranks, is_private=True)
    assert optimizer.is_sharded == (world_size > 1 and resources["shard_optimizer"])
    layout = ParameterLayout.of(model)
    if start_from is not None:
        model.load_state_dict(load_file(start_from / f"{name}-weights"))
        optimizer.restore(load_file(start_from / f"{name}-state"), reset)  # type: ignore[arg-type]
    for step in steps:
        optimizer.set_rate(0.01 * (step + 1))
        optimizer.step(gradient_of(step, layout, rank, world_size, optimizer))
    return model.state_dict(), optimizer.tensors()


def train_alone(name: str, steps: range, **given: Any) -> tuple[dict[str, Tensor], ...]:
    return train(0, 1, name=name, resources=SHARDED, steps=steps, **given)


def keep(folder: Path, name: str, weights: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """As checkpoints are written: the model's and the gathered tensors as they are."""
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / f"{name}-weights")
    if state:
        save_file(state, folder / f"{name}-state")


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def rank_main(rank: int, world_size: int, folder: Path, resources: dict[str, Any]) -> None:
    """All steps at once; the first half; and the second half of what one process began."""
    release.REDUCE_BUCKET = 64  # several buckets a slice
    first, second = range(NUM_STEPS // 2), range(NUM_STEPS // 2, NUM_STEPS)
    for name in OPTIMIZERS:
        given: dict[str, Any] = {"name": name, "resources": resources}
        kept = {
            "all": train(rank, world_size, steps=range(NUM_STEPS), **given),
            "half": train(rank, world_size, steps=first, **given),
            "resumed": train(rank, world_size, steps=second, start_from=folder / "alone", **given),
            "reset": train(
                rank, world_size, steps=second, start_from=folder / "alone", reset="m", **given
            ),
        }
        for part, (weights, state) in kept.items():
            assert bool(state) == (rank == 0)
            keep(folder / f"{part}-{rank}", name, weights, state)


@pytest.mark.parametrize(
    ("world_size", "resources"),
    [(2, SHARDED), (3, SHARDED), (2, WHOLE)],
    ids=["2 sharded", "3 sharded", "2 whole"],
)
def test_sharded_is_whole(world_size: int, resources: dict[str, Any], tmp_path: Path) -> None:
    """To the bit: weights on every rank, and the whole state on rank 0.

    Resumed in another world too: one process begins and W go on; W begin and one goes on.
    """
    first, second = range(NUM_STEPS // 2), range(NUM_STEPS // 2, NUM_STEPS)
    expected = {}
    for name in OPTIMIZERS:
        half = train_alone(name, first)
        keep(tmp_path / "alone", name, *half)
        expected[name] = {
            "all": train_alone(name, range(NUM_STEPS)),
            "half": half,
            "resumed": train_alone(name, range(NUM_STEPS)),
            "reset": train_alone(name, second, start_from=tmp_path / "alone", reset="m"),
        }
    run_ranks(world_size, rank_main, tmp_path, resources)
    for name, parts in expected.items():
        assert not torch.equal(parts["reset"][0]["0.weight"], parts["all"][0]["0.weight"])
        for part, (weights, state) in parts.items():
            for rank in range(world_size):
                assert_equal(load_file(tmp_path / f"{part}-{rank}" / f"{name}-weights"), weights)
            assert_equal(load_file(tmp_path / f"{part}-0" / f"{name}-state"), state)
        from_many = train_alone(name, second, start_from=tmp_path / "half-0")
        for found, wanted in zip(from_many, parts["all"], strict=True):
            assert_equal(found, wanted)


def tiny_main(rank: int, world_size: int) -> None:
    """Three ranks and two numbers: the last slice is empty."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = open_optimizer(
        model, make_phase("adamw", SHARDED), Ranks(torch.device("cpu")), is_private=True
    )
    assert not optimizer.tensors()  # nothing was done yet
    layout = ParameterLayout.of(model)
    optimizer.set_rate(0.01)
    optimizer.step(gradient_of(0, layout, rank, world_size, optimizer))
    state = optimizer.tensors()
    assert set(state) == (
        {"weight|step", "weight|exp_avg", "weight|exp_avg_sq"} if not rank else set()
    )
    optimizer.restore(state if not rank else {})
    assert (model.weight != 1.0).all()


def test_more_ranks_than_numbers() -> None:
    run_ranks(3, tiny_main)


@pytest.mark.parametrize("resources", [SHARDED, WHOLE], ids=["sharded", "whole"])
def test_no_gradient_lies_beside_the_next_steps_activations(
    resources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as the weights, and of no use once they have moved."""
    monkeypatch.setattr(sharding, "all_gather_slices", lambda home, part: home.copy_(part))
    model, ranks = make_model(), Ranks(torch.device("cpu"))
    kind = sharding.ShardedOptimizer if resources is SHARDED else sharding.WholeOptimizer
    optimizer = kind(model, make_phase("adamw", resources).optimizer, ranks, ReleasedGradient)
    optimizer.step(gradient_of(0, ParameterLayout.of(model), 0, 1, optimizer))
    moved = [each for group in optimizer._optimizer.param_groups for each in group["params"]]
    assert len(moved) == len(ParameterLayout.of(model).names)
    assert all(parameter.grad is None for parameter in (*moved, *model.parameters()))


@pytest.mark.parametrize("resources", [SHARDED, WHOLE], ids=["sharded", "whole"])
def test_reset_all_takes_the_state_of_any_model(resources: dict[str, Any]) -> None:
    """It is the remedy that the refusal of another shape names."""
    model = make_model()
    optimizer = open_optimizer(model, make_phase("adamw", resources), one_of_two(), is_private=True)
    for reset in ("none", "m"):
        with pytest.raises(ValueError, match="set reset_optimizer: all"):
            optimizer.restore({"0.weight|exp_avg": torch.zeros(7, 7)}, reset)  # type: ignore[arg-type]
    optimizer.restore({"0.weight|exp_avg": torch.zeros(7, 7)}, "all")


# -- a whole phase ---------------------------------------------------------------------------------


def run_phases(rank: int, world_size: int, folder: Path, given: dict[str, Any]) -> None:
    """A phase straight through in slices; and one that crashes whole and goes on in slices."""

    def of(place: str, resources: dict[str, Any]) -> PhaseSettings:
        made = PhaseSettings.from_json(given | {"output": str(folder / place), "run": place})
        changed = made.phase.resources.model_copy(update=resources)
        return replace(made, phase=made.phase.model_copy(update={"resources": changed}))

    def units(config: StreamConfig, crash: int | None = None) -> Iterator[Unit]:
        for unit in thread_pool_units(config, rank, world_size):
            if unit.step == crash:
                raise Crash
            yield unit

    ranks = Ranks(torch.device("cpu"))
    run_phase(of("straight", SHARDED), ranks, units, lambda metrics: None)
    with pytest.raises(Crash):
        run_phase(of("broken", WHOLE), ranks, lambda config: units(config, 3), lambda metrics: None)
    run_phase(of("broken", SHARDED), ranks, units, lambda metrics: None)


@pytest.mark.slow
def test_a_phase_changes_to_slices_when_it_is_resumed(
    settings: Callable[..., PhaseSettings], public_set: str, tmp_path: Path
) -> None:
    """Two ranks, private, the key pinned: the same checkpoint to the bit."""
    made = settings(
        phase={"microbatch_size": 4}, seed=7, dataset_root=public_set, domain="public-some"
    )
    run_ranks(2, run_phases, tmp_path, made.to_json())
    straight, broken = (
        load_checkpoint(all_checkpoints(Location(str(tmp_path / place)))[-1])
        for place in ("straight", "broken")
    )
    assert straight.facts.step == broken.facts.step == 6
    assert straight.weights_digest == broken.weights_digest
    assert straight.optimizer
    assert_equal(straight.optimizer, broken.optimizer)


# -- what an optimizer takes -----------------------------------------------------------------------


def one_of_two() -> Ranks:
    ranks = Ranks(torch.device("cpu"))
    ranks.world_size = 2
    return ranks


@pytest.mark.parametrize("resources", [SHARDED, WHOLE], ids=["sharded", "whole"])
def test_a_private_phase_takes_released_gradients_alone(
    resources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfalls 4, 7: neither a plain tensor nor a public gradient moves the weights."""
    monkeypatch.setattr(release, "_rank_and_world", lambda group: (0, 1))
    model = make_model()
    layout = ParameterLayout.of(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    flat = torch.ones(layout.num_coordinates)
    public = public_gradient(flat, divisor=1.0, layout=layout, is_public=True)
    optimizer = open_optimizer(model, make_phase("adamw", resources), one_of_two(), is_private=True)
    optimizer.set_rate(1.0)
    for wrong in (flat, public, None):
        with pytest.raises(ValueError, match="takes a ReleasedGradient and nothing else"):
            optimizer.step(wrong)  # type: ignore[arg-type]
    other = open_optimizer(model, make_phase("adamw", resources), one_of_two(), is_private=False)
    with pytest.raises(ValueError, match="takes a PublicGradient and nothing else"):
        other.step(gradient_of(0, layout, 0, 1, other))
    assert_equal(model.state_dict(), before)


def test_nobody_else_makes_a_slice() -> None:
    layout = ParameterLayout.of(make_model())
    with pytest.raises(ValueError, match=r"release_gradient\(...\) or mix"):
        ReleasedGradient(
            flat=torch.ones(3), start=2, step=0, noise_std_per_coordinate=1.0, layout=layout
        )
    with pytest.raises(ValueError, match="from coordinate -1 on"):
        PublicGradient(flat=torch.ones(3), layout=layout, is_public=True, start=-1)
    slice_ = PublicGradient(flat=torch.ones(3), layout=layout, is_public=True, start=2)
    with pytest.raises(ValueError, match="this gradient is a slice, 3 of"):
        slice_.assign(make_model())


def test_another_slice_and_a_moved_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    layout = ParameterLayout.of(model)
    phase = make_phase("adamw", SHARDED)
    monkeypatch.setattr(release, "_rank_and_world", lambda group: (0, 2))
    optimizer = open_optimizer(model, phase, one_of_two(), is_private=False)
    half = -(-layout.num_coordinates // 2)

    def part(start: int, stop: int) -> PublicGradient:
        flat = torch.ones(stop - start)
        return PublicGradient(flat=flat, layout=layout, is_public=True, start=start)

    for start, stop in ((half, layout.num_coordinates), (0, layout.num_coordinates)):
        with pytest.raises(ValueError, match=f"rank 0 moves coordinates 0 to {half} and was given"):
            optimizer.step(part(start, stop))
    model.double().float()
    with pytest.raises(ValueError, match="moved or replaced after its optimizer was opened"):
        optimizer.step(part(0, half))
