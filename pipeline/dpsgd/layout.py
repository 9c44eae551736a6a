"""Where every trainable parameter lives in one flat vector, in an order that never changes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Trainable = nn.Module | Iterable[tuple[str, Tensor]]
"""A module, or (name, parameter) pairs as `nn.Module.named_parameters` yields them."""


def trainable_parameters(model: Trainable) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name; one held under two names appears once.

    Raises:
        ValueError: no parameter is trainable, one is not a real floating-point leaf, or dtypes or
            devices are mixed.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else model
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in named:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        if name in found:
            raise ValueError(f"two different parameters are named {name!r}; give each its own name")
        if not parameter.is_leaf or not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} must be a real floating-point leaf tensor, not "
                f"{'a leaf' if parameter.is_leaf else 'a computed tensor'} of {parameter.dtype}"
            )
        seen.add(id(parameter))
        found[name] = parameter
    if not found:
        raise ValueError(
            "the model has no trainable parameter; set requires_grad on what is to be trained"
        )
    for what in ("dtype", "device"):
        by_value = {getattr(parameter, what): name for name, parameter in found.items()}
        if len(by_value) > 1:
            examples = ", ".join(f"{name!r} is {value}" for value, name in by_value.items())
            raise ValueError(
                f"trainable parameters must share one {what}, but {examples}; "
                "move the model with model.to(...), and use autocast for mixed precision"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """The fixed place of every trainable parameter in one flat vector.

    Noise is addressed by the absolute coordinate in this vector, so the order is part of what is
    promised: it is the order of `named_parameters`, whatever the device or the number of ranks.

    Args:
        names: one name per parameter.
        shapes: its shape.
        offsets: the coordinate of its first element.
        num_coordinates: the length of the flat vector.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    num_coordinates: int

    @classmethod
    def of(cls, model: Trainable) -> ParameterLayout:
        """The layout of a model's trainable parameters, in the order of `named_parameters`."""
        parameters = trainable_parameters(model)
        offsets, end = [], 0
        for parameter in parameters.values():
            offsets.append(end)
            end += parameter.numel()
        return cls(
            names=tuple(parameters),
            shapes=tuple(parameter.shape for parameter in parameters.values()),
            offsets=tuple(offsets),
            num_coordinates=end,
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The flat vector seen as one tensor per parameter; nothing is copied."""
        self.check(flat)
        return {
            name: flat[offset : offset + math.prod(shape)].view(shape)
            for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor per parameter name, copied into a new flat vector."""
        if set(tensors) != set(self.names):
            odd = sorted(set(tensors) ^ set(self.names))
            raise ValueError(f"tensors must have exactly the layout's names; they differ in {odd}")
        first = tensors[self.names[0]]
        flat = torch.empty(self.num_coordinates, dtype=dtype, device=first.device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat

    def check(self, flat: Tensor) -> None:
        """Raise unless `flat` is a vector of this layout's length."""
        if flat.shape != (self.num_coordinates,):
            raise ValueError(
                f"a flat vector of this layout has shape ({self.num_coordinates},), "
                f"not {tuple(flat.shape)}"
            )
