# ruff: noqa: N815 - names carry the shape of their tensor
"""The gradients of M images with respect to one parameter, in three compact forms.

Each form answers two questions without ever needing the others: how long is every image's gradient,
and what is their weighted sum. None is summed before the weights are known.

Shapes: M images of the microbatch, T positions of one image (tokens, pixels; 1 for plain vectors),
I inputs, O outputs, V rows of an embedding, P coordinates of the parameter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.dpsgd.balance import usual_flops_per_byte
from pipeline.dpsgd.products import (
    CAST_NUMBERS,
    accumulation_dtype,
    for_sums,
    for_wide_product,
    halves,
    sums_stay_wide,
    wide_product,
)

NORM_BLOCK = 1024
"""Squares are summed in blocks of so many: one long fp32 sum comes out too small (1 % at 1e8)."""

GRAM_ERROR = 16
"""Rounding of a Gram matrix, in units of the last place of the lengths that meet in an entry."""

WIDE_GRAM_ERROR = 512
"""The same for bf16 operands on a GPU, whose tensor cores cut partial sums off; to width 4,096."""

GRAM_STRIPES = 2
"""A Gram matrix is symmetric; in so many stripes, (1 + 1 / GRAM_STRIPES) / 2 of it is computed."""

STRIPED_POSITIONS = 96
"""From so many positions on, stripes cost less than whole Gram matrices: on one core of an AMD EPYC
about as much at 64 to 147, a sixth less at 197 and a fifth less at 257."""

PIECE_NUMBERS = 2**22
"""On the CPU, written-out gradients of large matrices are made in pieces of so many numbers."""


class Squares(NamedTuple):
    """Squared norms, [M], and by how much cancellation may have made them too small."""

    values_M: Tensor
    uncertainty_M: Tensor | None = None


def staged_squares(values: Tensor) -> Tensor:
    """The squared Euclidean norm of every row of [M, ...], summed in stages, [M]."""
    values_MP = values.reshape(values.shape[0], -1)
    num_images, num_values = values_MP.shape
    whole = num_values - num_values % NORM_BLOCK
    if whole == 0:
        return _row_squares(values_MP)
    blocks = values_MP[:, :whole].reshape(-1, NORM_BLOCK)
    block_squares = _row_squares(blocks).view(num_images, -1)
    total_M = block_squares.sum(dim=1)  # torch sums pairwise
    if whole < num_values:
        total_M = total_M + _row_squares(values_MP[:, whole:])
    return total_M


def _row_squares(values_NP: Tensor) -> Tensor:
    """The squared norm of every row, one short sum each, in the dtype of sums."""
    if values_NP.device.type != "cpu":
        dtype = accumulation_dtype(values_NP.dtype)
        return torch.linalg.vector_norm(values_NP, dim=1, dtype=dtype).square()
    squares = []
    for piece in for_sums(values_NP):
        rows = piece.contiguous().unsqueeze(1)  # the dot product reads twice as fast here
        squares.append(torch.bmm(rows, rows.transpose(1, 2)).view(-1))
    return torch.cat(squares)


@dataclass(frozen=True, kw_only=True)
class ImageWeights:
    """What every image's gradient is multiplied by, and which images are left out altogether.

    A left-out image is *selected* out: its numbers may be NaN, and 0 x NaN is NaN inside a matrix
    product. On the CPU the kept images are gathered; elsewhere the others are replaced by zeros, so
    that the device never waits for the host.

    Args:
        factors_M: weight times clip factor; exactly 0 where left out.
        is_kept_M: whether the image is kept.
        kept_images: the kept ones by number where some are left out and the host knows which.
        gathers: whether the kept ones are gathered, which asks the host.
    """

    factors_M: Tensor
    is_kept_M: Tensor
    kept_images: Tensor | None

    gathers: bool = True

    @classmethod
    def of(cls, factors_M: Tensor, is_kept_M: Tensor, *, gathers: bool = True) -> ImageWeights:
        """Weights that know how to select on the device they live on."""
        kept_images = None
        gathers = gathers and factors_M.device.type == "cpu"
        if gathers and not bool(is_kept_M.all()):
            kept_images = is_kept_M.nonzero().flatten()
        factors_M = torch.where(is_kept_M, factors_M, torch.zeros_like(factors_M))
        return cls(
            factors_M=factors_M, is_kept_M=is_kept_M, kept_images=kept_images, gathers=gathers
        )

    def of_images(self, start: int, stop: int) -> ImageWeights:
        """The weights of consecutive images."""
        return ImageWeights.of(
            self.factors_M[start:stop], self.is_kept_M[start:stop], gathers=self.gathers
        )

    @property
    def keeps_none(self) -> bool:
        """Whether it is known, without asking a device, that every image is left out."""
        return self.kept_images is not None and len(self.kept_images) == 0

    def select(self, values: Tensor) -> Tensor:
        """The kept images of [M, ...]: gathered on the CPU, zeros for the others elsewhere."""
        if not self.gathers:
            return self.zeroed(values)
        return values if self.kept_images is None else values.index_select(0, self.kept_images)

    def zeroed(self, values: Tensor) -> Tensor:
        """All images of [M, ...], the left-out ones replaced by zeros."""
        is_kept = self.is_kept_M.view(-1, *[1] * (values.dim() - 1))
        return torch.where(is_kept, values, torch.zeros_like(values))

    def scaled(self, values: Tensor) -> Tensor:
        """As `select`, each image times its factor, in the dtype of the factors."""
        factors = self.select(self.factors_M)
        return self.select(values) * factors.view(-1, *[1] * (values.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class NormCosts:
    """How a layer's norm is found: by Gram matrices ("ghost") or from the gradient itself.

    A ghost norm costs 2 T^2 (I + O) floating-point operations an image, fewer where symmetry is
    used, and keeps the T (I + O) numbers that the layer read and the gradient of what it wrote. A
    direct one keeps the I x O gradient, which is written once and read twice. "auto" takes the
    faster that does not need too much room.

    Args:
        mode: "auto", "ghost" or "direct".
        flops_per_byte: how many operations the machine does while it moves one byte; None: what
            `balance.py` states for such machines.
        room: a gradient is kept only if it takes at most so many times the room of what it is
            made from, counted in fp32 (so twice as many where both are bf16). Infinity: speed
            alone decides.
    """

    mode: str = "auto"
    flops_per_byte: float | None = None
    room: float = 1.5

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "ghost", "direct"):
            raise ValueError(f"mode must be 'auto', 'ghost' or 'direct', not {self.mode!r}")
        balance = 1.0 if self.flops_per_byte is None else self.flops_per_byte
        if not (math.isfinite(balance) and balance > 0):
            raise ValueError(f"flops_per_byte must be > 0 and finite, not {self.flops_per_byte}")
        if not self.room > 0:
            raise ValueError(f"room must be > 0, not {self.room}")

    def prefers_direct(
        self,
        num_positions: int,
        num_inputs: int,
        num_outputs: int,
        dtype: torch.dtype,
        device_type: str = "cpu",
    ) -> bool:
        """Whether the gradient of every image should be formed.

        Args:
            num_positions: T of the layer; with num_inputs I and num_outputs O.
            dtype: of inputs and output gradients. In bf16 a formed gradient takes half the bytes,
                and the weighted sum of the ghost form costs more: it is done in fp32 on the CPU, in
                two halves elsewhere.
            device_type: where it is computed.
        """
        if self.mode != "auto":
            return self.mode == "direct"
        sides = num_positions * (num_inputs + num_outputs)
        matrix = num_inputs * num_outputs
        room = self.room * (2 if dtype == torch.bfloat16 else 1)
        if num_positions == 1 or matrix > room * sides:
            return False
        ghost_flops = 2 * num_positions * sides * _computed_part(num_positions)
        if dtype == torch.bfloat16:
            ghost_flops += num_positions * matrix * (1 if device_type == "cpu" else 2)
        balance = self.flops_per_byte or usual_flops_per_byte(device_type, dtype)
        return ghost_flops > 3 * dtype.itemsize * matrix * balance


class PerImageGradients(ABC):
    """The gradient of each of M images with respect to one parameter of P coordinates."""

    @abstractmethod
    def squared_norms(self) -> Squares:
        """The squared norm of every image's gradient."""

    @abstractmethod
    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """Add sum_i w_i g_i to the buffer, in place; left-out images add exactly 0."""

    @abstractmethod
    def formed(self, start: int, stop: int) -> Tensor:
        """The gradients of images start to stop, written out, [stop - start, P]."""

    def settled(self, costs: NormCosts) -> PerImageGradients:
        """The form in which norm and sum are cheapest, once every use is known."""
        return self

    def tensors(self) -> Iterator[Tensor]:
        """What the gradients are made of: all that norm and sum both read."""
        for each in fields(self):  # type: ignore[arg-type]
            if isinstance(value := getattr(self, each.name), Tensor):
                yield value


@dataclass(frozen=True, kw_only=True, eq=False)
class FormedGradients(PerImageGradients):
    """Gradients written out, [M, ...] with P numbers an image."""

    values: Tensor

    def squared_norms(self) -> Squares:
        """By staged sums."""
        return Squares(staged_squares(self.values))

    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """One matrix-vector product."""
        values_MP = weights.select(self.values.reshape(self.values.shape[0], -1))
        factors_M = weights.select(weights.factors_M)
        width = values_MP.shape[1]
        if values_MP.device.type == "cpu" and values_MP.dtype != total_P.dtype:
            width = max(
                1, CAST_NUMBERS // max(1, len(values_MP))
            )  # so that casts stay in the cache
        for total, values in zip(total_P.split(width), values_MP.split(width, dim=1), strict=True):
            total.addmv_(values.to(total.dtype).t(), factors_M)

    def formed(self, start: int, stop: int) -> Tensor:
        """A slice."""
        return self.values[start:stop].reshape(stop - start, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class FormedInPieces(PerImageGradients):
    """Gradients of a large matrix, written out a few images at a time.

    Pieces find room in memory that the backward has just freed, where one large block would be
    fetched from the system anew; and their norm is taken while they are still in the cache.

    Args:
        pieces: gradients of consecutive images.
        squares_M: their squared norms.
    """

    pieces: tuple[FormedGradients, ...]
    squares_M: Tensor

    @classmethod
    def of(cls, pieces: Iterable[Tensor]) -> FormedInPieces:
        """Norms are taken as the pieces are made."""
        formed, squares = [], []
        for values in pieces:
            formed.append(FormedGradients(values=values))
            squares.append(staged_squares(values))
        return cls(pieces=tuple(formed), squares_M=torch.cat(squares))

    def tensors(self) -> Iterator[Tensor]:
        """The pieces; their norms are made of them."""
        for piece in self.pieces:
            yield piece.values

    def squared_norms(self) -> Squares:
        """As found when the pieces were made."""
        return Squares(self.squares_M)

    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """One matrix-vector product a piece."""
        start = 0
        for piece in self.pieces:
            stop = start + len(piece.values)
            piece.add_weighted_sum(weights.of_images(start, stop), total_P)
            start = stop

    def formed(self, start: int, stop: int) -> Tensor:
        """The pieces together."""
        values = torch.cat([piece.values for piece in self.pieces])[start:stop].flatten(1)
        return values.to(accumulation_dtype(values.dtype))


def _num_stripes(num_positions: int) -> int:
    return GRAM_STRIPES if num_positions >= STRIPED_POSITIONS else 1


def _computed_part(num_positions: int) -> float:
    """How much of a Gram matrix is computed."""
    return (1.0 + 1.0 / _num_stripes(num_positions)) / 2.0


def _sum_of(stripes: Sequence[Tensor], error: int = GRAM_ERROR) -> Squares:
    """The sum of products of positions, and what may have been lost where they cancel.

    An entry is rounded by `error` units of the product of two lengths, which are on the diagonal.

    Args:
        stripes: rows of the symmetric matrices [M, T, T], each stripe from its own diagonal block
            to the right: what lies left of it counts once more, by symmetry.
    """
    total_M, lengths_M = [], []
    for stripe_MSU in stripes:
        num_rows = stripe_MSU.shape[1]
        beside_MSV = stripe_MSU[:, :, num_rows:]
        total_M.append(stripe_MSU.flatten(1).sum(dim=1))
        if beside_MSV.shape[2]:
            total_M.append(beside_MSV.sum(dim=(1, 2)))
        lengths_M.append(stripe_MSU.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().sum(dim=1))
    unit = torch.finfo(stripes[0].dtype).eps / 2
    uncertainty_M = torch.stack(lengths_M).sum(dim=0).square() * (error * unit)
    return Squares(torch.stack(total_M).sum(dim=0), uncertainty_M)


def _gram_stripes(values_MTC: Tensor) -> Iterator[Tensor]:
    """The products of every two positions of one image, in stripes as `_sum_of` takes them."""
    num_positions = values_MTC.shape[1]
    height = -(-num_positions // _num_stripes(num_positions))
    for start in range(0, num_positions, height):
        rows_MSC = values_MTC[:, start : start + height]
        yield wide_product(rows_MSC, values_MTC[:, start:].transpose(1, 2))


@dataclass(frozen=True, kw_only=True, eq=False)
class OuterProducts(PerImageGradients):
    """The gradient of a matrix O x I, as the factors of sum_t g_t a_t': every linear layer.

    Args:
        inputs_MTI: what the layer read.
        output_gradients_MTO: the gradient of what it wrote.
    """

    inputs_MTI: Tensor
    output_gradients_MTO: Tensor

    def settled(self, costs: NormCosts) -> PerImageGradients:
        """Written out where that is cheaper than Gram matrices."""
        _, num_positions, num_inputs = self.inputs_MTI.shape
        num_outputs = self.output_gradients_MTO.shape[2]
        device = self.inputs_MTI.device.type
        dtype = self._product_dtype
        if costs.prefers_direct(num_positions, num_inputs, num_outputs, dtype, device):
            return FormedInPieces.of(self._pieces())
        return self

    @property
    def _product_dtype(self) -> torch.dtype:
        """bfloat16 where both sides are: autocast rounds a weight gradient to that as well.

        Norm and sum are then those of the rounded gradient, both in fp32, so the bound is kept.
        """
        dtypes = {self.inputs_MTI.dtype, self.output_gradients_MTO.dtype}
        return torch.bfloat16 if dtypes == {torch.bfloat16} else self._sum_dtype

    @property
    def _sum_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.inputs_MTI.dtype)

    def _pieces(self) -> Iterator[Tensor]:
        num_images, _, num_inputs = self.inputs_MTI.shape
        images_at_once = num_images
        if self.inputs_MTI.device.type == "cpu":
            numbers = num_inputs * self.output_gradients_MTO.shape[2]
            images_at_once = max(1, PIECE_NUMBERS // numbers)
        for start in range(0, num_images, images_at_once):
            stop = min(start + images_at_once, num_images)
            yield self._formed(start, stop, self._product_dtype)

    def squared_norms(self) -> Squares:
        """sum over positions t, u of (a_t . a_u)(g_t . g_u)."""
        inputs, gradients = self.inputs_MTI, self.output_gradients_MTO
        if inputs.shape[1] == 1:
            return Squares(staged_squares(inputs) * staged_squares(gradients))
        inputs, gradients = for_wide_product(inputs), for_wide_product(gradients)
        both = zip(_gram_stripes(inputs), _gram_stripes(gradients), strict=True)
        products = [of_inputs.mul_(of_gradients) for of_inputs, of_gradients in both]
        return _sum_of(products, WIDE_GRAM_ERROR if sums_stay_wide(inputs) else GRAM_ERROR)

    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """One matrix product; the factor goes to the narrower side.

        Where bf16 operands are faster that side, in fp32 now, is multiplied in two halves.
        """
        inputs, gradients = self.inputs_MTI, self.output_gradients_MTO
        total_OI = total_P.view(gradients.shape[2], inputs.shape[2])
        is_wide = sums_stay_wide(inputs) and sums_stay_wide(gradients)
        scales_inputs = inputs.shape[2] <= gradients.shape[2]
        if scales_inputs:
            inputs, gradients = weights.scaled(inputs), weights.select(gradients)
        else:
            inputs, gradients = weights.select(inputs), weights.scaled(gradients)
        inputs_NI, gradients_NO = inputs.flatten(0, 1), gradients.flatten(0, 1)
        if not is_wide:
            total_OI.addmm_(gradients_NO.t().to(total_P.dtype), inputs_NI.to(total_P.dtype))
            return
        for half in halves(inputs_NI if scales_inputs else gradients_NO):
            pair = (gradients_NO, half) if scales_inputs else (half, inputs_NI)
            total_OI.add_(wide_product(pair[0].t(), pair[1]))

    def formed(self, start: int, stop: int) -> Tensor:
        """One matrix product per image."""
        return self._formed(start, stop, self._sum_dtype).flatten(1)

    def _formed(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        gradients_MOT = self.output_gradients_MTO[start:stop].to(dtype).transpose(1, 2)
        return torch.bmm(gradients_MOT, self.inputs_MTI[start:stop].to(dtype))


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingRows(PerImageGradients):
    """The gradient of an embedding V x O: row ids[t] receives the gradient of position t.

    Args:
        ids_MT: the row read at every position, int64.
        output_gradients_MTO: the gradient of what was read.
        num_rows: V.
    """

    ids_MT: Tensor
    output_gradients_MTO: Tensor
    num_rows: int

    def squared_norms(self) -> Squares:
        """sum over positions t, u that read the same row, of g_t . g_u."""
        gradients = self.output_gradients_MTO
        gradients = gradients.to(accumulation_dtype(gradients.dtype))
        grams_MTT = torch.bmm(gradients, gradients.transpose(1, 2))
        is_same_row_MTT = self.ids_MT.unsqueeze(1) == self.ids_MT.unsqueeze(2)
        return _sum_of([torch.where(is_same_row_MTT, grams_MTT, torch.zeros_like(grams_MTT))])

    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """Add every scaled position to the row that it read."""
        scaled = weights.scaled(self.output_gradients_MTO.to(total_P.dtype))
        ids = weights.select(self.ids_MT).flatten()
        total_P.view(self.num_rows, -1).index_add_(0, ids, scaled.flatten(0, 1))

    def formed(self, start: int, stop: int) -> Tensor:
        """One table per image."""
        gradients = self.output_gradients_MTO[start:stop]
        gradients = gradients.to(accumulation_dtype(gradients.dtype))
        tables = gradients.new_zeros(stop - start, self.num_rows, gradients.shape[2])
        ids_MTO = self.ids_MT[start:stop].unsqueeze(2).expand_as(gradients)
        return tables.scatter_add_(1, ids_MTO, gradients).flatten(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnRows(PerImageGradients):
    """The gradient of a tensor whose leading rows each belong to one image, in image order.

    Image i touches its own block of rows alone, so its gradient is zero everywhere else.

    Args:
        values_MR: the gradient of the R numbers in each image's block.
    """

    values_MR: Tensor

    def squared_norms(self) -> Squares:
        """By staged sums."""
        return Squares(staged_squares(self.values_MR))

    def add_weighted_sum(self, weights: ImageWeights, total_P: Tensor) -> None:
        """Every image adds to its own rows."""
        zeroed_MR = weights.zeroed(self.values_MR).to(total_P.dtype)
        total_P.add_((zeroed_MR * weights.factors_M.unsqueeze(1)).flatten())

    def formed(self, start: int, stop: int) -> Tensor:
        """Zeros around each image's own block."""
        num_images, num_values = self.values_MR.shape
        dtype = accumulation_dtype(self.values_MR.dtype)
        blocks = self.values_MR.new_zeros(stop - start, num_images, num_values, dtype=dtype)
        images = torch.arange(start, stop, device=blocks.device)
        blocks[images - start, images] = self.values_MR[start:stop].to(dtype)
        return blocks.flatten(1)


def added(
    parts: Sequence[PerImageGradients], num_images: int, costs: NormCosts
) -> PerImageGradients:
    """The gradients of a parameter that was used several times: the sum over its uses."""
    if len(parts) == 1:
        return parts[0].settled(costs)
    outer = [part for part in parts if isinstance(part, OuterProducts)]
    widths = {(part.inputs_MTI.shape[2], part.output_gradients_MTO.shape[2]) for part in outer}
    if len(outer) == len(parts) and len(widths) == 1:
        num_positions = sum(part.inputs_MTI.shape[1] for part in outer)
        dtype = accumulation_dtype(outer[0].inputs_MTI.dtype)
        device = outer[0].inputs_MTI.device.type
        if not costs.prefers_direct(num_positions, *widths.pop(), dtype, device):
            return OuterProducts(
                inputs_MTI=torch.cat([part.inputs_MTI.to(dtype) for part in outer], dim=1),
                output_gradients_MTO=torch.cat(
                    [part.output_gradients_MTO.to(dtype) for part in outer], dim=1
                ),
            )
    return FormedGradients(values=formed_sum(parts, 0, num_images))


def formed_sum(parts: Sequence[PerImageGradients], start: int, stop: int) -> Tensor:
    """The written-out gradients of images start to stop, summed over uses, [stop - start, P]."""
    total = parts[0].formed(start, stop)
    for part in parts[1:]:
        total = total + part.formed(start, stop)
    return total
