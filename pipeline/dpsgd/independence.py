"""Does the loss of one image reach another image's activations? Then no gradient is its own.

One extra backward tells, in which half of the losses have gradient 0: nothing may arrive in the
rows of those images. It also finds activations whose leading dimension is not the image dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.dpsgd.tape import Tape, UnsupportedOperationError

SiteKey = tuple[int, str, str, int]


class IndependenceCheck:
    """Remembers which uses of parameters were seen to keep the images apart.

    A use is proven once a gradient other than zero has arrived in its own images' rows and none in
    the others. What got only zeros or NaN is looked at again with the next microbatch; what no
    gradient ever came to is refused if one comes later.
    """

    def __init__(self) -> None:
        self._proven: set[SiteKey] = set()
        self._silent: set[SiteKey] = set()

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
            (site.place, site.operation, tape.names(site.targets), site.num_rows // num_images)
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

    def forget_silent(self) -> None:
        """Look again at what no gradient has come to so far."""
        self._silent.clear()
