"""What `step.py` compares: the plain step, ours, and the peers, on one masked autoencoder.

Every method is a function from a `Workload` to its step; a step returns the (clipped) sum of
gradients by parameter name, so that a test can compare what is timed (tests/test_benchmarks.py).

Fairness to the peers:
- Opacus knows parameters of modules only. The class token and the mask token, which no module owns,
  are frozen for it (1,280 of 98 million numbers at base), and timm's LayerNorm is registered with
  Opacus's own rule for torch's. Without either, the whole model would go through its slow fallback.
- vmap has a second row that clips chunk by chunk, which is faster on a CPU than to hold the
  gradients of a whole microbatch; and it computes attention by products, as fused attention has no
  batching rule and would run image by image.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from timm.layers import LayerNorm
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline import recipe
from pipeline.dpsgd import (
    ClippedGradientSum,
    CompiledGradientSum,
    FlatClipping,
    NoiseAhead,
    rank_slice,
    release_gradient,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import model_size
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import KeyedNoise
from pipeline.training.optimizers import make_optimizer, set_rate

Step = Callable[[], Mapping[str, Tensor]]

NOISE_MULTIPLIER = 0.5  # any: drawing noise takes as long whatever it is multiplied by
RATE = 1e-6  # a small one: weights stay about the same over the rounds


class Unavailable(Exception):
    """A method, or a measure, that cannot be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and one microbatch, decoded and on the device.

    Args:
        size: one of `pipeline.models.sizes`.
        image_size: pixels of a side; patches have 16.
        microbatch: images of one device pass, M.
        logical_batch: images of a whole step, a multiple of M.
        vmap_chunk: images whose gradients vmap_chunked holds at a time.
        device: "cpu" or "cuda".
        max_grad_norm: what an image's gradient is clipped to.
        is_alone: no other method uses this workload's model.
    """

    size: str
    image_size: int
    microbatch: int
    logical_batch: int
    vmap_chunk: int
    device: str
    max_grad_norm: float = 1.0
    is_alone: bool = False

    @cached_property
    def model(self) -> MaskedAutoencoder:
        """The model that all methods share which change nothing in it."""
        model = MaskedAutoencoder(model_size(self.size), image_size=self.image_size, patch_size=16)
        model.initialise(torch.Generator().manual_seed(0))
        return model.to(self.device)

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        """images_M3HW and mask_uniforms_MT."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(
            self.microbatch, 3, self.image_size, self.image_size, generator=generator
        )
        uniforms = torch.rand(self.microbatch, self.model.num_patches, generator=generator)
        return images.to(self.device), uniforms.to(self.device)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a logical step; the same images each time."""
        return self.logical_batch // self.microbatch

    def own_model(self) -> MaskedAutoencoder:
        """For a method that changes the model: a copy, or the model where no one else has it."""
        return self.model if self.is_alone else copy.deepcopy(self.model)

    def losses(
        self, model: Callable[..., Tensor], batch: tuple[Tensor, ...] = (), is_bf16: bool = False
    ) -> Tensor:
        """The loss of each image, losses_M; of this workload's batch, or of another one."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=is_bf16):
            return model(*(batch or self.batch))


# -- one microbatch --------------------------------------------------------------------------------


def plain(work: Workload, *, is_bf16: bool = False, is_compiled: bool = False) -> Step:
    """Ordinary forward and backward of the mean loss."""
    model = work.model
    forward = torch.compile(model) if is_compiled else model

    def step() -> Mapping[str, Tensor]:
        model.zero_grad(set_to_none=True)
        work.losses(forward, is_bf16=is_bf16).float().mean().backward()
        return _gradients(model)

    return step


def ours(
    work: Workload, *, mode: str = "auto", is_bf16: bool = False, is_compiled: bool = False
) -> Step:
    """`ClippedGradientSum`, from an empty sum. The first step proves besides that images are
    independent, which a logical batch does once at most; `whole_ours` has all of it."""
    clipping = FlatClipping(work.max_grad_norm)
    clipped = ClippedGradientSum(work.model, clipping, mode=mode)
    losses = partial(work.losses, work.model, is_bf16=is_bf16)
    compiled = CompiledGradientSum(clipped, lambda *batch: losses(batch)) if is_compiled else None

    def step() -> Mapping[str, Tensor]:
        clipped.flat_sum.zero_()
        if compiled is not None:
            compiled.accumulate(work.batch)
        else:
            clipped.accumulate(lambda: losses(work.batch))
        return clipped.layout.views(clipped.flat_sum)

    return step


# -- a whole logical step --------------------------------------------------------------------------


def whole_plain(work: Workload) -> Step:
    """All microbatches, then the optimizer."""
    model = work.own_model()
    optimizer = _optimizer(model)

    def step() -> Mapping[str, Tensor]:
        model.zero_grad(set_to_none=True)
        for _ in range(work.num_microbatches):
            (work.losses(model).sum() / work.logical_batch).backward()
        optimizer.step()
        return _gradients(model)

    return step


def whole_ours(work: Workload) -> Step:
    """All microbatches, the reduction, the noise, the optimizer: as pipeline/training does it."""
    model = work.own_model()
    optimizer = _optimizer(model)
    clipping = FlatClipping(work.max_grad_norm)
    clipped = ClippedGradientSum(model, clipping)
    noise = NoiseAhead(KeyedNoise(noise_key=AttemptKey.from_os_entropy().noise_key()))
    numbers = itertools.count()

    def step() -> Mapping[str, Tensor]:
        number = next(numbers)
        clipped.zero_()
        noise.begin(number, *rank_slice(clipped.layout.num_coordinates))
        for _ in range(work.num_microbatches):
            clipped.accumulate(lambda: work.losses(model))
        released = release_gradient(
            clipped.flat_sum,
            step=number,
            noise_std=NOISE_MULTIPLIER * clipping.sensitivity,
            divisor=work.logical_batch,
            noise_source=noise,
            layout=clipped.layout,
        )
        released.assign(model)
        optimizer.step()
        return _gradients(model)

    return step


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model.named_parameters(), recipe.Optimizer(learning_rate=RATE))
    set_rate(optimizer, RATE)
    return optimizer


def _gradients(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- the peers -------------------------------------------------------------------------------------


def opacus(work: Workload, *, is_ghost: bool) -> Step:
    """Opacus: per-image gradients by hooks, or its ghost clipping (two backward passes)."""
    try:
        from opacus import grad_sample, optimizers  # noqa: PLC0415 - an extra
        from opacus.utils import fast_gradient_clipping_utils as fast  # noqa: PLC0415
    except ImportError as error:
        raise Unavailable(f'needs opacus: pip install -e ".[bench]" ({error})') from error
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    by_type = grad_sample.GradSampleModule.GRAD_SAMPLERS
    grad_sample.register_grad_sampler(LayerNorm)(by_type[nn.LayerNorm])
    model = work.own_model()
    model.encoder.cls_token.requires_grad_(False)
    model.mask_token.requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sgd = torch.optim.SGD(trained.values(), lr=RATE)  # its step is never taken
    promise = {
        "noise_multiplier": 0.0,
        "max_grad_norm": work.max_grad_norm,
        "expected_batch_size": work.microbatch,
        "loss_reduction": "sum",
    }
    if is_ghost:
        wrapped = grad_sample.GradSampleModuleFastGradientClipping(
            model, loss_reduction="sum", max_grad_norm=work.max_grad_norm
        )
        optimizer = optimizers.DPOptimizerFastGradientClipping(sgd, **promise)
    else:
        wrapped = grad_sample.GradSampleModule(model, loss_reduction="sum")
        optimizer = optimizers.DPOptimizer(sgd, **promise)

    def step() -> Mapping[str, Tensor]:
        optimizer.zero_grad(set_to_none=True)
        losses_M = work.losses(wrapped)
        if is_ghost:
            fast.DPTensorFastGradientClipping(wrapped, optimizer, losses_M, "sum").backward()
            optimizer.accumulate()
        else:
            losses_M.sum().backward()
            optimizer.clip_and_accumulate()
        return {name: p.summed_grad for name, p in trained.items()}

    return step


def vmapped(work: Workload, *, is_chunked: bool) -> Step:
    """Per-image gradients by `torch.func.vmap(grad)`, as ViP has them; then norms and the sum."""
    model = work.model
    chunk = work.vmap_chunk if is_chunked else work.microbatch
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(parameters: dict[str, Tensor], image: Tensor, uniforms: Tensor) -> Tensor:
        inputs = (image.unsqueeze(0), uniforms.unsqueeze(0))
        return functional_call(model, (parameters, buffers), inputs).squeeze(0)

    per_image = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> Mapping[str, Tensor]:
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for images, uniforms in zip(*(each.split(chunk) for each in work.batch), strict=True):
            with sdpa_kernel(SDPBackend.MATH):
                gradients = per_image(parameters, images, uniforms)
            norms = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
            norm_M = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            factor_M = (work.max_grad_norm / norm_M).clamp(max=1.0)
            for name in sums:
                sums[name] += torch.einsum("i,i...->...", factor_M, gradients.pop(name))
        return sums

    return step


# -- all of them -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to make a step.

    Args:
        make: from workload to step; raises `Unavailable`.
        baseline: the method that its ratios are to.
        may_fail: rests on what is not ours; where it fails, its row says so and the others stand.
        note: what a reader of its row must know.
    """

    make: Callable[[Workload], Step]
    baseline: str = "plain"
    may_fail: bool = False
    note: str = ""


_BF16 = "bf16 autocast; ratios to plain_bf16"
_TOKENS = "class token and mask token frozen, as Opacus knows parameters of modules only"
_COMPILED = "torch.compile; ratios to the eager step, so compare with plain_compiled"
_COMPILED_BF16 = "torch.compile; ratios to the eager bf16 step, so compare with plain_compiled_bf16"
_WHOLE = "a logical step of several microbatches (the same images each time), AdamW"

METHODS: dict[str, Method] = {
    "plain": Method(make=plain),
    "ours": Method(make=ours),
    "ours_ghost": Method(make=partial(ours, mode="ghost"), note="all norms by Gram matrices"),
    "ours_direct": Method(make=partial(ours, mode="direct"), note="all norms from gradients"),
    "plain_compiled": Method(make=partial(plain, is_compiled=True), may_fail=True, note=_COMPILED),
    "ours_compiled": Method(make=partial(ours, is_compiled=True), may_fail=True, note=_COMPILED),
    "opacus_hooks": Method(make=partial(opacus, is_ghost=False), may_fail=True, note=_TOKENS),
    "opacus_ghost": Method(make=partial(opacus, is_ghost=True), may_fail=True, note=_TOKENS),
    "vmap": Method(
        make=partial(vmapped, is_chunked=False),
        may_fail=True,
        note="the gradients of all images of the microbatch at once",
    ),
    "vmap_chunked": Method(
        make=partial(vmapped, is_chunked=True),
        may_fail=True,
        note="the gradients of --vmap-chunk images at a time",
    ),
    "plain_bf16": Method(make=partial(plain, is_bf16=True), note="bf16 autocast; ratios to plain"),
    "ours_bf16": Method(make=partial(ours, is_bf16=True), baseline="plain_bf16", note=_BF16),
    "ours_ghost_bf16": Method(
        make=partial(ours, mode="ghost", is_bf16=True), baseline="plain_bf16", note=_BF16
    ),
    "plain_compiled_bf16": Method(
        make=partial(plain, is_compiled=True, is_bf16=True),
        baseline="plain_bf16",
        may_fail=True,
        note=_COMPILED_BF16,
    ),
    "ours_compiled_bf16": Method(
        make=partial(ours, is_compiled=True, is_bf16=True),
        baseline="plain_bf16",
        may_fail=True,
        note=_COMPILED_BF16,
    ),
    "whole_plain": Method(make=whole_plain, baseline="whole_plain", note=_WHOLE),
    "whole_ours": Method(
        make=whole_ours,
        baseline="whole_plain",
        note=f"{_WHOLE}, keyed float64 noise, one process (no ranks to reduce over); ratios to "
        "whole_plain",
    ),
}
