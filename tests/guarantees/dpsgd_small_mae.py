"""A small masked autoencoder on timm blocks, for the tests of the DP engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

IMAGE, PATCH, PATCHES, KEPT = 16, 4, 16, 5


class SmallMae(nn.Module):
    """Keeps 5 of 16 patches; the loss is the mean over the masked patches that count.

    How many count differs from image to image ("unequal masks").
    """

    def __init__(self, width: int = 24, decoder_width: int = 16) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, PATCH, PATCH)
        self.class_token = nn.Parameter(0.1 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, PATCHES + 1, width))
        self.blocks = nn.ModuleList(
            [Block(width, 4, qkv_bias=True, init_values=0.5), Block(width, 4, qk_norm=True)]
        )
        self.norm = nn.LayerNorm(width)
        self.to_decoder = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(0.1 * torch.randn(1, 1, decoder_width))
        self.register_buffer("decoder_positions", torch.randn(1, PATCHES, decoder_width))
        self.decoder = Block(decoder_width, 2, qkv_bias=True)
        self.predict = nn.Linear(decoder_width, 3 * PATCH**2)
        self.never_used = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        """images [M, 3, 16, 16], order [M, 16] a permutation each, counts [M, 11] 0 or 1."""
        num_images = len(images)
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(num_images, PATCHES, -1)
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2) + self.positions[:, 1:]
        tokens = torch.gather(tokens, 1, order[:, :KEPT, None].expand(-1, -1, tokens.shape[2]))
        class_token = (self.class_token + self.positions[:, :1]).expand(num_images, -1, -1)
        tokens = torch.cat([class_token, tokens], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.to_decoder(self.norm(tokens))[:, 1:]
        hidden = self.mask_token.expand(num_images, PATCHES - KEPT, -1)
        tokens = torch.cat([tokens, hidden], dim=1)
        restore = order.argsort(dim=1)[:, :, None].expand(-1, -1, tokens.shape[2])
        tokens = torch.gather(tokens, 1, restore) + self.decoder_positions
        predicted = self.predict(self.decoder(tokens))
        masked = order[:, KEPT:, None].expand(-1, -1, predicted.shape[2])
        errors = (predicted - patches).gather(1, masked).square().mean(2)
        return (errors * counts).sum(1) / counts.sum(1)


def small_mae(dtype: torch.dtype = torch.float64, seed: int = 0) -> SmallMae:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return SmallMae().to(dtype)


def batch(
    num_images: int, dtype: torch.dtype = torch.float64, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, orders and counts for `SmallMae.forward`."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(num_images, 3, IMAGE, IMAGE, generator=generator).to(dtype)
    order = torch.rand(num_images, PATCHES, generator=generator).argsort(dim=1)
    counts = (torch.rand(num_images, PATCHES - KEPT, generator=generator) < 0.6).to(dtype)
    counts[:, 0] = 1
    return images, order, counts


def losses_of(model: SmallMae, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """What the engine calls."""
    return lambda: model(*inputs)


def loss_of(model: SmallMae, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[int], Tensor]:
    """What the reference calls: one image alone."""
    return lambda image: model(*(each[image : image + 1] for each in inputs))[0]
