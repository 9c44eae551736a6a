"""Does the loss of one image reach another image's activations? Then no gradient is its own.

One extra backward tells, in which half of the losses have gradient 0: nothing may arrive in the
rows of those images, and what arrives in the other rows must arrive there again in the ordinary
backward. It also finds activations whose leading dimension is not the image dimension.

It is a test of the numbers that a model computes today. A gate that opens in training may join
images later, so the engine asks again with logical batches 2, 4, 8, 16, ...
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.dpsgd.tape import Tape, UnsupportedOperationError

SiteKey = tuple[int, str, str, int, int]

SAME_TO = 1e-2
"""Squared norms of one image's rows in two backwards differ by at most this share, by rounding."""

NOTHING = 1e-6
"""Rows whose squared norm is at most this share of the largest one are rounding alone."""


class IndependenceCheck:
    """Remembers which uses of parameters were seen to keep the images apart.

    A use is proven once a gradient other than zero has arrived in its own images' rows and none in
    the others. What got only zeros or NaN is looked at again with the next microbatch; what no
    gradient ever came to is refused if one comes later. Microbatches of another size are looked at
    anew.
    """

    def __init__(self) -> None:
        self._proven: set[SiteKey] = set()
        self._silent: set[SiteKey] = set()
        self.has_proven_all = False

    def begin_again(self) -> None:
        """Prove everything anew with the next microbatch: the parameters have moved."""
        self._proven.clear()
        self.has_proven_all = False

    def check(self, tape: Tape, losses_M: Tensor, run_backward: Callable[[Tensor], None]) -> None:
        """Run the extra backward where something is unproven.

        Args:
            tape: of the forward that gave the losses.
            losses_M: one loss per image.
            run_backward: runs the backward from the losses with these gradients [M].

        Raises:
            UnsupportedOperationError: a loss reaches the rows of another image.
        """
        num_images = len(losses_M)
        self.has_proven_all = num_images == 1
        if num_images == 1:
            return
        keys = [
            (
                site.place,
                site.operation,
                tape.names(site.targets),
                site.num_rows // num_images,
                num_images,
            )
            for site in tape.sites
        ]
        unknown = [key for key in keys if key not in self._proven]
        tape.silent_places = frozenset(key[0] for key in unknown if key in self._silent)
        if len(unknown) == len(tape.silent_places):
            self.has_proven_all = True
            return
        # Thue-Morse: no regular stride leaves its two halves unmixed
        is_sink = [image.bit_count() % 2 == 1 for image in range(num_images)]
        is_sink_M = torch.tensor(is_sink, device=losses_M.device)
        tape.begin_probe(is_sink_M)
        run_backward((~is_sink_M).to(losses_M.dtype))
        flags = [(each.reaches_sources, each.reaches_sinks) for each in tape.arrivals]
        found = torch.stack([torch.stack(pair) for pair in flags]).tolist() if flags else []
        silent = set(keys)
        for arrival, (reaches_sources, reaches_sinks) in zip(tape.arrivals, found, strict=True):
            site, key = arrival.site, keys[arrival.site.place]
            silent.discard(key)
            if reaches_sinks:
                raise UnsupportedOperationError(
                    f"{site.operation} with parameter {tape.names(site.targets)}: the loss of one "
                    "image depends on rows of another. Either the image dimension is not the "
                    "leading one there (put it first), or the model couples the images of a "
                    "microbatch (replace batch statistics and contrastive losses by per-image ones)"
                )
            if reaches_sources:
                self._proven.add(key)
        self.has_proven_all = all(keys[each.site.place] in self._proven for each in tape.arrivals)
        self._silent = (self._silent | silent) - self._proven
        tape.silent_places = frozenset(key[0] for key in silent)

    def check_repeated(self, tape: Tape, is_wanted_M: Tensor) -> None:
        """After the ordinary backward: an image's rows are what they were without the others.

        Args:
            tape: that saw the extra backward, if there was one, and the ordinary one.
            is_wanted_M: the losses whose gradient was 1 in the ordinary one, [M]; 0 the others'.

        Raises:
            UnsupportedOperationError: they are not; as behind a hook that divides a gradient by
                its norm over all images.
        """
        pairs = [
            (each, tape.repeated[each.site.place])
            for each in tape.arrivals
            if each.site.place in tape.repeated
        ]
        if not pairs:
            return
        alone_SM = torch.stack([each.squares_M for each, _ in pairs])
        together_SM = torch.stack([squares_M for _, squares_M in pairs])
        larger_SM = torch.maximum(alone_SM, together_SM)
        is_seen_SM = is_wanted_M & torch.isfinite(larger_SM) & (alone_SM > 0)
        largest_S1 = torch.where(is_seen_SM, larger_SM, 0).amax(dim=1, keepdim=True)
        is_other_SM = (alone_SM - together_SM).abs() > SAME_TO * larger_SM + NOTHING * largest_S1
        is_other_S = (is_seen_SM & is_other_SM).any(dim=1).tolist()
        for (arrival, _), is_other in zip(pairs, is_other_S, strict=True):
            if is_other:
                site = arrival.site
                self.begin_again()
                raise UnsupportedOperationError(
                    f"{site.operation} with parameter {tape.names(site.targets)}: the gradient of "
                    "one image depends on the losses of others. A hook or a custom autograd "
                    "function of the model couples the images in the backward (as dividing a "
                    "gradient by its norm does); take it out"
                )

    def forget_silent(self) -> None:
        """Look again at what no gradient has come to so far."""
        self._silent.clear()
