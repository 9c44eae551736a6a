"""The paper's counts, by formula and by building; sizes that cannot work are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import timm
import torch

from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import (
    SIZES,
    ModelSize,
    model_size,
    num_parameters,
    num_patches,
    num_visible_patches,
    parameter_count,
)

# Millions of parameters (encoder, decoder, trainable), arXiv 2306.08842.
PAPER_COUNTS = {
    "nano": (5.49, 13.10, 18.59),
    "tiny": (21.59, 13.20, 34.79),
    "small": (48.31, 13.30, 61.61),
    "base": (85.65, 13.40, 99.05),
    "large": (303.10, 13.53, 316.63),
}


@pytest.mark.parametrize("name", PAPER_COUNTS)
def test_counts_are_the_papers(name: str) -> None:
    count = parameter_count(SIZES[name])
    millions = [round(n / 1e6, 2) for n in (count.encoder, count.decoder, count.trainable)]
    assert tuple(millions) == PAPER_COUNTS[name]


def test_huge_is_timms() -> None:
    """As large as timm's own, less the positions, which timm trains; a state dict that it takes."""
    with torch.device("meta"):
        known = timm.create_model("vit_huge_patch14_224", num_classes=0)
        model = MaskedAutoencoder(SIZES["huge"], image_size=224, patch_size=14)
    positions = known.pos_embed.numel()
    count = parameter_count(SIZES["huge"], image_size=224, patch_size=14)
    assert count.encoder == sum(p.numel() for p in known.parameters()) - positions == 630_435_840
    assert count.decoder == 13_568_588
    assert count.trainable == sum(p.numel() for p in model.parameters())
    shapes = {name: tensor.shape for name, tensor in known.state_dict().items()}
    assert {name: t.shape for name, t in model.encoder.state_dict().items()} == shapes


@pytest.mark.parametrize("name", SIZES)
def test_formula_counts_the_built_model(name: str) -> None:
    with torch.device("meta"):
        model = MaskedAutoencoder(SIZES[name], image_size=224, patch_size=16)
    trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    encoder = sum(n for name, n in trainable.items() if name.startswith("encoder."))
    count = parameter_count(SIZES[name])
    assert (count.encoder, count.trainable) == (encoder, sum(trainable.values()))
    assert num_parameters(SIZES[name]) == count.trainable


def test_counts_follow_patch_and_channels() -> None:
    with torch.device("meta"):
        model = MaskedAutoencoder(SIZES["test"], image_size=28, patch_size=7, channels=1)
    assert num_parameters(SIZES["test"], 28, 7, 1) == sum(p.numel() for p in model.parameters())


def test_visible_patches() -> None:
    assert num_visible_patches(224, 16) == 49
    assert num_visible_patches(28, 7) == 4


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: model_size("giant"), "known sizes: nano"),
        (lambda: num_patches(225, 16), "image_size is 225"),
        (lambda: num_patches(16, 0), "patch_size 0"),
        (lambda: num_visible_patches(28, 7, 1.0), "mask_ratio is 1.0"),
        (lambda: num_visible_patches(28, 14, 0.9), "mask_ratio is 0.9"),
        (lambda: ModelSize(name="x", width=30, depth=1, num_heads=2), "width is 30"),
        (lambda: ModelSize(name="x", width=32, depth=1, num_heads=5), "num_heads = 5"),
        (lambda: ModelSize(name="x", width=32, depth=0, num_heads=4), "depth is 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


def test_sizes_need_no_torch() -> None:
    check = "import sys, pipeline.models.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
