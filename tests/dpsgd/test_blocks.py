"""Blocks are a partition made from names alone; engine and reference clip them alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    FlatClipping,
    GlobalClipping,
    ParameterBlocks,
    ParameterLayout,
    all_layer,
    by_prefix,
    make_blocks,
    per_block,
    per_layer,
    reference_clipped_sum,
)

CLIPPINGS = (FlatClipping(0.3), AutomaticClipping(0.3), GlobalClipping(9.0))
PATCHES, WIDTH = 5, 8


class Knotted(nn.Module):
    """Blocks that share a weight and a bias, a tied output, and parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(0.1 * torch.randn(1, 1, WIDTH))
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 2, qkv_bias=True) for _ in range(3)])
        self.blocks[2].mlp.fc1.weight = self.blocks[0].mlp.fc1.weight
        self.blocks[1].attn.proj.bias = self.embed.bias
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 6)
        self.never_used = nn.Linear(2, 2)

    def forward(self, patches: Tensor) -> Tensor:
        """patches [M, T, 6] -> losses [M]."""
        tokens = self.embed(patches)
        tokens = torch.cat([self.token.expand(len(patches), -1, -1), tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)[:, 1:]
        tied = F.linear(tokens, self.embed.weight.t())
        return (self.head(tokens) + tied - patches).square().mean((1, 2))


def knotted() -> Knotted:
    torch.manual_seed(0)
    model = Knotted().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def patches_of(num_rows: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(num_rows, PATCHES, 6, dtype=torch.float64, generator=generator)
    return patches * torch.logspace(-1, 1, num_rows, dtype=torch.float64).view(-1, 1, 1)


def blocks_of(model: nn.Module) -> dict[str, ParameterBlocks]:
    """Every style, and blocks written down by hand."""
    groups = {"first": ["blocks.0", "embed"], "other": ["blocks.1", "blocks.2", "token"]}
    groups["end"] = ["norm", "head", "never_used"]
    styles = {name: make_blocks(name, model) for name in ("all-layer", "per-layer", "per-block")}
    return {**styles, "by-prefix": by_prefix(model, groups)}


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("mode", ["ghost", "direct"])
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("style", ["all-layer", "per-layer", "per-block", "by-prefix"])
def test_equal_to_the_reference(style: str, clipping: Clipping, mode: str) -> None:
    model, patches = knotted(), patches_of(6)
    blocks, weights = blocks_of(model)[style], torch.tensor([1.0, 0.5, 1.0, 0.0, 1.0, 1.0])
    engine = ClippedGradientSum(model, clipping, blocks=blocks, mode=mode)
    found = engine.accumulate(lambda: model(patches), weights)
    expected = reference_clipped_sum(
        model, lambda i: model(patches[i : i + 1])[0], 6, clipping, weights, blocks=blocks
    )
    assert found.block_factors_MK.shape == (6, len(blocks))
    assert len(set(expected.block_factors_MK.flatten().tolist())) > 1
    assert_equal(engine.flat_sum, expected.flat_sum_P)
    assert_equal(found.block_factors_MK, expected.block_factors_MK)
    used = weights > 0
    assert_equal(found.block_norms_MK[used], expected.block_norms_MK[used])
    assert_equal(found.norms_M[used], expected.norms_M[used])


def test_an_image_that_is_not_finite_in_one_block_adds_nothing_to_any() -> None:
    """The norm of `late` overflows, that of `early` is finite; the other image is not touched."""
    torch.manual_seed(0)
    early, late = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleDict({"early": early, "late": late})
    rows = torch.randn(2, 4)

    def losses() -> Tensor:
        return early(rows).sum(1) + late(rows).sum(1) * torch.tensor([1e25, 1.0])

    for clipping in CLIPPINGS:
        engine = ClippedGradientSum(model, clipping, blocks=per_layer(model))
        found = engine.accumulate(losses)
        assert torch.isfinite(found.losses_M).all()
        assert torch.isfinite(found.block_norms_MK).tolist() == [[True, False], [True, True]]
        assert found.block_factors_MK[0].tolist() == [0.0, 0.0]
        assert found.block_factors_MK[1, 0] > 0
        alone = ClippedGradientSum(model, clipping, blocks=per_layer(model))
        alone.accumulate(losses, torch.tensor([0.0, 1.0]))
        assert torch.equal(engine.flat_sum, alone.flat_sum)
        assert engine.flat_sum.any()


def test_global_drops_one_block_and_keeps_another() -> None:
    model, patches = knotted(), patches_of(6)
    blocks = per_block(model)
    engine = ClippedGradientSum(model, GlobalClipping(9.0), blocks=blocks)
    found = engine.accumulate(lambda: model(patches))
    assert set(found.block_factors_MK.flatten().tolist()) == {0.0, 1.0}
    assert ((found.block_factors_MK == 0).any(1) & (found.block_factors_MK == 1).any(1)).any()
    bound = 9.0 / len(blocks) ** 0.5
    assert ((found.block_norms_MK <= bound) == (found.block_factors_MK == 1)).all()


def test_factors_of_one_block_only() -> None:
    model, patches = knotted(), patches_of(2)
    engine = ClippedGradientSum(model, FlatClipping(1.0), blocks=per_layer(model))
    found = engine.accumulate(lambda: model(patches))
    with pytest.raises(ValueError, match="use block_factors_MK"):
        _ = found.factors_M


# -- which parameter is in which block -------------------------------------------------------------


def test_per_layer_follows_the_owners() -> None:
    members = per_layer(knotted()).members
    assert members[""] == ("token",)
    assert members["embed"] == ("embed.weight", "embed.bias")
    assert members["blocks.0.attn.qkv"] == ("blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias")
    assert members["blocks.1.attn.proj"] == ("blocks.1.attn.proj.weight",)  # bias: of embed
    assert members["blocks.2.mlp.fc1"] == ("blocks.2.mlp.fc1.bias",)  # weight: of blocks.0


def test_per_block_follows_the_lists() -> None:
    blocks = per_block(knotted())
    assert list(blocks.members) == ["rest", "blocks.0", "blocks.1", "blocks.2"]
    assert "blocks.0.mlp.fc1.weight" in blocks.members["blocks.0"]
    assert "embed.bias" in blocks.members["rest"] and "token" in blocks.members["rest"]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.blocks.3.mlp.fc1.weight", "encoder.blocks.3"),
        ("decoder_blocks.0.attn.qkv.bias", "decoder_blocks.0"),
        ("stages.1.blocks.0.gamma", "stages.1.blocks.0"),
        ("stages.1.downsample.0.weight", "stages.1"),
        ("layer1.0.conv1.weight", "layer1.0"),
        ("blocks.3.mlp.0.weight", "blocks.3"),
        ("blocks_token_only.1.gamma_1", "blocks_token_only.1"),
        ("stem.0.weight", "rest"),
        ("cls_token", "rest"),
        ("blocks.weight", "rest"),
        ("layers.0", "rest"),  # a ParameterList holds parameters and no blocks
    ],
)
def test_per_block_by_name(name: str, block: str) -> None:
    pairs = [(name, nn.Parameter(torch.zeros(1))), ("other.x", nn.Parameter(torch.zeros(1)))]
    (found,) = [b for b, names in per_block(pairs).members.items() if name in names]
    assert found == block


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("vit_tiny_patch16_224", 12 + 1),
        ("convnext_atto", 2 + 2 + 6 + 2 + 3 + 1),  # blocks, downsamplings, stem and head
        ("swin_tiny_patch4_window7_224", 2 + 2 + 6 + 2 + 3 + 1),
        ("cait_xxs24_224", 24 + 2 + 1),
        ("mixer_s16_224", 8 + 1),
    ],
)
def test_every_parameter_of_a_timm_model_is_in_exactly_one_block(
    name: str, num_blocks: int
) -> None:
    model = timm.create_model(name)
    layout = ParameterLayout.of(model)
    for style in ("all-layer", "per-layer", "per-block"):
        blocks = make_blocks(style, model)
        places = [place for block in blocks.places(layout) for place in block]
        assert sorted(places) == list(range(len(layout.names)))
    assert len(per_block(model)) == num_blocks


def test_blocks_depend_on_names_alone() -> None:
    first, second = knotted(), knotted()
    pairs = dict(second.named_parameters())
    for style in ("all-layer", "per-layer", "per-block"):
        assert make_blocks(style, first) == make_blocks(style, pairs.items())


def test_frozen_parameters_are_in_no_block() -> None:
    model = knotted()
    model.embed.requires_grad_(False)
    assert "embed" not in per_layer(model).members
    with pytest.raises(ValueError, match=r"'embed.bias' of a block is no trainable"):
        ClippedGradientSum(model, FlatClipping(1.0), blocks=per_layer(knotted()))


def test_what_is_no_partition_is_refused() -> None:
    model = knotted()
    everything = dict(all_layer(model).members)
    with pytest.raises(ValueError, match=r"'norm.bias' is in the blocks 'all' and 'more'"):
        ParameterBlocks(members={**everything, "more": ("norm.bias",)})
    with pytest.raises(ValueError, match="block 'empty' has no trainable"):
        ParameterBlocks(members={**everything, "empty": ()})
    with pytest.raises(ValueError, match="at least one block"):
        ParameterBlocks(members={})
    partial = ParameterBlocks(members={"norm": ("norm.weight", "norm.bias")})
    with pytest.raises(ValueError, match="'token' is in no block"):
        ClippedGradientSum(model, FlatClipping(1.0), blocks=partial)
    with pytest.raises(ValueError, match="'token' is in no block"):
        reference_clipped_sum(
            model, lambda _: model.token.sum(), 1, FlatClipping(1.0), blocks=partial
        )
    with pytest.raises(ValueError, match=r"style must be one of .*, not 'layerwise'"):
        make_blocks("layerwise", model)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": ["blocks"], "b": ["norm", "head", "never_used", "embed"]}, r"'token' is in .* \[\]"),
        ({"a": ["blocks.1", "blocks"], "b": ["blocks.1.norm1"]}, r"'token' is in the groups \[\]"),
        (
            {"a": ["token", "embed", "blocks"], "b": ["blocks.2", "norm", "head", "never_used"]},
            r"'blocks.2.norm1.weight' is in the groups \['a', 'b'\]",
        ),
        (
            {"a": ["token", "embed", "blocks", "norm", "head", "never_used", "tail"]},
            "prefix 'tail' of group 'a' fits no",
        ),
        (
            {"a": ["token", "embed", "blocks", "norm", "head", "never"]},
            "'never_used.weight' is in the groups",
        ),
    ],
)
def test_groups_that_are_no_partition_are_refused(
    groups: dict[str, list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        by_prefix(knotted(), groups)


# -- several views of one image --------------------------------------------------------------------


def mean_of_views(model: nn.Module, rows: Tensor, num_views: int) -> Callable[[], Tensor]:
    """Rows [M V, ...], the V views of an image one after the other -> losses [M]."""
    return lambda: model(rows).view(-1, num_views).mean(1)


@pytest.mark.parametrize("style", ["all-layer", "per-layer", "per-block"])
def test_views_are_averaged_before_the_clip(style: str) -> None:
    model, rows, num_views = knotted(), patches_of(12), 3
    blocks, clipping = make_blocks(style, model), FlatClipping(0.3)
    engine = ClippedGradientSum(model, clipping, blocks=blocks)
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])
    engine.accumulate(mean_of_views(model, rows, num_views), weights)
    expected = reference_clipped_sum(
        model,
        lambda i: model(rows[num_views * i : num_views * (i + 1)]).mean(),
        4,
        clipping,
        weights,
        blocks=blocks,
    )
    assert (expected.block_factors_MK[weights > 0] < 1).any()
    assert_equal(engine.flat_sum, expected.flat_sum_P)


@pytest.mark.parametrize("style", ["all-layer", "per-layer", "per-block"])
def test_equal_views_are_one_view(style: str) -> None:
    model, rows = knotted(), patches_of(4)
    blocks = make_blocks(style, model)
    one = ClippedGradientSum(model, FlatClipping(0.3), blocks=blocks)
    four = ClippedGradientSum(model, FlatClipping(0.3), blocks=blocks)
    single = one.accumulate(lambda: model(rows))
    repeated = four.accumulate(mean_of_views(model, rows.repeat_interleave(4, dim=0), 4))
    assert_equal(four.flat_sum, one.flat_sum)
    assert_equal(repeated.block_norms_MK, single.block_norms_MK)
