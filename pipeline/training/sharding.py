"""The optimizer of a phase, whole on every rank or its state sharded over them (ZeRO, stage 1).

    released slice of each rank --AdamW of the slice--> its part of the weights --all-gather--> all

Sharded, a rank holds the moments of its `rank_slice` alone, is given that slice of the gradient,
and sends the weights that it moved instead of receiving the rest of the gradient: as many bytes as
without sharding, 1/W of the moments and of the work, and the same numbers to the bit. Checkpoints
hold the whole state whatever the number of ranks, so that any other number may go on from them.

Source: arXiv 1910.02054 (ZeRO), section 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline import recipe
from pipeline.dpsgd.layout import ParameterLayout, trainable_parameters
from pipeline.dpsgd.release import (
    REDUCE_BUCKET,
    PublicGradient,
    ReleasedGradient,
    all_gather_slices,
    rank_slice,
)
from pipeline.training.optimizers import (
    Reset,
    check_state_shape,
    make_optimizer,
    optimizer_of,
    optimizer_tensors,
    restore_optimizer,
    set_rate,
)
from pipeline.training.ranks import Ranks

Gradient = ReleasedGradient | PublicGradient

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class PhaseOptimizer(Protocol):
    """What moves the weights of a phase. Every rank makes every call, in the same order."""

    is_sharded: bool
    """Whether `step` is given this rank's slice of the gradient instead of all of it."""

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""

    def step(self, gradient: Gradient) -> None:
        """Move the weights, equally on every rank.

        Raises:
            ValueError: a private phase's optimizer takes a ReleasedGradient alone, a public one's a
                PublicGradient; whole or sliced as `is_sharded` says.
        """

    def tensors(self) -> dict[str, Tensor]:
        """The state of all ranks as `{parameter}|{entry}` on rank 0; nothing on the others."""

    def restore(self, tensors: Mapping[str, Tensor], reset: Reset = "none") -> None:
        """Put the state of all ranks back, as `restore_optimizer` does."""


def open_optimizer(
    model: nn.Module, phase: recipe.Phase, ranks: Ranks, *, is_private: bool
) -> PhaseOptimizer:
    """The phase's optimizer, sharded if the recipe wants it and there are ranks to share."""
    accepted = ReleasedGradient if is_private else PublicGradient
    if phase.resources.shard_optimizer and ranks.world_size > 1:
        return ShardedOptimizer(model, phase.optimizer, ranks, accepted)
    return WholeOptimizer(model, phase.optimizer, ranks, accepted)


def _require(gradient: object, accepted: type) -> None:
    if type(gradient) is not accepted:
        raise ValueError(
            f"this phase's optimizer takes a {accepted.__name__} and nothing else, not a "
            f"{type(gradient).__name__}"
        )


class WholeOptimizer:
    """The optimizer with its whole state on every rank.

    Args:
        model: whose trainable parameters it moves.
        config: the recipe's section.
        ranks: this process among the others.
        accepted: the only kind of gradient that it takes.
    """

    is_sharded = False

    def __init__(
        self,
        model: nn.Module,
        config: recipe.Optimizer,
        ranks: Ranks,
        accepted: type[ReleasedGradient] | type[PublicGradient],
    ) -> None:
        self._model, self._ranks, self._accepted = model, ranks, accepted
        self._optimizer = make_optimizer(model.named_parameters(), config)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        set_rate(self._optimizer, rate)

    def step(self, gradient: Gradient) -> None:
        """Move the weights."""
        _require(gradient, self._accepted)
        gradient.assign(self._model)
        self._optimizer.step()
        self._optimizer.zero_grad()  # 4 bytes a parameter, else held beside the next activations

    def tensors(self) -> dict[str, Tensor]:
        """The state, on rank 0."""
        if self._ranks.rank:
            return {}
        return optimizer_tensors(self._optimizer, self._model.named_parameters())

    def restore(self, tensors: Mapping[str, Tensor], reset: Reset = "none") -> None:
        """Put the state back."""
        restore_optimizer(self._optimizer, self._model.named_parameters(), tensors, reset)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """The part of one parameter that lies in this rank's slice.

    Args:
        place: of the parameter in the layout.
        begin, end: its coordinates in the flat vector.
        values: the weights there, sharing the model's memory, [end - begin].
    """

    place: int
    begin: int
    end: int
    values: nn.Parameter


class ShardedOptimizer:
    """The optimizer with each rank's slice of the state on that rank alone.

    The model's trainable parameters are moved into one flat vector of this optimizer, of which they
    are views from then on: `model.load_state_dict` is fine, `model.to(...)` is refused at the next
    step.

    Args:
        model: whose trainable parameters it moves.
        config: the recipe's section.
        ranks: this process among the others.
        accepted: the only kind of gradient that it takes.

    Guarantees:
        1. Weights and state are those of the `WholeOptimizer`, to the bit, whatever the number of
           ranks (tests/training/test_sharding.py, test_sharded_is_whole).
        2. `tensors` and `restore` speak of the whole state: a run goes on with another number of
           ranks, or whole, as if nothing had been (test_sharded_is_whole).
    """

    is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        config: recipe.Optimizer,
        ranks: Ranks,
        accepted: type[ReleasedGradient] | type[PublicGradient],
    ) -> None:
        self._accepted, self._ranks = accepted, ranks
        self._layout = ParameterLayout.of(model)
        self._parameters = list(trainable_parameters(model).values())
        self._length = -(-self._layout.num_coordinates // ranks.world_size)
        self._start, self._stop = rank_slice(self._layout.num_coordinates)
        self._home = self._move_in()
        self._pieces = self._cut()
        by_kind: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])  # matrices, vectors
        for piece in self._pieces:
            by_kind[self._parameters[piece.place].ndim < 2].append(piece.values)
        if not self._pieces:  # more ranks than numbers; torch takes no optimizer of nothing
            by_kind[0].append(nn.Parameter(self._home[:0]))
        self._optimizer = optimizer_of(*by_kind, config)
        has_moments = config.name == "adamw" or config.momentum > 0
        self._moments = _MOMENTS[config.name] if has_moments else ()

    def _move_in(self) -> Tensor:
        """One flat vector of the weights, padded to equal slices, with the model living in it."""
        num_padded = self._length * self._ranks.world_size
        home = self._parameters[0].detach().new_zeros(num_padded)
        views = self._layout.views(home[: self._layout.num_coordinates]).values()
        for parameter, view in zip(self._parameters, views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        return home

    def _cut(self) -> list[_Piece]:
        pieces = []
        for place, offset in enumerate(self._layout.offsets):
            begin = max(offset, self._start)
            end = min(offset + self._parameters[place].numel(), self._stop)
            if begin < end:
                values = nn.Parameter(self._home[begin:end])
                pieces.append(_Piece(place=place, begin=begin, end=end, values=values))
        return pieces

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""
        set_rate(self._optimizer, rate)

    def step(self, gradient: Gradient) -> None:
        """Move the weights of this rank's slice, then have all ranks' slices."""
        _require(gradient, self._accepted)
        found = (gradient.start, gradient.start + len(gradient.flat))
        if gradient.layout != self._layout or found != (self._start, self._stop):
            raise ValueError(
                f"rank {self._ranks.rank} moves coordinates {self._start} to {self._stop} and was "
                f"given a gradient of {found[0]} to {found[1]}: release it with gathers=False"
            )
        self._check_home()
        for piece in self._pieces:
            part = gradient.flat[piece.begin - self._start : piece.end - self._start]
            piece.values.grad = part.to(piece.values.device, piece.values.dtype)
        self._optimizer.step()
        for piece in self._pieces:
            piece.values.grad = None
        begin = self._ranks.rank * self._length
        all_gather_slices(self._home, self._home[begin : begin + self._length].clone())

    def _check_home(self) -> None:
        size, first = self._home.element_size(), self._home.data_ptr()
        for parameter, offset in zip(self._parameters, self._layout.offsets, strict=True):
            if parameter.data_ptr() != first + size * offset:
                raise ValueError(
                    "the model's parameters were moved or replaced after its optimizer was opened; "
                    "call model.to(...) before"
                )

    # -- what a checkpoint keeps -------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The state of all ranks, on rank 0, in CPU memory; gathered bucket by bucket."""
        counts = self._counts()
        found: dict[str, Tensor] = {}
        for moment in self._moments:
            flat = self._gathered(moment)
            if flat is not None:
                for name, view in self._layout.views(flat).items():
                    found[f"{name}|{moment}"] = view
        if self._ranks.rank:
            return {}
        kept: dict[str, Tensor] = {}
        for name, count in zip(self._layout.names, counts.tolist(), strict=True):
            if count < 0:
                continue
            if "exp_avg" in self._moments:
                kept[f"{name}|step"] = torch.tensor(count, dtype=torch.float32)
            for moment in self._moments:
                kept[f"{name}|{moment}"] = found[f"{name}|{moment}"]
        return kept

    def _counts(self) -> Tensor:
        """Adam's step count of every parameter (0 without one); -1 where there is no state."""
        counts = torch.full((len(self._layout.names),), -1.0, device=self._home.device)
        for piece in self._pieces:
            state = self._optimizer.state.get(piece.values)
            if state:
                counts[piece.place] = float(state.get("step", 0.0))
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return counts

    def _gathered(self, moment: str) -> Tensor | None:
        """One moment of all ranks, [num_coordinates] on rank 0's CPU."""
        own = self._home.new_zeros(self._length)
        for piece in self._pieces:
            value = self._optimizer.state.get(piece.values, {}).get(moment)
            if value is not None:
                own[piece.begin - self._start : piece.end - self._start] = value
        world_size, is_first = self._ranks.world_size, self._ranks.rank == 0
        whole = torch.empty(self._length * world_size, dtype=own.dtype) if is_first else None
        width = max(1, REDUCE_BUCKET // world_size)
        for begin in range(0, self._length, width):
            bucket = own[begin : begin + width]
            parts = [torch.empty_like(bucket) for _ in range(world_size)] if is_first else None
            dist.gather(bucket, parts, dst=0)
            for rank, part in enumerate(parts or ()):
                assert whole is not None
                first = rank * self._length + begin
                whole[first : first + len(part)] = part.cpu()
        return None if whole is None else whole[: self._layout.num_coordinates]

    def restore(self, tensors: Mapping[str, Tensor], reset: Reset = "none") -> None:
        """Put this rank's slice of the state back."""
        if reset == "all":  # of whatever model it is
            return
        own: dict[str, Tensor] = {}
        named = []
        for piece in self._pieces:
            name, offset = self._layout.names[piece.place], self._layout.offsets[piece.place]
            named.append((name, piece.values))
            for key in (f"{name}|{entry}" for entry in ("step", *self._moments)):
                if key in tensors:
                    value = tensors[key]
                    check_state_shape(name, value, self._layout.shapes[piece.place])
                    inside = slice(piece.begin - offset, piece.end - offset)
                    own[key] = value.flatten()[inside] if value.ndim else value
        restore_optimizer(self._optimizer, named, own, reset)
