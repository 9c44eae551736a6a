# ruff: noqa: N815 - names carry the shape of their tensor
"""What one forward used of every trainable parameter, and what the backward says about each use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.dpsgd.layout import ParameterLayout
from pipeline.dpsgd.per_image import (
    FormedGradients,
    NormCosts,
    PerImageGradients,
    added,
    formed_sum,
)
from pipeline.dpsgd.products import exact_products, products_are_rounded

PULL_BACK_NUMBERS = 2**24
"""Gradients of a computed tensor are carried back for so many images at once that they fit here."""


class UnsupportedOperationError(ValueError):
    """The model does something with a trainable parameter, or with the images, that has no rule."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedTensor:
    """A tensor computed from trainable parameters alone, such as an indexed position table.

    The gradient of every image with respect to it is carried back to the parameters through the
    ordinary autograd graph behind `value`; that map is linear, so it may follow the per-image rule.

    Args:
        value: the tensor, with its graph.
        parameters: which parameters it depends on, by their place in the layout.
        source: what it was made from, where `relation` is "same" or "spread".
        relation: "same": the same numbers in the same order (a reshape, a copy, a cast).
            "spread": `source` repeated along dimensions where it has length 1.
            "function": anything else.
    """

    value: Tensor
    parameters: tuple[int, ...]
    source: Tensor | None = None
    relation: str = "function"


Target = int | ComputedTensor
"""What receives a gradient: a parameter (by its place in the layout) or a computed tensor."""

Contribution = tuple[Target, PerImageGradients]

Contribute = Callable[[Tensor, tuple[Tensor, ...], int], Iterable[Contribution]]
"""(gradient of the output, what the forward saved, number of images) -> contributions."""

Collect = Callable[[int, PerImageGradients], None]
"""(place of a parameter in the layout, the gradients of all its uses), once for each parameter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One place in the forward where images meet trainable parameters.

    Args:
        tape: where contributions go.
        operation: its name, for messages.
        targets: what it uses.
        num_rows: the length of the leading dimension of the output; a multiple of the images.
        contribute: turns the gradient of the output into per-image gradients.
        place: its place among the sites of this forward.
        is_recomputed: whether it belongs to the second forward of a checkpointed segment, which
            only restores what the first one saved.
    """

    tape: Tape
    operation: str
    targets: tuple[Target, ...]
    num_rows: int
    contribute: Contribute
    place: int
    is_recomputed: bool

    def receive(self, gradient: Tensor, *saved: Tensor) -> None:
        """Called by the backward with the gradient of the output."""
        self.tape.receive(self, gradient, saved)


class Arrival(NamedTuple):
    """What came to a site while half of the losses, the sinks, had gradient 0.

    Args:
        site: the site.
        reaches_sources, reaches_sinks: whether a number other than 0 came to their rows, scalars.
        squares_M: of the gradient in each image's rows, summed; 0 for the sinks.
    """

    site: Site
    reaches_sources: Tensor
    reaches_sinks: Tensor
    squares_M: Tensor


class Stage(Enum):
    """What is going on."""

    FORWARD = auto()
    PROBE = auto()
    BACKWARD = auto()
    FINISHED = auto()


@dataclass(kw_only=True)
class Tape:
    """Collects, during one forward and backward, the per-image gradients of every parameter.

    Args:
        layout: the names of the parameters.
        parameters: the parameters, in the layout's order.
        costs: how norms are found.
    """

    layout: ParameterLayout
    parameters: Sequence[Tensor]
    costs: NormCosts
    stage: Stage = Stage.FORWARD
    num_images: int = 0
    sites: list[Site] = field(default_factory=list)
    _num_uses: Counter[Target] = field(default_factory=Counter)
    _pending: dict[Target, list[PerImageGradients]] = field(default_factory=dict)
    _collect: Collect | None = None
    arrivals: list[Arrival] = field(default_factory=list)
    repeated: dict[int, Tensor] = field(default_factory=dict)
    silent_places: frozenset[int] = frozenset()
    _is_sink_M: Tensor | None = None
    _exact: Callable[[], AbstractContextManager[None]] = exact_products

    # -- forward -----------------------------------------------------------------------------------

    def open_site(
        self,
        operation: str,
        targets: Sequence[Target],
        num_rows: int,
        contribute: Contribute,
    ) -> Site:
        """A new place of use; in a recomputed forward it is not counted again."""
        site = Site(
            tape=self,
            operation=operation,
            targets=tuple(targets),
            num_rows=num_rows,
            contribute=contribute,
            place=len(self.sites),
            is_recomputed=self.stage is not Stage.FORWARD,
        )
        if not site.is_recomputed:
            self.sites.append(site)
            for target in site.targets:
                self._num_uses[target] += 1
                if isinstance(target, ComputedTensor):  # each of its parameters gets a share later
                    self._num_uses.update(dict.fromkeys(target.parameters, 2))
        return site

    def names(self, targets: Iterable[Target]) -> str:
        """The parameters behind the targets, for messages."""
        places: dict[int, None] = {}
        for target in targets:
            found = target.parameters if isinstance(target, ComputedTensor) else (target,)
            places.update(dict.fromkeys(found))
        return ", ".join(repr(self.layout.names[place]) for place in places)

    # -- backward ----------------------------------------------------------------------------------

    def expect_images(self, num_images: int) -> None:
        """The forward is over and gave this many losses."""
        self.num_images = num_images
        for site in self.sites:
            if site.num_rows % num_images:
                raise UnsupportedOperationError(
                    f"{site.operation} with parameter {self.names(site.targets)}: the leading "
                    f"dimension has length {site.num_rows}, not a multiple of the {num_images} "
                    "images; put the image dimension first (batch_first), and register constant "
                    "tensors as buffers"
                )

    def begin_probe(self, is_sink_M: Tensor) -> None:
        """Watch a backward in which the losses of the sinks have gradient 0."""
        self.stage = Stage.PROBE
        self._is_sink_M = is_sink_M

    def begin_backward(self, collect: Collect) -> None:
        """Hand the gradients of every parameter over from now on, as soon as all its uses are in.

        There may be a second backward over the same graph, with another `collect`.
        """
        self.stage = Stage.BACKWARD
        self._collect = collect
        # Asking for the precision once saves hundreds of context managers a microbatch.
        self._exact = exact_products if products_are_rounded() else nullcontext

    def receive(self, site: Site, gradient: Tensor, saved: tuple[Tensor, ...]) -> None:
        """Take one use's output gradient, and what its forward saved."""
        if site.is_recomputed:
            raise UnsupportedOperationError(
                f"{site.operation} with parameter {self.names(site.targets)} lies in a segment "
                "checkpointed with use_reentrant=True; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self.stage is Stage.PROBE:
            assert self._is_sink_M is not None
            rows_MR = gradient.reshape(self.num_images, -1)
            is_reached_M = ((rows_MR != 0) & torch.isfinite(rows_MR)).any(dim=1)
            self.arrivals.append(
                Arrival(
                    site=site,
                    reaches_sources=(is_reached_M & ~self._is_sink_M).any(),
                    reaches_sinks=(is_reached_M & self._is_sink_M).any(),
                    squares_M=_squares(rows_MR),
                )
            )
        elif self.stage is Stage.BACKWARD:
            if site.place in self.silent_places:
                raise UnsupportedOperationError(
                    f"{site.operation} with parameter {self.names(site.targets)} got a gradient "
                    "for the first time, after the independence of the images was checked without "
                    "it; nothing was added. It is checked at the next microbatch"
                )
            if self.arrivals and site.place not in self.repeated:
                self.repeated[site.place] = _squares(gradient.reshape(self.num_images, -1))
            with self._exact():
                for target, gradients in site.contribute(gradient, saved, self.num_images):
                    self._take(target, gradients)
        else:
            raise UnsupportedOperationError(
                f"{site.operation} with parameter {self.names(site.targets)}: gradients are taken "
                "inside the loss; a loss must be a plain forward computation"
            )

    def _take(self, target: Target, gradients: PerImageGradients) -> None:
        if isinstance(target, int) and self._num_uses[target] == 1:
            self._hand_over(target, gradients.settled(self.costs))
        else:  # the norm of a sum needs every use
            self._pending.setdefault(target, []).append(gradients)

    def _hand_over(self, place: int, gradients: PerImageGradients) -> None:
        assert self._collect is not None
        self._collect(place, gradients)

    # -- after the backward ------------------------------------------------------------------------

    def finish(self) -> None:
        """The backward is over: hand over what is left, the parameters that were used often."""
        self.stage = Stage.FINISHED
        for computed in [each for each in self._pending if isinstance(each, ComputedTensor)]:
            self._pull_back(computed, self._pending.pop(computed))
        for place in [each for each in self._pending if isinstance(each, int)]:
            self._hand_over(place, added(self._pending.pop(place), self.num_images, self.costs))

    def let_go(self) -> None:
        """Forget everything, so that nothing keeps the step's activations alive."""
        for held in (self.sites, self.arrivals, self.repeated, self._num_uses, self._pending):
            held.clear()
        self._collect = None

    def _pull_back(self, computed: ComputedTensor, parts: list[PerImageGradients]) -> None:
        """From a computed tensor to the parameters behind it, for every image."""
        value = computed.value
        images_at_once = max(1, PULL_BACK_NUMBERS // max(1, value.numel()))
        pieces: list[tuple[Tensor | None, ...]] = []
        for start in range(0, self.num_images, images_at_once):
            stop = min(start + images_at_once, self.num_images)
            written = formed_sum(parts, start, stop).view(stop - start, *value.shape)
            pieces.append(
                torch.autograd.grad(
                    value,
                    [self.parameters[place] for place in computed.parameters],
                    written.to(value.dtype),
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            )
        for place, shares in zip(computed.parameters, zip(*pieces, strict=True), strict=True):
            found = [share for share in shares if share is not None]
            if found:
                gradients = FormedGradients(values=torch.cat(found))
                self._pending.setdefault(place, []).append(gradients)


def _squares(rows_MR: Tensor) -> Tensor:
    """The squared length of every row, [M]."""
    return torch.linalg.vector_norm(
        rows_MR, dim=1, dtype=torch.promote_types(rows_MR.dtype, torch.float32)
    ).square()
