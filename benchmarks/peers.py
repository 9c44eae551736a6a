"""Other ways to the same clipped sum: Opacus with hooks, Opacus with ghost clipping, vmap.

Opacus knows modules only. For it the two bare parameters of the model (class token, mask token: two
rows of some hundred tensors) are frozen, and timm's LayerNorm is replaced by torch's own, of which
it is a subclass that Opacus does not recognise and would send the slow way round.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from methods import Method, Problem, Unavailable
from torch import Tensor, nn

from pipeline.dpsgd.clipping import MARGIN
from pipeline.models.mae import MaskedAutoencoder

FROZEN = "class token and mask token frozen (Opacus has no rule for bare parameters)"


def freeze_bare_parameters(model: MaskedAutoencoder) -> None:
    """Leave what belongs to the modules that Opacus knows."""
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)


def vmap(problem: Problem) -> Method:
    """Every image's gradient by vmap of grad, clipped and summed, as ViP's released code does."""
    trained = {
        name: parameter.detach()
        for name, parameter in problem.model.named_parameters()
        if parameter.requires_grad
    }

    def loss(parameters: dict[str, Tensor], image: Tensor, uniforms: Tensor) -> Tensor:
        inputs = image.unsqueeze(0), uniforms.unsqueeze(0)
        return torch.func.functional_call(problem.model, parameters, inputs).squeeze(0)

    gradients_of = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    clip_norm = problem.max_grad_norm * MARGIN
    total: dict[str, Tensor] = {}

    def step() -> None:
        total.clear()
        for images, uniforms in _chunks(problem):
            gradients = gradients_of(trained, images, uniforms)
            lengths = [gradient.flatten(1).norm(dim=1) for gradient in gradients.values()]
            factors = (clip_norm / (torch.stack(lengths).norm(dim=0) + 1e-6)).clamp(max=1.0)
            for name, gradient in gradients.items():
                part = torch.einsum("m,m...->...", factors, gradient)
                total[name] = total[name].add_(part) if name in total else part

    return Method(step=step, sums=lambda: total, note=_chunk_note(problem))


def opacus_hooks(problem: Problem) -> Method:
    """Opacus' GradSampleModule and DPOptimizer: every image's gradient is kept, then clipped."""
    opacus = _opacus()
    model, optimizer = _opacus_model(problem)
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")
    private = opacus.optimizers.DPOptimizer(
        optimizer,
        noise_multiplier=0.0,
        max_grad_norm=problem.max_grad_norm * MARGIN,
        expected_batch_size=len(problem.images),
    )

    def step() -> None:
        for parameter in private.params:
            parameter.summed_grad = None
        for images, uniforms in _chunks(problem):
            private.original_optimizer.zero_grad(set_to_none=True)
            wrapped(images, uniforms).sum().backward()
            private.clip_and_accumulate()
            for parameter in private.params:
                parameter.grad_sample = None

    def sums() -> dict[str, Tensor]:
        return {name: each.summed_grad for name, each in model.named_parameters() if _is_on(each)}

    return Method(step=step, sums=sums, note=f"{FROZEN}; {_chunk_note(problem)}")


def opacus_ghost(problem: Problem) -> Method:
    """Opacus' ghost clipping: norms in a first backward, the clipped sum in a second."""
    opacus = _opacus()
    from opacus.utils.fast_gradient_clipping_utils import (  # noqa: PLC0415 - an extra
        DPTensorFastGradientClipping,
    )

    model, optimizer = _opacus_model(problem)
    clip_norm = problem.max_grad_norm * MARGIN
    wrapped = opacus.grad_sample.GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=clip_norm, use_ghost_clipping=True
    )
    private = opacus.optimizers.DPOptimizerFastGradientClipping(
        optimizer,
        noise_multiplier=0.0,
        max_grad_norm=clip_norm,
        expected_batch_size=len(problem.images),
        loss_reduction="sum",
    )

    def step() -> None:
        wrapped.enable_hooks()
        losses = wrapped(problem.images, problem.uniforms)
        DPTensorFastGradientClipping(wrapped, private, losses, loss_reduction="sum").backward()

    def sums() -> dict[str, Tensor]:
        return {name: each.grad for name, each in model.named_parameters() if _is_on(each)}

    return Method(step=step, sums=sums, note=FROZEN)


def _is_on(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _opacus() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import opacus  # noqa: PLC0415 - an extra
            import opacus.grad_sample  # noqa: PLC0415
            import opacus.optimizers  # noqa: PLC0415
    except ImportError as error:
        raise Unavailable(
            f"Opacus cannot be imported ({error}): pip install -e '.[bench]'"
        ) from error
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # on the images
    return opacus


def _opacus_model(problem: Problem) -> tuple[MaskedAutoencoder, torch.optim.Optimizer]:
    """A copy in which Opacus knows every trained module, and an optimizer that is never stepped."""
    model = copy.deepcopy(problem.model)
    freeze_bare_parameters(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.LayerNorm) and type(child) is not nn.LayerNorm:
                norm = nn.LayerNorm(child.normalized_shape, eps=child.eps)
                norm.weight, norm.bias = child.weight, child.bias
                setattr(parent, name, norm)
    model.train()
    return model, torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.0)


def _chunk_size(problem: Problem) -> int:
    """The microbatch in equal parts whose per-image gradients fit."""
    microbatch = len(problem.images)
    num_bytes = 4 * sum(p.numel() for p in problem.model.parameters() if p.requires_grad)
    most = max(1, problem.per_image_bytes // num_bytes)
    return -(-microbatch // -(-microbatch // most))


def _chunks(problem: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    size = _chunk_size(problem)
    return zip(problem.images.split(size), problem.uniforms.split(size), strict=True)


def _chunk_note(problem: Problem) -> str:
    return f"every image's gradient is kept: {_chunk_size(problem)} images at a time"
