"""The masked autoencoder against a slow float64 numpy one, written from the paper's text."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.models.mae import (
    FEATURE_RULES,
    MaskedAutoencoder,
    denormalise_images,
    normalise_images,
    reconstruction_pictures,
    sincos_positions,
)
from pipeline.models.sizes import SIZES, ModelSize

MICRO = SIZES["micro"]


def make_model(**changes) -> MaskedAutoencoder:
    options = {"image_size": 12, "patch_size": 3} | changes
    model = MaskedAutoencoder(options.pop("size", MICRO), **options)
    model.initialise(torch.Generator().manual_seed(7))
    return model


def make_batch(model: MaskedAutoencoder, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shape = (count, model.channels, model.image_size, model.image_size)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    uniforms = torch.rand((count, model.num_patches), generator=generator, dtype=torch.float64)
    return images, uniforms


# The paper's model, one image at a time, in the paper's order: shuffle, encode, append mask tokens,
# unshuffle, decode, predict every patch, average over the masked ones.


def layer_norm(x: np.ndarray, weights: dict, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: np.ndarray, weights: dict, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def block(x: np.ndarray, weights: dict, name: str, num_heads: int) -> np.ndarray:
    queries, keys, values = np.split(
        linear(layer_norm(x, weights, f"{name}.norm1"), weights, f"{name}.attn.qkv"), 3, axis=-1
    )
    heads = []
    for head in np.split(np.arange(x.shape[-1]), num_heads):
        scores = queries[:, head] @ keys[:, head].T / math.sqrt(len(head))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(scores / scores.sum(-1, keepdims=True) @ values[:, head])
    x = x + linear(np.concatenate(heads, -1), weights, f"{name}.attn.proj")
    hidden = linear(layer_norm(x, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1")
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    return x + linear(hidden, weights, f"{name}.mlp.fc2")


def paper_positions(width: int, grid: int) -> np.ndarray:
    rows = [np.zeros(width)]
    for y in range(grid):
        for x in range(grid):
            parts = []
            for coordinate in (x, y):
                angles = [coordinate / 10000 ** (4 * i / width) for i in range(width // 4)]
                parts += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(np.array(parts))
    return np.array(rows)


def paper_patches(image: np.ndarray, side: int) -> np.ndarray:
    grid = image.shape[1] // side
    return np.array(
        [
            [
                image[channel, y * side + i, x * side + j]
                for i in range(side)
                for j in range(side)
                for channel in range(image.shape[0])
            ]
            for y in range(grid)
            for x in range(grid)
        ]
    )


def paper_loss(model: MaskedAutoencoder, image: np.ndarray, uniforms: np.ndarray) -> float:
    size, side = model.size, model.patch_size
    grid = model.image_size // side
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    patches = paper_patches(image, side)
    # The projection's weight is [D, C, p, q]; bring it to the order of the patches, (p, q, C).
    projection = weights["encoder.patch_embed.proj.weight"].transpose(0, 2, 3, 1)
    embedded = patches @ projection.reshape(size.width, -1).T
    embedded = embedded + weights["encoder.patch_embed.proj.bias"]
    positions = paper_positions(size.width, grid)
    tokens = embedded + positions[1:]

    shuffle = np.argsort(uniforms)
    restore = np.argsort(shuffle)
    num_kept = int(len(patches) * 0.25)
    mask = np.ones(len(patches))
    mask[shuffle[:num_kept]] = 0
    sequence = np.vstack(
        [weights["encoder.cls_token"][0] + positions[:1], tokens[shuffle[:num_kept]]]
    )
    for i in range(size.depth):
        sequence = block(sequence, weights, f"encoder.blocks.{i}", size.num_heads)
    latent = linear(layer_norm(sequence, weights, "encoder.norm"), weights, "decoder_embed")

    filler = np.repeat(weights["mask_token"][0], len(patches) - num_kept, axis=0)
    unshuffled = np.vstack([latent[1:], filler])[restore]
    sequence = np.vstack([latent[:1], unshuffled]) + paper_positions(size.decoder_width, grid)
    for i in range(size.decoder_depth):
        sequence = block(sequence, weights, f"decoder_blocks.{i}", size.decoder_num_heads)
    predicted = linear(layer_norm(sequence, weights, "decoder_norm"), weights, "decoder_pred")[1:]

    target = patches
    if model.norm_pix_loss:
        variance = patches.var(-1, ddof=1, keepdims=True)
        target = (patches - patches.mean(-1, keepdims=True)) / np.sqrt(variance + 1e-6)
    per_patch = ((predicted - target) ** 2).mean(-1)
    return (per_patch * mask).sum() / mask.sum()


def exact_positions(model: MaskedAutoencoder) -> None:
    """The buffers hold float32 roundings; the comparison in float64 wants the exact values."""
    grid = model.image_size // model.patch_size
    for buffer, width in (
        (model.encoder.pos_embed[0], model.size.width),
        (model.decoder_positions, model.size.decoder_width),
    ):
        buffer.copy_(torch.from_numpy(paper_positions(width, grid)))


@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_loss_is_the_papers(norm_pix_loss: bool, channels: int) -> None:
    model = make_model(norm_pix_loss=norm_pix_loss, channels=channels).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too must matter
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()).view_as(parameter)))
    exact_positions(model)
    images, uniforms = make_batch(model)
    losses = model(images, uniforms).detach().numpy()
    expected = [
        paper_loss(model, i, u) for i, u in zip(images.numpy(), uniforms.numpy(), strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-10)


def formula_model(norm_pix_loss: bool) -> MaskedAutoencoder:
    """A model whose weights come from a formula, so that its losses can be written down."""
    size = ModelSize(
        name="golden",
        width=8,
        depth=1,
        num_heads=2,
        decoder_width=8,
        decoder_depth=1,
        decoder_num_heads=2,
    )
    model = MaskedAutoencoder(
        size, image_size=4, patch_size=2, channels=2, norm_pix_loss=norm_pix_loss
    ).double()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            steps = torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter)
            parameter.copy_(0.5 * torch.cos(1.7 * steps + len(name)))
    return model


# Printed by `paper_loss` above, once.
@pytest.mark.parametrize(
    ("norm_pix_loss", "expected"),
    [(False, [1.379461247, 1.300409144]), (True, [1.728239640, 1.674734693])],
)
def test_golden_losses(norm_pix_loss: bool, expected: list[float]) -> None:
    model = formula_model(norm_pix_loss)
    images = torch.sin(torch.arange(64, dtype=torch.float64)).view(2, 2, 4, 4)
    uniforms = torch.tensor([[0.9, 0.2, 0.4, 0.6], [0.3, 0.8, 0.7, 0.1]], dtype=torch.float64)
    np.testing.assert_allclose(model(images, uniforms).detach(), expected, rtol=1e-6)


def test_positions_are_the_papers() -> None:
    np.testing.assert_allclose(sincos_positions(16, 3), paper_positions(16, 3)[1:], atol=1e-15)
    # facebookresearch/mae, get_2d_sincos_pos_embed(4, 2): x before y, sine before cosine.
    one = [math.sin(1), math.cos(1)]
    expected = [[0, 1, 0, 1], [*one, 0, 1], [0, 1, *one], [*one, *one]]
    np.testing.assert_allclose(sincos_positions(4, 2), expected, atol=1e-15)


def test_patches_are_the_papers_and_come_back() -> None:
    model = make_model()
    images, _ = make_batch(model)
    patches = model.patchify(images)
    np.testing.assert_array_equal(patches[1], paper_patches(images[1].numpy(), 3))
    assert torch.equal(model.unpatchify(patches), images)


def test_the_smallest_uniforms_are_kept() -> None:
    model = make_model()
    uniforms = torch.tensor([[0.5] * 16, list(np.linspace(1, 0, 16))])
    kept, masked = model.draw_mask(uniforms)
    assert kept.tolist() == [[0, 1, 2, 3], [15, 14, 13, 12]]  # equal uniforms: in order
    assert masked.shape == (2, 12)
    both = torch.cat([kept, masked], 1).sort(1).values
    assert torch.equal(both, torch.arange(16).expand(2, -1))


def test_hidden_pixels_reach_the_loss_only_as_target() -> None:
    """The encoder sees none of a masked patch: the prediction does not depend on it."""
    model = make_model().double()
    images, uniforms = make_batch(model)
    reconstructed, mask = model.reconstruct(images, uniforms)
    pixels = model.unpatchify(mask.unsqueeze(-1).expand(-1, -1, 27).double())
    again, _ = model.reconstruct(torch.where(pixels > 0, 5.0, images), uniforms)
    assert torch.equal(again, reconstructed)
    assert torch.equal(reconstructed[pixels == 0], images[pixels == 0])
    assert mask.sum(1).tolist() == [12, 12, 12]


@pytest.mark.parametrize("norm_pix_loss", [False, True])
def test_reconstruction_and_loss_agree(norm_pix_loss: bool) -> None:
    """The pictures show what was scored: squared error over hidden patches is the loss again."""
    model = make_model(norm_pix_loss=norm_pix_loss).double()
    images, uniforms = make_batch(model)
    reconstructed, mask = model.reconstruct(images, uniforms)
    difference, truth = (model.patchify(x) for x in (reconstructed - images, images))
    if norm_pix_loss:
        difference = difference / (truth.var(-1, keepdim=True) + 1e-6).sqrt()
    losses = (difference.square().mean(-1) * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(losses, model(images, uniforms))


def test_norm_pix_epsilon_sets_the_floor_of_flat_patches() -> None:
    images = 1e-3 * torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    spread = [
        make_model(norm_pix_loss=True, norm_pix_epsilon=e)
        ._loss_target(make_model().patchify(images))
        .std()
        for e in (1e-6, 1e-2)
    ]
    assert spread[0] > 0.5
    assert spread[1] < 0.05


def test_initialisation_is_the_papers_and_reproducible() -> None:
    model = make_model(size=SIZES["test"], image_size=28, patch_size=7)
    other = make_model(size=SIZES["test"], image_size=28, patch_size=7)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    projection = model.encoder.patch_embed.proj.weight
    bound = math.sqrt(6 / (96 + 3 * 49))
    assert 0.98 * bound < projection.abs().max() <= bound
    for token in (model.encoder.cls_token, model.mask_token):
        assert 0.01 < token.std() < 0.03
    assert torch.equal(model.encoder.norm.weight, torch.ones(96))
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith("bias"))


def test_every_parameter_is_trained() -> None:
    model = make_model()
    images, uniforms = make_batch(model)
    model(images.float(), uniforms).sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


def test_low_precision_still_gives_float32_losses() -> None:
    model = make_model()
    images, uniforms = make_batch(model)
    exact = model(images.float(), uniforms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(images.float(), uniforms)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0)


def test_features_are_means_of_patch_tokens() -> None:
    model = make_model(size=SIZES["test"], image_size=28, patch_size=7)
    images = make_batch(model, 4)[0].float()
    tokens = model.encoder.forward_features(images)
    torch.testing.assert_close(model.features(images), tokens[:, 1:].mean(1))
    stacked = model.features(images, "last_12_blocks")
    assert stacked.shape == (4, 4 * 96)
    # The last block's part, normalised token by token, is where the other rule starts from.
    outputs = []
    for module in model.encoder.blocks:
        module.register_forward_hook(lambda _, __, output: outputs.append(output))
    model.encoder.forward_features(images)
    torch.testing.assert_close(stacked, torch.cat([o[:, 1:].mean(1) for o in outputs], 1))
    both = model.features_by_rule(images, ("last_block", "last_12_blocks"))
    assert torch.equal(both["last_block"], model.features(images))
    assert torch.equal(both["last_12_blocks"], stacked)
    with pytest.raises(ValueError, match="known rules: last_block"):
        model.features(images, "mean")
    assert set(FEATURE_RULES) == {"last_block", "last_12_blocks"}


def test_twelve_blocks_of_a_deeper_encoder() -> None:
    size = ModelSize(name="deep", width=8, depth=14, num_heads=1, decoder_width=8,
                     decoder_depth=1, decoder_num_heads=1)  # fmt: skip
    model = make_model(size=size)
    assert model.features(make_batch(model)[0].float(), "last_12_blocks").shape == (3, 96)


def test_normalise_and_back() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    normalised = normalise_images(images)
    expected = (images[0, 1, 2, 3] / 255 - 0.456) / 0.224
    torch.testing.assert_close(normalised[0, 1, 2, 3], expected)
    assert torch.equal(denormalise_images(normalised), images)
    for wrong in (images.float(), images[:, :1], images[0]):
        with pytest.raises(ValueError, match="uint8"):
            normalise_images(wrong)


def test_pictures_show_original_masked_and_filled_in() -> None:
    model = make_model(norm_pix_loss=True)
    images = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    uniforms = make_batch(model, 2)[1]
    pictures = reconstruction_pictures(model, images, uniforms)
    original, masked, filled = pictures
    assert [p.shape for p in pictures] == [(2, 12, 12, 3)] * 3
    assert all(p.dtype == np.uint8 for p in pictures)
    np.testing.assert_array_equal(original, images.permute(0, 2, 3, 1))
    mask = model.reconstruct(normalise_images(images), uniforms)[1]
    hidden = model.unpatchify(mask.unsqueeze(-1).expand(-1, -1, 27))[:, 0].numpy()
    assert (masked[hidden] == 160).all()
    np.testing.assert_array_equal(masked[~hidden], original[~hidden])
    np.testing.assert_array_equal(filled[~hidden], original[~hidden])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"image_size": 13}, "image_size is 13"),
        ({"mask_ratio": 0.0}, "mask_ratio is 0.0"),
        ({"channels": 0}, "channels is 0"),
        ({"norm_pix_epsilon": 0.0}, "norm_pix_epsilon"),
        ({"patch_size": 1, "channels": 1, "norm_pix_loss": True}, "norm_pix_loss"),
    ],
)
def test_models_that_cannot_be_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_model(**options)


def test_wrong_shapes_are_refused() -> None:
    model = make_model()
    images, uniforms = make_batch(model)
    with pytest.raises(ValueError, match="images have shape"):
        model(images[..., :9].float(), uniforms)
    with pytest.raises(ValueError, match="mask_uniforms have shape"):
        model(images.float(), uniforms[:, :9])
