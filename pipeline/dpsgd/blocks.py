"""Into which blocks a model's parameters are divided, where each block is clipped on its own.

Three styles: *all-layer* clips the whole gradient of an image; *per-layer* and *per-block* clip the
gradient of every layer or transformer block apart. With K blocks each is clipped to the clipper's
bound / sqrt(K), so that what one image adds stays within the clipper's sensitivity.

A division is a function of the parameters' names alone: the same on every rank, after every resume.

Source: He et al., arXiv 2212.01539 (per-layer clipping); Bu et al., arXiv 2210.00038 (groups).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.dpsgd.layout import ParameterLayout, Trainable, trainable_parameters

STYLES = ("all-layer", "per-layer", "per-block")

_REPEATED = re.compile(r"[^.]*(?:block|layer|stage)[^.]*\.\d+(?=\.)")
"""A list of blocks and the place of one in it: `blocks.3`, `decoder_blocks.0`, `layer1.0`."""


@dataclass(frozen=True, kw_only=True)
class ParameterBlocks:
    """K blocks, every trainable parameter in exactly one of them.

    Args:
        members: the names of the parameters of each block, by the block's name.

    Raises:
        ValueError: no block, an empty one, or a parameter in two.
    """

    members: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members is empty: there must be at least one block")
        block_of: dict[str, str] = {}
        for block, names in self.members.items():
            if not names:
                raise ValueError(f"block {block!r} has no trainable parameter; leave it out")
            for name in names:
                if name in block_of:
                    raise ValueError(
                        f"parameter {name!r} is in the blocks {block_of[name]!r} and {block!r}: "
                        "it must be in exactly one, or its gradient would be added twice"
                    )
                block_of[name] = block

    def __len__(self) -> int:
        """K."""
        return len(self.members)

    def places(self, layout: ParameterLayout) -> tuple[tuple[int, ...], ...]:
        """The places in the layout of each block's parameters, block by block.

        Raises:
            ValueError: a parameter of the layout is in no block, or one of a block not in it.
        """
        place_of = {name: place for place, name in enumerate(layout.names)}
        named = {name for names in self.members.values() for name in names}
        for name in layout.names:
            if name not in named:
                raise ValueError(
                    f"parameter {name!r} is in no block: each must be in exactly one, or its "
                    "gradient would not be clipped; make the blocks from the same model"
                )
        for name in sorted(named - set(place_of)):
            raise ValueError(
                f"parameter {name!r} of a block is no trainable parameter of the model; make the "
                "blocks from the same model, after its parameters were frozen"
            )
        return tuple(tuple(place_of[name] for name in names) for names in self.members.values())


def all_layer(model: Trainable) -> ParameterBlocks:
    """One block that holds everything."""
    return ParameterBlocks(members={"all": tuple(trainable_parameters(model))})


def per_layer(model: Trainable) -> ParameterBlocks:
    """One block for each module that directly owns trainable parameters.

    The owner is the parameter's name without its last part (`encoder.norm` of
    `encoder.norm.weight`), and "" of what the model owns itself. A parameter held by several
    modules belongs to the first, in the order of `named_parameters`.
    """
    return _divided(trainable_parameters(model), lambda name: name.rpartition(".")[0])


def per_block(model: Trainable) -> ParameterBlocks:
    """One block for each entry of a list of blocks, and one for everything else.

    An entry is a part of a name that contains `block`, `layer` or `stage`, with the number behind
    it and all that is before: `blocks.3`, `decoder.blocks.0`, `layer1.0`. Of several in one name
    the last counts: `stages.1.blocks.0`, while `stages.1.downsample.0` lies in `stages.1`. What
    lies in no entry (stem, tokens, norms, heads) forms the block "rest".
    A parameter held by several modules belongs to the first, in the order of `named_parameters`.
    """

    def block_of(name: str) -> str:
        entries = list(_REPEATED.finditer(name))
        return name[: entries[-1].end()] if entries else "rest"

    return _divided(trainable_parameters(model), block_of)


def by_prefix(model: Trainable, groups: Mapping[str, Sequence[str]]) -> ParameterBlocks:
    """Blocks as they are written down: of each, the prefixes of its parameters' names.

    A prefix is a whole name, or its first parts: `encoder.norm` is one of `encoder.norm.weight`
    and none of `encoder.norm2.weight`.

    Raises:
        ValueError: a trainable parameter is in no group or in two; a prefix fits no parameter.
    """
    members: dict[str, list[str]] = {block: [] for block in groups}
    unused = {prefix: block for block, prefixes in groups.items() for prefix in prefixes}
    for name in trainable_parameters(model):
        found = []
        for block, prefixes in groups.items():
            fitting = [p for p in prefixes if name == p or name.startswith(f"{p}.")]
            if fitting:
                found.append(block)
                members[block].append(name)
                for prefix in fitting:
                    unused.pop(prefix, None)
        if len(found) != 1:
            raise ValueError(
                f"parameter {name!r} is in the groups {found}: every trainable parameter must be "
                f"in exactly one of {list(groups)}; change their prefixes"
            )
    for prefix, block in unused.items():
        raise ValueError(f"prefix {prefix!r} of group {block!r} fits no trainable parameter")
    return ParameterBlocks(members={block: tuple(names) for block, names in members.items()})


def make_blocks(style: str, model: Trainable) -> ParameterBlocks:
    """The blocks of a style: "all-layer", "per-layer" or "per-block"."""
    if style not in STYLES:
        raise ValueError(f"clipping style must be one of {', '.join(STYLES)}, not {style!r}")
    makers = {"all-layer": all_layer, "per-layer": per_layer, "per-block": per_block}
    return makers[style](model)


def only_block(factors_MK: Tensor) -> Tensor:
    """The factors of the one block there is, [M]; ValueError where there are several."""
    if factors_MK.shape[1] != 1:
        raise ValueError(
            f"an image has {factors_MK.shape[1]} factors here, one a block: use block_factors_MK"
        )
    return factors_MK[:, 0]


def _divided(names: Iterable[str], block_of: Callable[[str], str]) -> ParameterBlocks:
    members: dict[str, tuple[str, ...]] = {}
    for name in names:
        block = block_of(name)
        members[block] = (*members.get(block, ()), name)
    return ParameterBlocks(members=members)
