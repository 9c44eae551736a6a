"""Watching the forward: no trainable parameter is used without a rule that bounds its gradient.

Every torch call of the forward passes through `ParameterTrace`:

- it touches no trainable parameter: done as it is;
- it computes with parameters and constants alone (a reshape, an indexed table, a joined bias): done
  as it is; the result is a *computed tensor*, treated like a parameter from then on;
- it brings images and parameters together: a rule of `layer_rules` does it in a way that leaves
  per-image gradients, or it is refused by name.

A constant is a buffer or frozen parameter of the module, or made from constants. Calling an image a
constant, or the reverse, costs speed or raises; it never changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from pipeline.dpsgd.tape import ComputedTensor, Tape, Target, UnsupportedOperationError

_CONSTANT_FACTORIES = frozenset(
    "arange as_tensor empty eye full linspace logspace ones scalar_tensor tensor tril_indices "
    "triu_indices zeros".split()
)
_SAME_NUMBERS = frozenset(
    "bfloat16 clone contiguous double flatten float half ravel reshape reshape_as squeeze to type "
    "type_as unflatten unsqueeze view view_as".split()
)
_SPREADING = frozenset("broadcast_to expand expand_as repeat tile".split())
_SHAPED_LIKE = frozenset("expand_as reshape_as to type_as view_as".split())
_IN_PLACE_NAMES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__".split()
)


def name_of(function: Callable[..., Any]) -> str:
    """The name under which a person knows a torch function."""
    return resolve_name(function) or getattr(function, "__name__", repr(function))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among the arguments, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


Rule = Callable[..., Tensor]
"""(trace, the torch function, its arguments) -> its result."""


@dataclass(frozen=True, kw_only=True)
class RuleBook:
    """What may be done with images, by torch function.

    Args:
        rules: functions in which images may meet trainable parameters.
        refusals: functions that may mix images, each with a check of its arguments that raises.
        indexing: functions that read a parameter at places which may depend on the image.
    """

    rules: Mapping[Callable[..., Any], Rule]
    refusals: Mapping[Callable[..., Any], Callable[..., None]]
    indexing: frozenset[Callable[..., Any]]


class ParameterTrace(TorchFunctionMode):
    """Sends every use of a trainable parameter to its rule.

    Args:
        tape: collects the uses.
        book: the rules.
        constants: tensors that are the same for every image: buffers and frozen parameters.
        anchor: a scalar that requires a gradient, so that the backward reaches uses on raw images.
    """

    def __init__(
        self, tape: Tape, book: RuleBook, constants: Iterable[Tensor], anchor: Tensor
    ) -> None:
        super().__init__()
        self.tape = tape
        self.book = book
        self.anchor = anchor
        self._places = {id(parameter): place for place, parameter in enumerate(tape.parameters)}
        self._computed: dict[int, ComputedTensor] = {}
        self._constants = {id(constant): constant for constant in constants}
        self._state = [*tape.parameters, *self._constants.values()]
        self._storages: dict[int, Tensor] = {}
        self.written: list[Tensor] = []

    # -- what a tensor is --------------------------------------------------------------------------

    def is_constant(self, value: object) -> bool:
        """Whether no image went into this tensor: it is a constant, or made of parameters."""
        return id(value) in self._constants or self.is_trained(value)

    def is_trained(self, value: object) -> bool:
        """Whether this is a trainable parameter or computed from some."""
        return id(value) in self._places or id(value) in self._computed

    def target(self, value: Tensor) -> Target:
        """The parameter or computed tensor that receives the gradient of this tensor."""
        while (computed := self._computed.get(id(value))) is not None:
            if computed.relation != "same":
                return computed
            assert computed.source is not None
            value = computed.source
        return self._places[id(value)]

    def spread_source(self, value: Tensor) -> Tensor | None:
        """What an expanded or repeated tensor was made from."""
        while (computed := self._computed.get(id(value))) is not None:
            if computed.source is None or computed.relation == "function":
                return None
            if computed.relation == "spread":
                return computed.source
            if computed.source.shape != value.shape:
                return None
            value = computed.source
        return None

    def refuse(
        self, operation: str, trained: Iterable[Tensor], why: str
    ) -> UnsupportedOperationError:
        """The error for a use without a rule."""
        names = self.tape.names(self.target(value) for value in trained)
        return UnsupportedOperationError(f"{operation} with trainable parameter {names}: {why}")

    def let_go(self) -> None:
        """Forget every tensor that was seen."""
        for held in (
            self._computed,
            self._constants,
            self._state,
            self._storages,
            self.written,
        ):
            held.clear()

    # -- every torch call --------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do one torch call of the forward."""
        kwargs = dict(kwargs or {})
        trained: list[Tensor] = []
        has_images = False
        for value in tensors_in((*args, *kwargs.values())):
            if self.is_trained(value):
                trained.append(value)
            elif id(value) not in self._constants:
                has_images = True
                if isinstance(value, nn.Parameter) and value.requires_grad:
                    raise self._refuse_stranger(func, value)
        name = getattr(func, "__name__", "")
        self._note_what_is_written(name, args, kwargs)
        if not trained:
            return self._plain(func, name, args, kwargs, has_images)
        if args and self.is_trained(args[0]) and _is_in_place(name):
            raise self.refuse(
                name_of(func), trained, "it changes the parameter in place during the forward"
            )
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not has_images or func in self.book.indexing or name in _SHAPED_LIKE:
            return self._compute(func, name, args, kwargs, trained)
        if (check := self.book.refusals.get(func)) is not None:
            check(*args, **kwargs)
        rule = self.book.rules.get(func)
        if rule is None:
            raise self.refuse(
                name_of(func),
                trained,
                "there is no rule for it. Write it with operations that have one (linear, matmul, "
                "conv1d, conv2d, layer_norm, group_norm, rms_norm, embedding, +, -, *, /, where, "
                "cat, stack, scaled_dot_product_attention), or freeze the parameter",
            )
        return rule(self, func, *args, **kwargs)

    def _refuse_stranger(
        self, func: Callable[..., Any], parameter: Tensor
    ) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{name_of(func)} uses a trainable parameter of shape {tuple(parameter.shape)} that is "
            "not among this engine's: its .grad would be a gradient without clipping or noise. "
            "Freeze it (requires_grad_(False)), or give it to the engine"
        )

    def _note_what_is_written(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Remember which parameter or buffer a call writes to, by whatever view (`.data`)."""
        places = [*args[:1]] if _is_in_place(name) else []
        places = [each for each in tensors_in((*places, kwargs.get("out"))) if each.numel()]
        if not places:
            return
        if not self._storages:
            self._storages = {_storage_of(each): each for each in self._state if each.numel()}
        found = [self._storages.get(_storage_of(each)) for each in places]
        self.written += [each for each in found if each is not None]

    def _plain(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        has_images: bool,
    ) -> Any:
        """A call without trainable parameters; remembers which results are constants."""
        if has_images:
            if (check := self.book.refusals.get(func)) is not None:
                check(*args, **kwargs)
            if args and _is_in_place(name):
                self._constants.pop(id(args[0]), None)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        has_constants = any(True for _ in tensors_in((*args, *kwargs.values())))
        if has_constants or name in _CONSTANT_FACTORIES:
            for value in tensors_in((result,)):
                if not value.requires_grad:
                    self._constants[id(value)] = value
        return result

    def _compute(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trained: list[Tensor],
    ) -> Any:
        """A call that gives a function of parameters alone."""
        # Hooks of a checkpointed segment must not see what this graph saves: it is kept.
        with saved_tensors_hooks(lambda value: value, lambda value: value):
            result = func(*args, **kwargs)
        for value in tensors_in((result,)):
            if self.is_trained(value):
                continue
            if value.requires_grad:
                self._computed[id(value)] = self._describe(value, name, trained)
            else:
                self._constants[id(value)] = value
        return result

    def _describe(self, value: Tensor, name: str, trained: list[Tensor]) -> ComputedTensor:
        places: dict[int, None] = {}
        for source in trained:
            computed = self._computed.get(id(source))
            found = (self._places[id(source)],) if computed is None else computed.parameters
            places.update(dict.fromkeys(found))
        origin: Tensor | None = None
        relation = "function"
        if len(trained) == 1:
            if name in _SAME_NUMBERS and value.numel() == trained[0].numel():
                origin, relation = trained[0], "same"
            elif name in _SPREADING and _is_spread(trained[0].shape, value.shape):
                origin, relation = trained[0], "spread"
        return ComputedTensor(
            value=value, parameters=tuple(places), source=origin, relation=relation
        )


def _storage_of(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_NAMES


def _is_spread(source: torch.Size, shape: torch.Size) -> bool:
    """Whether only dimensions of length 1 (or new leading ones) were made longer."""
    aligned = (1,) * (len(shape) - len(source)) + tuple(source)
    return all(old in (1, new) for old, new in zip(aligned, shape, strict=True))
