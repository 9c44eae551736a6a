"""How one gradient becomes private: clipped per-image gradient sums, and their noisy release.

Usable alone, on any torch model that gives one loss per image:

    clipping = FlatClipping(max_grad_norm=1.0)
    clipped = ClippedGradientSum(model, clipping)
    for step in range(num_steps):
        clipped.zero_()
        for images, weights in microbatches(step):          # weight 0 marks padding
            clipped.accumulate(lambda: loss_per_image(model(images)), weights)
        released = release_gradient(
            clipped.flat_sum,
            step=step,
            noise_std=noise_multiplier * clipping.sensitivity,
            divisor=expected_batch_size,
            noise_source=noise,
            layout=clipped.layout,
        )
        released.assign(model)                              # sets .grad
        optimizer.step()

`ClippedGradientSum(model, clipping, blocks=per_block(model))` clips every transformer block apart;
the sensitivity stays the clipper's. Several views of an image count as one image if its loss is the
mean of theirs: the leading dimension of what the model reads may be a multiple of the losses.
`CompiledGradientSum(clipped, losses)` does the same through `torch.compile`.

What epsilon this gives depends on how the microbatches of a step were drawn (Poisson sampling) and
on the key of the noise; both belong to the caller.
"""

from pipeline.dpsgd.balance import measured_flops_per_byte
from pipeline.dpsgd.blocks import (
    ParameterBlocks,
    all_layer,
    by_prefix,
    make_blocks,
    per_block,
    per_layer,
)
from pipeline.dpsgd.clipping import (
    AutomaticClipping,
    Clipping,
    FlatClipping,
    GlobalClipping,
    make_clipping,
)
from pipeline.dpsgd.compiled import CompiledGradientSum
from pipeline.dpsgd.engine import ClippedGradientSum, PerImage
from pipeline.dpsgd.layout import ParameterLayout
from pipeline.dpsgd.noise import NoiseAhead, NoiseSource
from pipeline.dpsgd.reference import ReferenceSum, reference_clipped_sum
from pipeline.dpsgd.release import (
    PublicGradient,
    ReleasedGradient,
    mix,
    public_gradient,
    rank_slice,
    release_gradient,
)
from pipeline.dpsgd.tape import UnsupportedOperationError

__all__ = [
    "AutomaticClipping",
    "ClippedGradientSum",
    "Clipping",
    "CompiledGradientSum",
    "FlatClipping",
    "GlobalClipping",
    "NoiseAhead",
    "NoiseSource",
    "ParameterBlocks",
    "ParameterLayout",
    "PerImage",
    "PublicGradient",
    "ReferenceSum",
    "ReleasedGradient",
    "UnsupportedOperationError",
    "all_layer",
    "by_prefix",
    "make_blocks",
    "make_clipping",
    "measured_flops_per_byte",
    "mix",
    "per_block",
    "per_layer",
    "public_gradient",
    "rank_slice",
    "reference_clipped_sum",
    "release_gradient",
]
