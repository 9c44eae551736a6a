"""What must stay as it is while images pass through a model: parameters, buffers and members."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from pipeline.dpsgd.tape import UnsupportedOperationError

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, modules, hooks."""


class ModelState:
    """The tensors of a model before a forward, to compare with after it.

    Args:
        model: a module, or (name, tensor) pairs.

    Guarantees:
        1. A buffer or frozen parameter that a forward changes or replaces is found: it would carry
           the images out past the noise (tests/guarantees/test_fails_closed.py).
        2. So is a tensor made of images that a forward leaves in an attribute. What it leaves in
           plain numbers, or outside the model, cannot be seen.
    """

    def __init__(self, model: nn.Module | list[tuple[str, Tensor]]) -> None:
        self.trained: list[Tensor] = []
        self.constants: list[Tensor] = []
        self._model = model
        self._before = self._members()
        seen: set[int] = set()
        for _, _, tensor in self._before:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            (self.trained if tensor.requires_grad else self.constants).append(tensor)
        self._versions = [tensor._version for tensor in self.constants]
        self._kept_before = {id(each): each._version for _, _, each in self._kept()}

    def _members(self) -> list[tuple[nn.Module | None, str, Tensor | None]]:
        """Every tensor, with the module that holds it; one pass, for it is made for every batch."""
        if not isinstance(self._model, nn.Module):
            return [(None, name, tensor) for name, tensor in self._model]
        return [
            (module, name, tensor)
            for module in self._model.modules()
            for members in (module._parameters, module._buffers)
            for name, tensor in members.items()
        ]

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every tensor in a plain attribute of a module, or in a list or mapping there."""
        if not isinstance(self._model, nn.Module):
            return
        for module in self._model.modules():
            for name, value in vars(module).items():
                if name in _OF_TORCH:
                    continue
                if isinstance(value, Tensor):
                    yield type(module).__name__, name, value
                elif isinstance(value, list | tuple | dict | deque):
                    for each in value.values() if isinstance(value, dict) else value:
                        if isinstance(each, Tensor):
                            yield type(module).__name__, name, each

    def check_trained(self, expected: Sequence[Tensor]) -> None:
        """Raise unless exactly these parameters are trainable."""
        if [id(each) for each in self.trained] != [id(each) for each in expected]:
            raise ValueError(
                "the set of trainable parameters changed since this engine was made; make a new "
                "ClippedGradientSum after freezing, unfreezing or replacing parameters"
            )

    def check_unchanged(
        self, written: Sequence[Tensor], is_constant: Callable[[Tensor], bool]
    ) -> None:
        """Raise where the forward changed or replaced what it was to leave alone.

        Args:
            written: parameters and buffers that it was seen to write to.
            is_constant: whether no image went into a tensor of this forward.
        """
        changed = [
            tensor
            for tensor, version in zip(self.constants, self._versions, strict=True)
            if tensor._version != version
        ] + list(written)
        after = self._members()
        replaced = len(after) != len(self._before) or any(
            now[2] is not then[2] for now, then in zip(after, self._before, strict=True)
        )
        if changed or replaced:
            raise UnsupportedOperationError(
                f"the forward changed {self._name_of(changed, after)}, a buffer or parameter: what "
                "it keeps of the images would be published without noise. Keep no running "
                "statistics while training privately"
            )

        for owner, name, tensor in self._kept():
            version = self._kept_before.get(id(tensor))
            if version != tensor._version and not (version is None and is_constant(tensor)):
                raise UnsupportedOperationError(
                    f"the forward keeps a tensor made of the images in attribute {name!r} of a "
                    f"{owner}: the next microbatch could use it. Return it, or keep nothing"
                )

    def _name_of(
        self,
        changed: list[Tensor],
        after: list[tuple[nn.Module | None, str, Tensor | None]],
    ) -> str:
        held = {id(tensor) for _, _, tensor in self._before if tensor is not None}
        places = {
            (id(module), name)
            for module, name, tensor in after
            if any(tensor is each for each in changed)
            or (tensor is not None and id(tensor) not in held)
        }
        if not isinstance(self._model, nn.Module):
            return ", ".join(repr(name) for _, name in sorted(places))
        return ", ".join(
            repr(f"{prefix}.{name}" if prefix else name)
            for prefix, module in self._model.named_modules()
            for name in (*module._parameters, *module._buffers)
            if (id(module), name) in places
        )
