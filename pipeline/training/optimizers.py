"""AdamW and SGD, the learning rate as a pure function of the step, and hand-over between phases.

Both are torch's with a step of our own, in which every operation rounds once. torch's own fuse a
product into a sum in the vector part of a loop and not in its last few numbers, so that cutting a
tensor elsewhere (another number of threads, or of ranks that share the state) would change bits.
"""

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


class ElementwiseAdamW(torch.optim.AdamW):
    """AdamW whose result at an element depends on that element alone, to the bit."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient. Source: arXiv 1711.05101, algorithm 2"""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                count = float(state["step"])
                first, second = state["exp_avg"], state["exp_avg_sq"]
                change = parameter.grad - first
                first += change.mul_(1 - beta1)
                square = torch.mul(parameter.grad, parameter.grad, out=change)
                second.mul_(beta2).add_(square.mul_(1 - beta2))
                scale = torch.sqrt(second, out=change).div_(math.sqrt(1 - beta2**count))
                update = torch.div(first, scale.add_(group["eps"]), out=change)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(update.mul_(group["lr"] / (1 - beta1**count)))


class ElementwiseSGD(torch.optim.SGD):
    """SGD with momentum whose result at an element depends on that element alone, to the bit."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                change = parameter * group["weight_decay"]
                change += parameter.grad
                if group["momentum"]:
                    state = self.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = change.clone()
                    else:
                        state["momentum_buffer"].mul_(group["momentum"]).add_(change)
                    change.copy_(state["momentum_buffer"])
                parameter.sub_(change.mul_(group["lr"]))


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
    """The recipe's optimizer; `matrices` decay, `vectors` do not."""
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return ElementwiseAdamW(groups, lr=0.0, betas=config.betas, eps=config.eps)
    return ElementwiseSGD(groups, lr=0.0, momentum=config.momentum)


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
