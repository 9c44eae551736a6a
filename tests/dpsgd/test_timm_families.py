"""Vision models as timm makes them train privately unmodified, equal to the specification."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import StdConv2d
from timm.models.mlp_mixer import MlpMixer
from timm.models.resnetv2 import ResNetV2
from torch import nn

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    UnsupportedOperationError,
    reference_clipped_sum,
)

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
WINDOWS = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 12,
    "depths": (2, 2),
    "num_heads": (2, 2),
}
CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}


def named(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, drop_path_rate=0.0, **options)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": named("vit_tiny_patch16_224", **TINY),
    "vit with registers": named("vit_little_patch16_reg4_gap_256", **TINY),
    "vit with attention pooling": named("vit_base_patch16_siglip_224", **TINY),
    "vit with relative positions": named("vit_relpos_small_patch16_224", **TINY),
    "deit": named("deit_tiny_distilled_patch16_224", **TINY),
    "beit": named("beit_base_patch16_224", **TINY),
    "eva": named("eva02_tiny_patch14_224", **TINY),
    "cait": named("cait_xxs24_224", **TINY),
    "naflex vit": named("naflexvit_base_patch16_gap", **TINY),
    "swin": named("swin_tiny_patch4_window7_224", **WINDOWS),
    "swin v2": named("swinv2_tiny_window8_256", **WINDOWS),
    "mixer": lambda: MlpMixer(5, img_size=32, patch_size=8, num_blocks=2, embed_dim=24),
    "convnext": named("convnext_atto", **CONVNEXT),
    "convnext v2": named("convnextv2_atto", **CONVNEXT),
    "group norm resnet": lambda: ResNetV2(
        layers=(1, 1),
        channels=(128, 128),
        stem_chs=32,
        num_classes=5,
        stem_type="fixed",
        conv_layer=partial(StdConv2d, eps=1e-8),
    ),
}


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]().double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # one image alone would drop other numbers
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():  # so that nothing is zero or one
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_reference(family: str) -> None:
    model = made(family)
    images, labels = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.arange(3)
    clipping = FlatClipping(0.5)
    expected = reference_clipped_sum(
        model, lambda i: F.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]), 3, clipping
    )
    for mode in ("auto", "ghost"):
        engine = ClippedGradientSum(model, clipping, mode=mode)
        engine.accumulate(lambda: F.cross_entropy(model(images), labels, reduction="none"))
        torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-12)


def test_a_batch_norm_resnet_is_refused_and_accepted_with_fixed_statistics() -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=5)
    images, labels = torch.randn(2, 3, 32, 32), torch.arange(2)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match=r"batch_norm.*GroupNorm.*eval\(\)"):
        engine.accumulate(lambda: F.cross_entropy(model(images), labels, reduction="none"))
    assert engine.flat_sum.count_nonzero() == 0
    model.eval()
    engine.accumulate(lambda: F.cross_entropy(model(images), labels, reduction="none"))
    assert engine.flat_sum.count_nonzero() > 0
