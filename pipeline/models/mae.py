"""A masked autoencoder (MAE) on timm blocks: images and mask uniforms in, one loss per image out.

Shape letters: M images of a microbatch, C channels, H and W pixels, T patches of an image,
K kept (visible) patches, R removed (masked) patches, L tokens of a sequence, P numbers in a patch,
D encoder width, E decoder width, F features.

Source: arXiv 2111.06377 (MAE), with the sizes of arXiv 2306.08842 (ViP).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.models.sizes import ModelSize, num_patches, num_visible_patches

IMAGE_MEAN = (0.485, 0.456, 0.406)  # ImageNet's, public constants: not taken from anybody's images
IMAGE_STD = (0.229, 0.224, 0.225)
TOKEN_STD = 0.02

FEATURE_RULES: dict[str, str] = {
    "last_block": "mean of the patch tokens after the final norm (no class token)",
    "last_12_blocks": "means of the patch tokens (no class token) of the last 12 blocks' outputs, "
    "concatenated (of all blocks where there are fewer)",
}


class MaskedAutoencoder(nn.Module):
    """Encoder (a timm VisionTransformer) of the visible patches, light decoder of all patches.

    Args:
        size: Widths, depths and heads.
        image_size: Pixels of a side; a multiple of `patch_size`.
        patch_size: Pixels of a patch's side.
        norm_pix_loss: Predict each patch normalised by its own mean and variance; losses with and
            without are not comparable.
        mask_ratio: Part of the patches that is hidden, in (0, 1).
        channels: Colour channels.
        norm_pix_epsilon: Added to a patch's variance under `norm_pix_loss` (MAE: 1e-6); larger
            values keep the compression noise of flat patches from becoming the target.
    Raises:
        ValueError: naming the argument that does not fit.

    Attributes:
        checkpoints_activations: Keep a block's input alone for the backward and compute the rest
            again: the same numbers for more time and less memory. It may be set at any time and is
            no part of the state.

    Guarantees:
        1. One image's loss depends on that image, its uniforms and the weights alone: changing
           another row of the microbatch leaves it bit-identical (test_images_do_not_couple).
        2. Positions are buffers: no parameter list, optimizer or `requires_grad_` reaches them
           (test_fixed_positions_are_never_trained).
        3. Every trainable parameter is used, by linear, layer_norm, conv2d and expand calls alone
           (test_every_parameter_is_trained).
        4. Nothing is drawn at random: the mask is a function of the given uniforms, and there is no
           dropout; train and eval mode agree (test_images_do_not_couple).
        5. `checkpoints_activations` changes no loss and no gradient by a bit
           (test_activation_checkpointing_changes_nothing).
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        image_size: int = 224,
        patch_size: int = 16,
        norm_pix_loss: bool = False,
        mask_ratio: float = 0.75,
        channels: int = 3,
        norm_pix_epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels is {channels}; it must be at least 1")
        if not norm_pix_epsilon > 0:
            raise ValueError(f"norm_pix_epsilon is {norm_pix_epsilon}; it must be positive")
        if norm_pix_loss and channels * patch_size**2 < 2:
            raise ValueError("norm_pix_loss needs patches of two numbers or more: patch_size is 1")
        self.size = size
        self.image_size = image_size
        self.patch_size = patch_size
        self.channels = channels
        self.mask_ratio = mask_ratio
        self.norm_pix_loss = norm_pix_loss
        self.norm_pix_epsilon = norm_pix_epsilon
        self.checkpoints_activations = False
        self.num_patches = num_patches(image_size, patch_size)
        self.num_visible = num_visible_patches(image_size, patch_size, mask_ratio)

        self.encoder = VisionTransformer(
            img_size=image_size,
            patch_size=patch_size,
            in_chans=channels,
            num_classes=0,
            global_pool="avg",
            fc_norm=False,
            embed_dim=size.width,
            depth=size.depth,
            num_heads=size.num_heads,
            mlp_ratio=size.mlp_ratio,
            class_token=True,
            norm_layer=LayerNorm,  # epsilon 1e-6
            weight_init="skip",
        )
        self._fix_encoder_positions()

        self.decoder_embed = nn.Linear(size.width, size.decoder_width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, size.decoder_width))
        self.decoder_blocks = nn.Sequential(
            *(
                Block(
                    size.decoder_width,
                    size.decoder_num_heads,
                    mlp_ratio=size.mlp_ratio,
                    qkv_bias=True,
                    norm_layer=LayerNorm,
                )
                for _ in range(size.decoder_depth)
            )
        )
        self.decoder_norm = LayerNorm(size.decoder_width)
        self.decoder_pred = nn.Linear(size.decoder_width, channels * patch_size**2)
        self.decoder_positions: Tensor
        self.register_buffer(
            "decoder_positions", self._positions(size.decoder_width), persistent=False
        )
        self.initialise()

    # What is computed

    def forward(self, images_MCHW: Tensor, mask_uniforms_MT: Tensor) -> Tensor:
        """The loss of each image: squared error over its masked patches.

        Args:
            images_MCHW: Floating point, normalised (`normalise_images`).
            mask_uniforms_MT: Uniform numbers in [0, 1); the K patches with the smallest are kept.
        Returns:
            losses_M: mean over an image's masked patches of the mean over the patch's numbers.
        Raises:
            ValueError: when a shape is not the one this model was built for.

        Source: arXiv 2111.06377, section 3.
        """
        self._check_shapes(images_MCHW, mask_uniforms_MT)
        patches_MTP = self.patchify(images_MCHW)
        kept_MK, masked_MR = self.draw_mask(mask_uniforms_MT)
        predicted_MRP = self._decode(self._encode(patches_MTP, kept_MK), kept_MK, masked_MR)
        target_MRP = self._loss_target(_take(patches_MTP, masked_MR))
        return (predicted_MRP.to(target_MRP.dtype) - target_MRP).square().mean((1, 2))

    def draw_mask(self, mask_uniforms_MT: Tensor) -> tuple[Tensor, Tensor]:
        """Patch indices that stay (kept_MK) and are hidden (masked_MR), in order of uniform."""
        order_MT = mask_uniforms_MT.argsort(dim=1, stable=True)
        return order_MT[:, : self.num_visible], order_MT[:, self.num_visible :]

    def patchify(self, images_MCHW: Tensor) -> Tensor:
        """Images as rows of patches_MTP, each patch row by row with the channels innermost."""
        side, grid = self.patch_size, self.image_size // self.patch_size
        # M, C, patch row, pixel row, patch column, pixel column
        cells = images_MCHW.reshape(-1, self.channels, grid, side, grid, side)
        return cells.permute(0, 2, 4, 3, 5, 1).reshape(-1, self.num_patches, self._patch_numbers)

    def unpatchify(self, patches_MTP: Tensor) -> Tensor:
        """The inverse of `patchify`: patches_MTP to images_MCHW."""
        side, grid = self.patch_size, self.image_size // self.patch_size
        # M, patch row, patch column, pixel row, pixel column, C
        cells = patches_MTP.reshape(-1, grid, grid, side, side, self.channels)
        return cells.permute(0, 5, 1, 3, 2, 4).reshape(
            -1, self.channels, self.image_size, self.image_size
        )

    @torch.no_grad()
    def reconstruct(self, images_MCHW: Tensor, mask_uniforms_MT: Tensor) -> tuple[Tensor, Tensor]:
        """Images with their masked patches replaced by the prediction, for looking at.

        Returns:
            images_MCHW in the normalised space of the input, and mask_MT (True = was hidden). Under
            `norm_pix_loss` a prediction has no brightness or contrast of its own: it is shown
            with the true patch's.
        """
        self._check_shapes(images_MCHW, mask_uniforms_MT)
        patches_MTP = self.patchify(images_MCHW)
        kept_MK, masked_MR = self.draw_mask(mask_uniforms_MT)
        predicted_MRP = self._decode(self._encode(patches_MTP, kept_MK), kept_MK, masked_MR)
        predicted_MRP = predicted_MRP.to(patches_MTP.dtype)
        if self.norm_pix_loss:
            mean, deviation = self._patch_statistics(_take(patches_MTP, masked_MR))
            predicted_MRP = predicted_MRP * deviation + mean
        index_MRP = masked_MR.unsqueeze(-1).expand_as(predicted_MRP)
        mask_MT = torch.zeros_like(mask_uniforms_MT, dtype=torch.bool).scatter_(1, masked_MR, True)
        return self.unpatchify(patches_MTP.scatter(1, index_MRP, predicted_MRP)), mask_MT

    def features(self, images_MCHW: Tensor, rule: str = "last_block") -> Tensor:
        """Frozen features_MF of whole (unmasked) images by one of `FEATURE_RULES`.

        Args:
            images_MCHW: Floating point, normalised.
            rule: "last_block" or "last_12_blocks".
        Raises:
            ValueError: for an unknown rule.
        """
        return self.features_by_rule(images_MCHW, (rule,))[rule]

    @torch.no_grad()
    def features_by_rule(self, images_MCHW: Tensor, rules: Sequence[str]) -> dict[str, Tensor]:
        """`features` by several rules from one pass."""
        for rule in rules:
            if rule not in FEATURE_RULES:
                known = ", ".join(FEATURE_RULES)
                raise ValueError(f"feature rule is {rule!r}; known rules: {known}")
        final_MTD, blocks_MTD = cast(
            "tuple[Tensor, list[Tensor]]",
            self.encoder.forward_intermediates(
                images_MCHW, indices=min(12, self.size.depth), norm=False, output_fmt="NLC"
            ),
        )
        found = {"last_block": final_MTD[:, self.encoder.num_prefix_tokens :].mean(1)}
        if "last_12_blocks" in rules:
            found["last_12_blocks"] = torch.cat([block.mean(1) for block in blocks_MTD], dim=1)
        return {rule: found[rule] for rule in rules}

    # The two halves

    def _encode(self, patches_MTP: Tensor, kept_MK: Tensor) -> Tensor:
        """Latent tokens_MLD (class token first, L = 1 + K) of the kept patches only."""
        side = self.patch_size
        kept_MKP = _take(patches_MTP, kept_MK)
        # The kept patches laid side by side are an image of one row of patches, so that timm's own
        # patch projection runs unmodified and embeds nothing that will be thrown away.
        cells = kept_MKP.reshape(*kept_MK.shape, side, side, self.channels).permute(0, 4, 2, 1, 3)
        row_MCHW = cells.reshape(len(kept_MK), self.channels, side, self.num_visible * side)
        embedded_MKD = self.encoder.patch_embed.proj(row_MCHW).flatten(2).transpose(1, 2)
        class_token_M1D = self._class_token.expand(len(kept_MK), -1, -1)
        tokens_MLD = torch.cat([class_token_M1D.to(embedded_MKD.dtype), embedded_MKD], dim=1)
        tokens_MLD = tokens_MLD + self._encoder_positions[_with_class_token(kept_MK)]
        return self.encoder.norm(self._through(self.encoder.blocks, tokens_MLD))

    def _decode(self, latent_MLD: Tensor, kept_MK: Tensor, masked_MR: Tensor) -> Tensor:
        """Predictions predicted_MRP of the masked patches, from all tokens.

        The tokens keep the order class, kept, masked: attention does not see the order, only the
        positions that are added, so that sorting them back into the image would change nothing.
        """
        mask_tokens_MRE = self.mask_token.expand(*masked_MR.shape, -1)
        visible_MLE = self.decoder_embed(latent_MLD)
        tokens_MLE = torch.cat([visible_MLE, mask_tokens_MRE.to(visible_MLE.dtype)], dim=1)
        order_ML = _with_class_token(torch.cat([kept_MK, masked_MR], dim=1))
        tokens_MLE = tokens_MLE + self.decoder_positions[order_ML]
        tokens_MLE = self._through(self.decoder_blocks, tokens_MLE)
        return self.decoder_pred(self.decoder_norm(tokens_MLE[:, -masked_MR.shape[1] :]))

    def _through(self, blocks: nn.Sequential, tokens_MLF: Tensor) -> Tensor:
        """Tokens after the blocks, in order."""
        if not (self.checkpoints_activations and torch.is_grad_enabled()):
            return blocks(tokens_MLF)
        for block in blocks:
            tokens_MLF = checkpoint(block, tokens_MLF, use_reentrant=False)
        return tokens_MLF

    def _loss_target(self, patches_MRP: Tensor) -> Tensor:
        if not self.norm_pix_loss:
            return patches_MRP
        mean, deviation = self._patch_statistics(patches_MRP)
        return (patches_MRP - mean) / deviation

    def _patch_statistics(self, patches_MRP: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and (unbiased, never zero) standard deviation of each patch, [M, R, 1]."""
        # Two sums instead of torch.var_mean, which is several times slower on CPU.
        mean = patches_MRP.mean(-1, keepdim=True)
        squares = (patches_MRP - mean).square().sum(-1, keepdim=True)
        return mean, (squares / (self._patch_numbers - 1) + self.norm_pix_epsilon).sqrt()

    # How it starts

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights anew: Xavier-uniform matrices, N(0, .02) tokens, norms 1, biases 0.

        Args:
            generator: Source of randomness on the weights' device; torch's default one if None.

        Source: arXiv 2111.06377, appendix A.1.
        """
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                # The patch projection is a matrix [D, P]: its fans are those of a linear layer.
                nn.init.xavier_uniform_(module.weight.flatten(1), generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self._class_token, std=TOKEN_STD, generator=generator)
        nn.init.normal_(self.mask_token, std=TOKEN_STD, generator=generator)

    def _fix_encoder_positions(self) -> None:
        """Turn timm's trainable positions into a buffer of the same name: same state dict."""
        del self.encoder.pos_embed
        self.encoder.register_buffer("pos_embed", self._positions(self.size.width).unsqueeze(0))

    def _positions(self, width: int) -> Tensor:
        """Positions [1 + T, width]: zeros for the class token, then the patches'."""
        patches = sincos_positions(width, self.image_size // self.patch_size)
        return torch.tensor(np.pad(patches, ((1, 0), (0, 0))), dtype=torch.float32)

    @property
    def _class_token(self) -> Tensor:
        return cast(Tensor, self.encoder.cls_token)

    @property
    def _encoder_positions(self) -> Tensor:
        return cast(Tensor, self.encoder.pos_embed)[0]

    @property
    def _patch_numbers(self) -> int:
        return self.channels * self.patch_size**2

    def _check_shapes(self, images_MCHW: Tensor, mask_uniforms_MT: Tensor) -> None:
        image_shape = (self.channels, self.image_size, self.image_size)
        if images_MCHW.dim() != 4 or tuple(images_MCHW.shape[1:]) != image_shape:
            raise ValueError(
                f"images have shape {tuple(images_MCHW.shape)}; this model takes [M, "
                f"{self.channels}, {self.image_size}, {self.image_size}]: crop or resize them first"
            )
        if tuple(mask_uniforms_MT.shape) != (len(images_MCHW), self.num_patches):
            raise ValueError(
                f"mask_uniforms have shape {tuple(mask_uniforms_MT.shape)}; "
                f"{len(images_MCHW)} images of {self.num_patches} patches need "
                f"[{len(images_MCHW)}, {self.num_patches}]"
            )


def sincos_positions(width: int, grid: int) -> np.ndarray:
    """Fixed two-dimensional sine-cosine positions [grid * grid, width], row by row.

    The first half of the features encodes the column, the second the row; in each half sines
    come before cosines, at frequencies 10000^(-i / (width / 4)).

    Source: facebookresearch/mae, util/pos_embed.py.
    """
    frequencies = 10000.0 ** -(np.arange(width // 4) / (width / 4))
    row, column = np.divmod(np.arange(grid * grid), grid)
    angles = [np.outer(axis, frequencies) for axis in (column, row)]
    return np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1)


def normalise_images(images_M3HW: Tensor) -> Tensor:
    """uint8 images to float32 with ImageNet's mean and standard deviation, on the same device.

    Raises:
        ValueError: for another dtype or another number of channels.
    """
    if images_M3HW.dtype != torch.uint8 or images_M3HW.dim() != 4 or images_M3HW.shape[1] != 3:
        raise ValueError(
            f"images are {images_M3HW.dtype} {tuple(images_M3HW.shape)}; normalise_images takes "
            f"uint8 [M, 3, H, W]"
        )
    mean, deviation = _colour_constants(images_M3HW)
    return images_M3HW.float().mul_(1 / (255 * deviation)).sub_(mean / deviation)


def denormalise_images(images_M3HW: Tensor) -> Tensor:
    """The inverse of `normalise_images`: rounded to uint8, values outside the range cut off."""
    mean, deviation = _colour_constants(images_M3HW)
    return ((images_M3HW.float() * deviation + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def reconstruction_pictures(
    model: MaskedAutoencoder, images_M3HW: Tensor, mask_uniforms_MT: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures of public images for a report: original, masked (hidden patches grey), filled in.

    Args:
        model: The model, on any device.
        images_M3HW: uint8 images, from a public set.
        mask_uniforms_MT: Uniforms in [0, 1) that choose the hidden patches.
    Returns:
        Three uint8 arrays [M, H, W, 3].
    """
    device = model.mask_token.device
    images_M3HW = images_M3HW.to(device)
    filled_M3HW, mask_MT = model.reconstruct(
        normalise_images(images_M3HW), mask_uniforms_MT.to(device)
    )
    grey_MTP = model.patchify(images_M3HW).masked_fill(mask_MT.unsqueeze(-1), 160)
    pictures = (images_M3HW, model.unpatchify(grey_MTP), denormalise_images(filled_M3HW))
    original, masked, filled = (p.permute(0, 2, 3, 1).cpu().numpy() for p in pictures)
    return original, masked, filled


def _colour_constants(images_M3HW: Tensor) -> tuple[Tensor, Tensor]:
    mean, deviation = (
        torch.tensor(values, device=images_M3HW.device).view(1, 3, 1, 1)
        for values in (IMAGE_MEAN, IMAGE_STD)
    )
    return mean, deviation


def _take(patches_MTX: Tensor, index_MK: Tensor) -> Tensor:
    """Rows of each image's own patches: [M, K, X]."""
    return patches_MTX.gather(1, index_MK.unsqueeze(-1).expand(-1, -1, patches_MTX.shape[-1]))


def _with_class_token(index_ML: Tensor) -> Tensor:
    """Patch indices as rows of the position table, the class token's row 0 put before them."""
    return torch.cat([index_ML.new_zeros(len(index_ML), 1), index_ML + 1], dim=1)
