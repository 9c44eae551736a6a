# ruff: noqa: N802, N815 - names carry the shape of their tensor
"""Clipped per-image gradient sums in one forward and one backward.

The forward runs under a watch (`tracing.py`) that sends every use of a trainable parameter to a
rule (`layer_rules`). The single backward computes input gradients only; each rule leaves behind
what determines its per-image weight gradients (`tape.py`, `per_image.py`). From these come the norm
of every image's whole gradient, the clip factors, and then the weighted sum: one matrix product a
layer, straight into one flat buffer.

Source: ghost norms: Li et al., arXiv 2110.05679, section 4. One backward ("book-keeping"): Bu et
al., arXiv 2210.00038, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from pipeline.dpsgd.blocks import ParameterBlocks, all_layer, only_block
from pipeline.dpsgd.clipping import MARGIN, Clipping
from pipeline.dpsgd.independence import IndependenceCheck
from pipeline.dpsgd.layer_rules import RULE_BOOK, lift
from pipeline.dpsgd.layout import ParameterLayout, Trainable, trainable_parameters
from pipeline.dpsgd.model_state import ModelState
from pipeline.dpsgd.per_image import (
    ImageWeights,
    NormCosts,
    PerImageGradients,
    Squares,
)
from pipeline.dpsgd.products import accumulation_dtype, exact_products
from pipeline.dpsgd.tape import Stage, Tape, UnsupportedOperationError
from pipeline.dpsgd.tracing import ParameterTrace


@dataclass(frozen=True, kw_only=True)
class PerImage:
    """Facts about every image of a microbatch, [M] or [M, K]. They are PRIVATE: never publish them.

    Args:
        losses_M: the loss.
        norms_M: the norm of the gradient over all trainable parameters.
        block_norms_MK: its norm over the parameters of each of the K blocks.
        block_factors_MK: what each block was multiplied by; exactly 0 where the image was left out.
    """

    losses_M: Tensor
    norms_M: Tensor
    block_norms_MK: Tensor
    block_factors_MK: Tensor

    @property
    def factors_M(self) -> Tensor:
        """What the whole gradient was multiplied by, where it is one block; else ValueError."""
        return only_block(self.block_factors_MK)


@dataclass(kw_only=True)
class Capture:
    """What one microbatch adds, in tensors of its own.

    Args:
        facts: of its images.
        sums: by the parameter's place in the layout, flat; of every parameter that was used.
        materials: what norms and sums are both made of.
    """

    facts: PerImage | None = None
    sums: dict[int, Tensor] = field(default_factory=dict)
    materials: list[Tensor] = field(default_factory=list)

    def sum_for(self, place: int, of: ClippedGradientSum) -> Tensor:
        """Zeros, to which a parameter's sum is added."""
        sum_P = torch.zeros(
            of.parameters[place].numel(), dtype=of.flat_sum.dtype, device=of.flat_sum.device
        )
        self.sums[place] = sum_P
        return sum_P


class ClippedGradientSum:
    """Adds clipped per-image gradients of any torch model into one flat buffer.

        clipped = ClippedGradientSum(model, FlatClipping(1.0))
        for images, weights in microbatches:
            clipped.accumulate(lambda: model.loss_per_image(images), weights)
        # clipped.flat_sum is sum_i w_i c_i g_i; it is private until noise is added (release.py)
        clipped.zero_()

    Nothing has to be wrapped, hooked or replaced in the model, and `.grad` is not touched.

    Args:
        model: a module, or (name, parameter) pairs. Parameters without requires_grad are constants;
            one with it that the forward uses and that is not given is refused.
        clipping: from norms to factors; states the sensitivity of the sum.
        blocks: the parameters that are clipped together (`blocks.py`); all of them where not given.
            With K blocks each is clipped by `clipping.of_blocks(K)`: the sensitivity is the same.
        mode: how a layer's norm is found: "ghost" (Gram matrices), "direct" (the gradient of every
            image) or "auto" (the cheaper one, by `flops_per_byte`).
        flops_per_byte: the machine's balance: floating-point operations in the time of one byte;
            where not given, what is usual (`balance.USUAL`: 8 on a CPU, which prefers kept
            gradients only where they are clearly faster); `measured_flops_per_byte` measures it.
        room: "auto" keeps the gradients of all images of a layer only where they take at most so
            many times the room of what they are made from; infinity: speed alone decides.
        two_backwards: find the norms in a first backward that keeps nothing, and the sum in a
            second one over the same graph. With activation checkpointing, memory is then that of a
            checkpointed plain step; without, it saves little. "auto" means "ghost" with it. Norms
            are taken again in the second, and compared, which waits for the device.
        checks_independence: before the gradients of a model are first used, run one more backward
            and refuse the model if the loss of one image reaches another image's activations. Done
            again in logical batches 2, 4, 8, ...: a coupling may begin in training.

    Raises:
        ValueError: no trainable parameter; mixed dtypes or devices; an unknown mode; blocks that
            are not of this model's trainable parameters.

    Guarantees:
        1. Equal to the definition: `reference_clipped_sum`, to 1e-10 in float64
           (tests/dpsgd/test_engine.py).
        2. Fails closed: a use of a trainable parameter that has no rule raises, naming both, before
           anything is added (tests/guarantees/test_fails_closed.py).
        3. What one image adds has norm <= clipping.sensitivity, in fp32, TF32 and bf16, however
           many blocks there are (tests/guarantees/test_sensitivity.py, test_block_sensitivity.py).
        4. An image with weight 0, or whose loss or norm (of any block) is not finite, adds exactly
           0 and changes no other image's part (tests/guarantees/test_not_finite.py).
        5. An image's part does not depend on the other images of its microbatch
           (tests/guarantees/test_images_are_independent.py).
    """

    def __init__(
        self,
        model: Trainable,
        clipping: Clipping,
        *,
        blocks: ParameterBlocks | None = None,
        mode: str = "auto",
        flops_per_byte: float | None = None,
        room: float = 1.5,
        two_backwards: bool = False,
        checks_independence: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            model = list(model)
        self.clipping = clipping
        self.layout = ParameterLayout.of(model)
        self._blocks = (all_layer(model) if blocks is None else blocks).places(self.layout)
        self._block_clipping = clipping.of_blocks(len(self._blocks))
        self._block_of = {place: k for k, places in enumerate(self._blocks) for place in places}
        self.model = model
        self.parameters = tuple(trainable_parameters(model).values())
        if two_backwards and mode == "auto":  # a gradient formed for its norm would not be kept
            mode = "ghost"
        self.two_backwards = two_backwards
        self._costs = NormCosts(mode=mode, flops_per_byte=flops_per_byte, room=room)
        self._independence = IndependenceCheck() if checks_independence else None
        self._num_batches = 0
        first = self.parameters[0]
        self.flat_sum = torch.zeros(
            self.layout.num_coordinates,
            dtype=accumulation_dtype(first.dtype),
            device=first.device,
        )

    def zero_(self) -> None:
        """Start the next logical batch."""
        self.flat_sum.zero_()
        self._num_batches += 1
        if self._independence is not None and self._num_batches.bit_count() == 1:  # 2^n
            self._independence.begin_again()

    def accumulate(
        self, loss_per_image: Callable[[], Tensor], weights: Tensor | None = None
    ) -> PerImage:
        """Add sum_i w_i c_i g_i of one microbatch of M images to `flat_sum`.

        Args:
            loss_per_image: runs the forward and returns the loss of every image, [M]; called once.
            weights: w_i in [0, 1], [M]; 0 marks padding. 1 where not given. Best on the CPU, where
                the range is checked; on a device, a weight outside it leaves the image out.

        Returns:
            Losses, norms and factors of the images. They are private.

        Raises:
            UnsupportedOperationError: a use of a trainable parameter without a rule, or coupled
                images. Nothing was added.
            ValueError: losses or weights of the wrong shape or range. Nothing was added.
        """
        return self._accumulate(loss_per_image, weights, capture=None)

    def captured(self, loss_per_image: Callable[[], Tensor], weights_M: Tensor) -> Capture:
        """The same without what asks the host, and into new tensors: for `compiled.py`.

        Args:
            loss_per_image: as for `accumulate`.
            weights_M: checked before, in the dtype of the sum.
        """
        capture = Capture()
        capture.facts = self._accumulate(loss_per_image, weights_M, capture=capture)
        return capture

    @property
    def has_proven_all(self) -> bool:
        """Whether the images of the last microbatch were proven independent wherever they met a
        parameter, or need not be."""
        return self._independence is None or self._independence.has_proven_all

    def _accumulate(
        self,
        loss_per_image: Callable[[], Tensor],
        weights: Tensor | None,
        capture: Capture | None,
    ) -> PerImage:
        state = ModelState(self.model)
        state.check_trained(self.parameters)
        tape = Tape(layout=self.layout, parameters=self.parameters, costs=self._costs)
        anchor = torch.zeros((), device=self.flat_sum.device, requires_grad=True)
        trace = ParameterTrace(tape, RULE_BOOK, state.constants, anchor)
        try:
            return self._watched(loss_per_image, weights, trace, state, capture)
        except UnsupportedOperationError:
            if self._independence is not None:
                self._independence.forget_silent()
            raise
        finally:
            # Activations point to autograd nodes, nodes to the tape and the tape to activations:
            # a cycle through C++ that the garbage collector cannot see.
            trace.let_go()
            tape.let_go()

    def _watched(
        self,
        loss_per_image: Callable[[], Tensor],
        weights: Tensor | None,
        trace: ParameterTrace,
        state: ModelState,
        capture: Capture | None,
    ) -> PerImage:
        tape = trace.tape
        device = self.flat_sum.device.type
        with _unruled_gradients_raise(tape), torch.enable_grad():
            with trace:
                losses_M = loss_per_image()
            self._check_losses(losses_M)
            if trace.is_trained(losses_M):  # computed from parameters and constants alone
                losses_M = lift(trace, "loss", losses_M, 1, len(losses_M))
            if capture is None or weights is None:
                weights_M = self.checked_weights(losses_M, weights)
            else:
                weights_M = weights
            state.check_unchanged(trace.written, trace.is_constant)
            tape.expect_images(len(losses_M))
            is_wanted_M = torch.isfinite(losses_M.detach()) & (weights_M > 0) & (weights_M <= 1)
            with torch.autocast(device, enabled=False):
                if self._independence is not None and capture is None:
                    self._independence.check(tape, losses_M, partial(_backward, trace, losses_M))
                return self._clip_and_add(trace, losses_M, weights_M, is_wanted_M, capture)

    def _clip_and_add(
        self,
        trace: ParameterTrace,
        losses_M: Tensor,
        weights_M: Tensor,
        is_wanted_M: Tensor,
        capture: Capture | None,
    ) -> PerImage:
        """From the losses to norms, to factors, to the weighted sum; in one backward or two."""
        tape = trace.tape
        ones_M = is_wanted_M.to(losses_M.dtype)
        squares: dict[int, Squares] = {}
        kept: dict[int, PerImageGradients] = {}
        versions: dict[int, list[int]] = {}

        def measure(place: int, gradients: PerImageGradients) -> None:
            squares[place] = gradients.squared_norms()
            if not self.two_backwards:
                kept[place] = gradients
                versions[place] = [each._version for each in gradients.tensors()]

        tape.begin_backward(measure)
        replay = _replay_of_random_numbers(self.flat_sum.device) if self.two_backwards else None
        _backward(trace, losses_M, ones_M, keeps_graph=self.two_backwards)
        with torch.no_grad(), exact_products():
            tape.finish()
            if self._independence is not None and capture is None:
                self._independence.check_repeated(tape, is_wanted_M)
            facts, is_kept_M = self._factors(squares, losses_M.detach(), weights_M, is_wanted_M)
            weights_of = [
                ImageWeights.of(factors_M, is_kept_M, gathers=capture is None)
                for factors_M in facts.block_factors_MK.unbind(1)
            ]

        again: dict[int, Squares] = {}

        def add(place: int, gradients: PerImageGradients) -> None:
            if place not in squares:
                raise UnsupportedOperationError(
                    f"parameter {tape.names([place])} got a gradient in the second backward alone: "
                    "its norm is unknown. Use two_backwards=False"
                )
            if self.two_backwards:
                again[place] = gradients.squared_norms()
            total_P = self.sum_of(place) if capture is None else capture.sum_for(place, self)
            with torch.no_grad():
                gradients.add_weighted_sum(weights_of[self._block_of[place]], total_P)

        if weights_of[0].keeps_none:
            return facts
        for place, gradients in kept.items():
            if versions[place] != [each._version for each in gradients.tensors()]:
                raise UnsupportedOperationError(
                    f"what the gradient of parameter {tape.names([place])} is made of was changed "
                    "in place after its norm was taken: a hook or a backward of the model changes "
                    "the gradient that it is given; let it return a new tensor"
                )
        if capture is not None:
            capture.materials = [each for made in kept.values() for each in made.tensors()]
        if replay is not None:
            replay()  # a segment that drops out anew must drop what it dropped when measured
            tape.begin_backward(add)
            _backward(trace, losses_M, ones_M, keeps_graph=False)
        with torch.no_grad(), exact_products():
            if replay is not None:
                tape.finish()
                self._require_same(facts, again, losses_M.detach(), weights_M, is_wanted_M)
            for place in list(kept):
                add(place, kept.pop(place))  # and let it go
        return facts

    # -- before ------------------------------------------------------------------------------------

    def _check_losses(self, losses_M: object) -> None:
        if not isinstance(losses_M, Tensor) or not losses_M.is_floating_point():
            raise ValueError(
                f"loss_per_image must return a floating-point tensor, not {type(losses_M).__name__}"
            )
        if losses_M.dim() != 1 or len(losses_M) == 0:
            raise ValueError(
                "loss_per_image must return one loss per image, shape [M] with M >= 1, not "
                f"{tuple(losses_M.shape)}; average over an image's positions, never over images"
            )
        if not losses_M.requires_grad:
            raise ValueError("the losses do not depend on any trainable parameter")
        if losses_M.device.type != self.flat_sum.device.type:
            raise ValueError(
                f"the losses are on {losses_M.device} and the parameters on {self.flat_sum.device}"
            )

    def checked_weights(self, losses_M: Tensor, weights: Tensor | None) -> Tensor:
        """The weights of images with these losses, in the dtype of the sum. Raises ValueError."""
        if weights is None:
            return torch.ones_like(losses_M, dtype=self.flat_sum.dtype, requires_grad=False)
        if weights.shape != losses_M.shape:
            raise ValueError(
                f"weights must have one entry per loss, shape {tuple(losses_M.shape)}, not "
                f"{tuple(weights.shape)}"
            )
        weights = weights.detach()
        if weights.device.type == "cpu" and not bool(((weights >= 0) & (weights <= 1)).all()):
            raise ValueError("weights must lie in [0, 1]: a larger one would exceed the clip norm")
        return weights.to(losses_M.device, self.flat_sum.dtype, non_blocking=True)

    # -- after -------------------------------------------------------------------------------------

    def _factors(
        self,
        squares: Mapping[int, Squares],
        losses_M: Tensor,
        weights_M: Tensor,
        is_wanted_M: Tensor,
    ) -> tuple[PerImage, Tensor]:
        """From squared norms to the factors of every block, and to which images are kept."""
        of_blocks = [
            [squares[place] for place in places if place in squares] for places in self._blocks
        ]
        norms_MK = torch.stack([_whole_norms(block, weights_M) for block in of_blocks], dim=1)
        is_kept_M = is_wanted_M & torch.isfinite(norms_MK).all(dim=1)
        factors_MK = torch.where(
            is_kept_M.unsqueeze(1),
            self._block_clipping.factors(norms_MK) * weights_M.unsqueeze(1),
            torch.zeros_like(norms_MK),
        )
        facts = PerImage(
            losses_M=losses_M,
            norms_M=norms_MK.double().square().sum(dim=1).sqrt().to(norms_MK.dtype),
            block_norms_MK=norms_MK,
            block_factors_MK=factors_MK,
        )
        return facts, is_kept_M

    def _require_same(self, facts: PerImage, again: Mapping[int, Squares], *more: Tensor) -> None:
        """What the second backward added was no longer than what the first one measured."""
        now_MK = self._factors(again, *more)[0].block_norms_MK
        is_longer_MK = ~(now_MK <= facts.block_norms_MK * (1 + (1 - MARGIN) / 2))
        if bool((is_longer_MK & (facts.block_factors_MK > 0)).any()):
            self.flat_sum.zero_()
            raise UnsupportedOperationError(
                "the second backward gave other gradients than the first, so their norms are "
                "unknown: the model or a checkpointed segment draws random numbers that are not "
                "torch's, or keeps a state in its backward. The whole sum was set to 0. Use "
                "two_backwards=False (activation_checkpointing: false)"
            )

    def sum_of(self, place: int) -> Tensor:
        """The part of the sum that is the parameter's at this place of the layout, flat."""
        start = self.layout.offsets[place]
        return self.flat_sum[start : start + self.parameters[place].numel()]


def _replay_of_random_numbers(device: torch.device) -> Callable[[], None]:
    """Makes torch draw from here on what it draws after this call."""
    on_host = torch.get_rng_state()
    of_device = torch.get_device_module(device) if device.type != "cpu" else None
    on_device = of_device.get_rng_state(device) if of_device is not None else None

    def replay() -> None:
        torch.set_rng_state(on_host)
        if of_device is not None:
            of_device.set_rng_state(on_device, device)

    return replay


def _whole_norms(squares: Sequence[Squares], like_M: Tensor) -> Tensor:
    """The norm of every image's gradient over all parameters of a block, never too small, [M].

    Where cancellation may have hidden more than the clippers' margin, what it may have hidden is
    added: such an image is clipped a little too much.
    """
    if not squares:
        return torch.zeros_like(like_M)
    uncertain = [each.uncertainty_M for each in squares if each.uncertainty_M is not None]
    total_M = torch.stack([each.values_M for each in squares]).double().sum(dim=0).clamp_min(0)
    uncertainty_M = torch.zeros_like(total_M)
    if uncertain:
        uncertainty_M = torch.stack(uncertain).double().sum(dim=0)
    is_uncertain_M = uncertainty_M > total_M * (1.0 - MARGIN)
    total_M = torch.where(is_uncertain_M, total_M + uncertainty_M, total_M)
    return total_M.sqrt().to(like_M.dtype)


def _backward(
    trace: ParameterTrace, losses_M: Tensor, gradient_M: Tensor, *, keeps_graph: bool = True
) -> None:
    """`torch.autograd.backward` with the trace on, which governs checkpointed segments.

    The public function is a torch function itself, and would suspend the trace while it runs.
    """
    with trace:
        torch.autograd.Variable._execution_engine.run_backward(
            (losses_M,), (gradient_M,), keeps_graph, False, (), True, True
        )


@contextmanager
def _unruled_gradients_raise(tape: Tape) -> Iterator[None]:
    """While it lasts, a gradient that reaches a parameter past the rules raises."""

    def hook_for(place: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if tape.stage is not Stage.FINISHED:
                raise UnsupportedOperationError(
                    f"a gradient reached parameter {tape.names([place])} past every rule: it was "
                    "used in a way that cannot be seen (a custom autograd function, a compiled or "
                    "scripted module, or a tensor computed from it before the forward)"
                )

        return hook

    handles = [
        parameter.register_hook(hook_for(place)) for place, parameter in enumerate(tape.parameters)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
