"""The named model sizes and what can be counted about them without building one; no torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Widths, depths and heads of a masked autoencoder; image and patch size are chosen apart.

    Args:
        name: How recipes and reports call it.
        width: Features of a token in the encoder; a multiple of 4 and of `num_heads`.
        depth: Transformer blocks of the encoder.
        num_heads: Attention heads of each encoder block.
        decoder_width: Features of a token in the decoder; a multiple of 4 and `decoder_num_heads`.
        decoder_depth: Transformer blocks of the decoder.
        decoder_num_heads: Attention heads of each decoder block.
        mlp_ratio: Hidden width of a block's MLP over its width, in both halves.
    Raises:
        ValueError: naming the field that does not fit.
    """

    name: str
    width: int
    depth: int
    num_heads: int
    decoder_width: int = 512
    decoder_depth: int = 4
    decoder_num_heads: int = 16
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for field in ("depth", "num_heads", "decoder_depth", "decoder_num_heads", "mlp_ratio"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        halves = (("width", "num_heads"), ("decoder_width", "decoder_num_heads"))
        for field, heads in halves:
            width, num_heads = getattr(self, field), getattr(self, heads)
            if width < 4 or width % 4 or width % num_heads:
                raise ValueError(
                    f"{field} is {width}; it must be a positive multiple of 4 (for the positions) "
                    f"and of {heads} = {num_heads} (for the attention): change one of the two"
                )


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """How many numbers a model trains; fixed positions are not among them."""

    encoder: int
    decoder: int

    @property
    def trainable(self) -> int:
        """Encoder and decoder together: the coordinates that one private step releases."""
        return self.encoder + self.decoder


# nano to large: ViP (arXiv 2306.08842), one decoder for all. huge: ViT-Huge, whose published form
# has patch_size 14 (arXiv 2111.06377), with the same decoder. test: the demo on two CPU cores.
# micro: unit tests.
SIZES: dict[str, ModelSize] = {
    size.name: size
    for size in (
        ModelSize(name="nano", width=192, depth=12, num_heads=12),
        ModelSize(name="tiny", width=384, depth=12, num_heads=12),
        ModelSize(name="small", width=576, depth=12, num_heads=12),
        ModelSize(name="base", width=768, depth=12, num_heads=12),
        ModelSize(name="large", width=1024, depth=24, num_heads=16),
        ModelSize(name="huge", width=1280, depth=32, num_heads=16),
        ModelSize(
            name="test",
            width=96,
            depth=4,
            num_heads=4,
            decoder_width=64,
            decoder_depth=1,
            decoder_num_heads=4,
        ),
        ModelSize(
            name="micro",
            width=16,
            depth=2,
            num_heads=2,
            decoder_width=12,
            decoder_depth=1,
            decoder_num_heads=2,
        ),
    )
}


def model_size(name: str) -> ModelSize:
    """The size of that name. Raises ValueError with the known names."""
    if name not in SIZES:
        raise ValueError(f"model size is {name!r}; known sizes: {', '.join(SIZES)}")
    return SIZES[name]


def num_patches(image_size: int, patch_size: int) -> int:
    """Patches of a square image. Raises ValueError if the patches do not tile it."""
    if image_size < 1 or patch_size < 1 or image_size % patch_size:
        raise ValueError(
            f"image_size is {image_size}, patch_size {patch_size}: patches must tile the image; "
            f"choose an image_size that is a multiple of patch_size"
        )
    return (image_size // patch_size) ** 2


def num_visible_patches(image_size: int, patch_size: int, mask_ratio: float = 0.75) -> int:
    """Patches that the encoder sees, int(T (1 - mask_ratio)).

    Raises:
        ValueError: if none would be visible, or none masked.
    """
    patches = num_patches(image_size, patch_size)
    visible = int(patches * (1 - mask_ratio)) if 0 < mask_ratio < 1 else 0
    if not 1 <= visible < patches:
        raise ValueError(
            f"mask_ratio is {mask_ratio} over {patches} patches: at least one patch must stay "
            f"visible and one be masked; use a ratio such as 0.75 or more patches"
        )
    return visible


def num_parameters(
    size: ModelSize, image_size: int = 224, patch_size: int = 16, channels: int = 3
) -> int:
    """All trainable parameters: the coordinates that one private step releases."""
    return parameter_count(size, image_size, patch_size, channels).trainable


def parameter_count(
    size: ModelSize, image_size: int = 224, patch_size: int = 16, channels: int = 3
) -> ParameterCount:
    """Trainable parameters of each half by formula; equal to the built model's (a test).

    The image size changes no trainable parameter (positions are fixed); it is checked all the same.

    Source: the counts table of ViP, arXiv 2306.08842.
    """
    num_patches(image_size, patch_size)
    patch_pixels = channels * patch_size**2
    width, narrow = size.width, size.decoder_width
    patch_projection = patch_pixels * width + width
    class_token = width
    encoder_blocks = size.depth * _block_parameters(width, size.mlp_ratio)
    decoder_entry = width * narrow + narrow
    mask_token = narrow
    decoder_blocks = size.decoder_depth * _block_parameters(narrow, size.mlp_ratio)
    prediction = narrow * patch_pixels + patch_pixels
    return ParameterCount(
        encoder=patch_projection + class_token + encoder_blocks + 2 * width,
        decoder=decoder_entry + mask_token + decoder_blocks + 2 * narrow + prediction,
    )


def _block_parameters(width: int, mlp_ratio: int) -> int:
    """Two norms, query-key-value, projection and a two-layer MLP, all with biases."""
    norms = 2 * 2 * width
    attention = 4 * width**2 + 4 * width
    mlp = 2 * mlp_ratio * width**2 + (mlp_ratio + 1) * width
    return norms + attention + mlp
