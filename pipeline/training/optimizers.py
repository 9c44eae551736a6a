"""AdamW and SGD, the learning rate as a pure function of the step, and hand-over between phases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline import recipe

Reset = Literal["none", "m", "all"]


def learning_rate(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: str
) -> float:
    """Learning rate of a logical step: linear warm-up times a half cosine over the whole phase.

    `peak x min(1, (step + 1) / warmup_steps) x (1 + cos(pi step / num_steps)) / 2`; the schedule
    "constant" leaves the cosine out. A pure function of the step, so a resumed phase goes on where
    it stopped.

    Source: the schedule of ViP's private phase (arXiv 2306.08842).
    """
    warmup = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / num_steps)) if schedule == "cosine" else 1.0
    return peak * warmup * decay


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: recipe.Optimizer
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trainable parameters, in the order given.

    Weight decay is applied to tensors of two or more dimensions only (not to biases and norm
    scales), as masked autoencoders do. The learning rate is set before each step by `set_rate`.
    """
    trainable = [p for _, p in named_parameters if p.requires_grad]
    return optimizer_of(
        [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2], config
    )


def optimizer_of(
    matrices: list[nn.Parameter], vectors: list[nn.Parameter], config: recipe.Optimizer
) -> torch.optim.Optimizer:
    """The recipe's optimizer; `matrices` decay, `vectors` do not.

    What it does to a number depends on that number alone, to the bit, so that ranks may share the
    work. torch's fused kernels are not used: they round the last numbers of a tensor differently.
    """
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=False)
    return torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, fused=False)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, `{parameter}|{entry}`, ready for safetensors."""
    tensors = {}
    for name, parameter in named_parameters:
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}|{entry}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    tensors: Mapping[str, Tensor],
    reset: Reset = "none",
) -> None:
    """Put saved state back.

    Args:
        reset: what starts anew. "none": nothing (a resumed phase); "m": Adam's first moment, its
            second moment and step count are kept; "all": everything. arXiv 2402.18752 compares
            these at the switch from public to private.

    Raises:
        ValueError: if the saved state names a parameter of another shape.
    """
    if reset == "all":
        return
    for name, parameter in named_parameters:
        saved = {
            key.rpartition("|")[2]: value
            for key, value in tensors.items()
            if key.rpartition("|")[0] == name
        }
        if not saved or not parameter.requires_grad:
            continue
        state = {}
        for entry, value in saved.items():
            check_state_shape(name, value, parameter.shape)
            is_reset = reset == "m" and entry in ("exp_avg", "momentum_buffer")
            kept = torch.zeros_like(value) if is_reset else value.clone()
            # Adam keeps its step count on the CPU, its moments beside the parameter.
            state[entry] = kept.to(parameter.device if value.ndim else "cpu")
        optimizer.state[parameter] = state


def check_state_shape(name: str, value: Tensor, shape: torch.Size) -> None:
    """Raise unless saved state is one number, or has the shape of its parameter."""
    if value.ndim and value.shape != shape:
        raise ValueError(
            f"optimizer state of {name} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(shape)}: set reset_optimizer: all for another model"
        )
