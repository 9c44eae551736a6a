"""Activation checkpointing saves memory and changes nothing else: no name, no number, no run.

In a private step it goes with a second backward: what every layer's gradient is made of is not kept
until the factors are known, but computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeline.dpsgd import ClippedGradientSum, FlatClipping
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import ModelSize

SIZE = ModelSize(
    name="some",
    width=32,
    depth=4,
    num_heads=2,
    decoder_width=16,
    decoder_depth=2,
    decoder_num_heads=2,
)


def make_model(
    *, checkpoints: bool, dropout: float = 0.0, depth: int = SIZE.depth
) -> MaskedAutoencoder:
    model = MaskedAutoencoder(replace(SIZE, depth=depth), image_size=24, patch_size=4)
    model.initialise(torch.Generator().manual_seed(3))
    model.checkpoints_activations = checkpoints
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def inputs(model: MaskedAutoencoder, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(4, 3, 24, 24, generator=generator).to(dtype)
    return images, torch.rand(4, model.num_patches, generator=generator)


def private_sum(
    model: MaskedAutoencoder, *, autocast: bool, two_backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """The clipped sum and the losses of one microbatch, always from the same random state."""
    batch = inputs(model)
    engine = ClippedGradientSum(
        model, FlatClipping(0.05), mode="ghost", two_backwards=two_backwards
    )
    torch.manual_seed(7)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(*batch)

    facts = engine.accumulate(losses, torch.tensor([1.0, 1.0, 0.0, 1.0]))
    return engine.flat_sum, facts.losses_M


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_activation_checkpointing_changes_nothing(autocast: bool, dropout: float) -> None:
    """The private step to the bit; with dropout too, which the model itself does not have."""
    plain = make_model(checkpoints=False, dropout=dropout)
    checkpointed = make_model(checkpoints=True, dropout=dropout)
    assert list(plain.state_dict()) == list(checkpointed.state_dict())
    expected_sum, expected_losses = private_sum(plain, autocast=autocast)
    for two_backwards in (False, True):
        flat_sum, losses = private_sum(checkpointed, autocast=autocast, two_backwards=two_backwards)
        assert torch.equal(losses, expected_losses)
        assert torch.equal(flat_sum, expected_sum)
    assert flat_sum.count_nonzero() > 0.9 * len(flat_sum)
    if dropout:  # the dropout is real, and so is the test
        without = make_model(checkpoints=True)
        assert not torch.equal(private_sum(without, autocast=autocast)[0], flat_sum)


def test_the_public_gradient_too() -> None:
    found = []
    for checkpoints in (False, True):
        model = make_model(checkpoints=checkpoints)
        model(*inputs(model)).sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def bytes_kept_for_the_backward(model: MaskedAutoencoder) -> int:
    """Of everything that the forward saves, parameters left out."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*inputs(model))
    return sum(kept.values())


def test_the_forward_keeps_a_fraction() -> None:
    plain = bytes_kept_for_the_backward(make_model(checkpoints=False))
    checkpointed = bytes_kept_for_the_backward(make_model(checkpoints=True))
    assert checkpointed < plain / 4


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    model = make_model(checkpoints=True)
    with torch.no_grad():
        expected = make_model(checkpoints=False)(*inputs(model))
        assert torch.equal(model(*inputs(model)), expected)


def most_bytes_alive(step: Callable[[], object]) -> int:
    """What torch has allocated and not yet freed, at the worst moment of a step."""
    step()  # what happens once: the images are proven independent
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def test_a_checkpointed_private_step_needs_little_more_memory_than_a_public_one() -> None:
    """Activations, output gradients and what is made of them; weights and sums aside."""
    model = make_model(checkpoints=True, depth=12)
    images, uniforms = (each.repeat_interleave(16, dim=0) for each in inputs(model))

    def public() -> None:
        model(images, uniforms).sum().backward()
        model.zero_grad(set_to_none=False)  # gradients stay allocated: they are not counted

    def private(*, two_backwards: bool) -> Callable[[], object]:
        engine = ClippedGradientSum(model, FlatClipping(1.0), two_backwards=two_backwards)
        return lambda: engine.accumulate(lambda: model(images, uniforms))

    of_public = most_bytes_alive(public)
    of_private = most_bytes_alive(private(two_backwards=True))
    of_one_backward = most_bytes_alive(private(two_backwards=False))
    assert of_private < 1.25 * of_public
    assert of_private < of_one_backward / 2
