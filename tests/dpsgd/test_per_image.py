"""The three compact forms of per-image gradients agree with the gradients written out."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.dpsgd import per_image
from pipeline.dpsgd.per_image import (
    STRIPED_POSITIONS,
    EmbeddingRows,
    FormedGradients,
    FormedInPieces,
    ImageWeights,
    NormCosts,
    OuterProducts,
    OwnRows,
    PerImageGradients,
    added,
)
from pipeline.dpsgd.products import exact_products, halves

M, T, I, O, V = 4, 5, 3, 6, 7  # noqa: E741 - the shape letters of per_image.py


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def forms() -> dict[str, PerImageGradients]:
    ids = torch.randint(V, (M, T), generator=torch.Generator().manual_seed(0))
    return {
        "formed": FormedGradients(values=random(M, O, I)),
        "pieces": FormedInPieces.of([random(2, O, I), random(1, O, I, seed=1), random(1, O, I)]),
        "outer": OuterProducts(
            inputs_MTI=random(M, T, I), output_gradients_MTO=random(M, T, O, seed=1)
        ),
        "outer, wide input": OuterProducts(
            inputs_MTI=random(M, T, O), output_gradients_MTO=random(M, T, I, seed=1)
        ),
        "outer, in stripes": OuterProducts(
            inputs_MTI=random(M, STRIPED_POSITIONS + 1, I),
            output_gradients_MTO=random(M, STRIPED_POSITIONS + 1, O, seed=1),
        ),
        "outer, one position": OuterProducts(
            inputs_MTI=random(M, 1, I), output_gradients_MTO=random(M, 1, O, seed=1)
        ),
        "embedding": EmbeddingRows(
            ids_MT=ids, output_gradients_MTO=random(M, T, O, seed=2), num_rows=V
        ),
        "own rows": OwnRows(values_MR=random(M, O)),
    }


@pytest.mark.parametrize("name", forms())
def test_norm_and_sum_are_those_of_the_written_out_gradients(name: str) -> None:
    gradients = forms()[name]
    written = gradients.formed(0, M)
    assert written.shape[0] == M
    torch.testing.assert_close(gradients.formed(1, 3), written[1:3])
    squares = gradients.squared_norms()
    torch.testing.assert_close(squares.values_M, written.square().sum(1), rtol=1e-12, atol=0)
    factors = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    for is_kept in ([True] * 4, [True, True, False, True], [False] * 4):
        kept = torch.tensor(is_kept)
        total = random(written.shape[1], seed=9)
        expected = total + torch.where(kept, factors, torch.zeros(4).double()) @ written
        gradients.add_weighted_sum(ImageWeights.of(factors, kept), total)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


def test_uses_add_up_before_the_norm() -> None:
    first, second = forms()["outer"], forms()["outer, one position"]
    expected = first.formed(0, M) + second.formed(0, M)
    for mode, kind in (("ghost", OuterProducts), ("direct", FormedGradients)):
        both = added([first, second], M, NormCosts(mode=mode))
        assert isinstance(both, kind)
        torch.testing.assert_close(both.formed(0, M), expected)
        torch.testing.assert_close(both.squared_norms().values_M, expected.square().sum(1))
    mixed = added([first, FormedGradients(values=second.formed(0, M))], M, NormCosts())
    torch.testing.assert_close(mixed.formed(0, M), expected)


def test_the_cheaper_norm_is_chosen() -> None:
    """Few positions and wide layers: ghost; many positions and narrow layers: direct."""
    costs = NormCosts(flops_per_byte=8.0)
    assert not costs.prefers_direct(50, 768, 3072, torch.float32)
    assert costs.prefers_direct(197, 192, 192, torch.float32)
    assert not costs.prefers_direct(1, 4, 4, torch.float32)
    slow = NormCosts(flops_per_byte=1e6)
    assert not slow.prefers_direct(197, 192, 192, torch.float32)


def test_a_gradient_that_needs_too_much_room_is_not_kept() -> None:
    """The decoder of the MAE: direct is the faster and takes twice the room."""
    decoder = (197, 512, 2048, torch.float32)
    assert not NormCosts(flops_per_byte=8.0).prefers_direct(*decoder)
    assert NormCosts(flops_per_byte=8.0, room=math.inf).prefers_direct(*decoder)
    assert NormCosts(flops_per_byte=8.0, room=math.inf).prefers_direct(50, 192, 768, torch.bfloat16)
    with pytest.raises(ValueError, match="room must be > 0"):
        NormCosts(room=math.nan)


def test_the_balance_depends_on_the_machine() -> None:
    """A GPU multiplies bf16 so fast that moving a kept gradient costs more than its Gram matrix."""
    layer = (197, 512, 512, torch.bfloat16)
    assert NormCosts().prefers_direct(*layer)
    assert not NormCosts().prefers_direct(*layer, "cuda")
    assert NormCosts(flops_per_byte=8.0).prefers_direct(*layer, "cuda")


@pytest.mark.parametrize("widths", [(64, 48), (48, 64)], ids=["inputs wider", "outputs wider"])
def test_the_weighted_sum_in_two_halves(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where both operands of a product are bf16 and its sums fp32."""
    monkeypatch.setattr(per_image, "sums_stay_wide", lambda each: each.dtype == torch.bfloat16)
    outer = OuterProducts(
        inputs_MTI=random(M, 7, widths[0]).bfloat16(),
        output_gradients_MTO=random(M, 7, widths[1], seed=1).bfloat16(),
    )
    factors = torch.tensor([0.3, 1 / 3, 7e-4, 1.0])
    is_kept = torch.tensor([True, True, True, False])
    exact = torch.where(is_kept, factors, 0.0).double() @ outer.formed(0, M).double()
    total = torch.zeros(widths[0] * widths[1])
    outer.add_weighted_sum(ImageWeights.of(factors, is_kept), total)
    assert (total - exact).norm() < 2**-16 * exact.norm()


def test_halves_add_up_to_the_whole() -> None:
    values = random(10_000).float() * 10.0 ** torch.linspace(-20, 20, 10_000)
    high, low = halves(values)
    assert {high.dtype, low.dtype} == {torch.bfloat16}
    assert ((high.double() + low.double() - values).abs() <= 2**-17 * values.abs()).all()


@pytest.mark.parametrize("num_positions", [2, STRIPED_POSITIONS])
def test_gradients_rounded_to_bfloat16_are_those_that_are_measured_and_added(
    num_positions: int,
) -> None:
    """What is kept in bfloat16 has the norm of what is added, to fp32 precision."""
    outer = OuterProducts(
        inputs_MTI=random(M, num_positions, 64).bfloat16(),
        output_gradients_MTO=random(M, num_positions, 48, seed=1).bfloat16(),
    )
    kept = outer.settled(NormCosts(mode="direct"))
    assert isinstance(kept, FormedInPieces)
    assert {piece.values.dtype for piece in kept.pieces} == {torch.bfloat16}
    written = kept.formed(0, M)
    assert written.dtype == torch.float32
    exact = outer.formed(0, M)
    assert ((written - exact).norm(dim=1) < 2**-8 * exact.norm(dim=1)).all()
    for image in range(M):
        is_kept = torch.arange(M) == image
        total = torch.zeros(written.shape[1])
        kept.add_weighted_sum(ImageWeights.of(torch.ones(M), is_kept), total)
        squares = kept.squared_norms().values_M[image].double()
        torch.testing.assert_close(squares, total.double().square().sum(), rtol=1e-6, atol=0)


def test_what_may_cancel_is_told() -> None:
    """The uncertainty covers the error of a Gram norm in fp32, and is none of one position."""
    signs = 1.0 - 2.0 * (torch.arange(32) % 2).view(1, -1, 1)
    inputs = 1.0 + 1e-4 * random(1, 32, 64)
    gradients = signs + 1e-4 * random(1, 32, 96, seed=1)
    exact = OuterProducts(inputs_MTI=inputs, output_gradients_MTO=gradients).formed(0, 1)
    rounded = OuterProducts(
        inputs_MTI=inputs.float(), output_gradients_MTO=gradients.float()
    ).squared_norms()
    error = abs(rounded.values_M.item() - exact.square().sum().item())
    assert rounded.uncertainty_M is not None
    assert error < rounded.uncertainty_M.item()
    assert error > 0.05 * exact.square().sum().item()  # it is not academic
    assert forms()["outer, one position"].squared_norms().uncertainty_M is None


def test_products_are_exact_inside_and_as_before_outside() -> None:
    before = torch.get_float32_matmul_precision()
    left, right = torch.rand(64, 64), torch.rand(64, 64)
    exact = left.double() @ right.double()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with exact_products():
                error = (left @ right - exact).abs().max().item()
            assert error < 1e-4
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_poisoned_image_is_not_multiplied() -> None:
    for name, gradients in forms().items():
        if name == "pieces":  # made of what is tested under "formed"
            continue
        poisoned = {
            field: value.clone() if isinstance(value, torch.Tensor) else value
            for field, value in vars(gradients).items()
        }
        clean = torch.zeros(gradients.formed(0, M).shape[1], dtype=torch.float64)
        weights = ImageWeights.of(
            torch.ones(M, dtype=torch.float64), torch.tensor([True, False, True, True])
        )
        gradients.add_weighted_sum(weights, clean)
        for value in poisoned.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value[1] = math.nan
        total = torch.zeros_like(clean)
        type(gradients)(**poisoned).add_weighted_sum(weights, total)
        assert torch.equal(total, clean), name
