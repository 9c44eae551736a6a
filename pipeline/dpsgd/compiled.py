"""The clipped sum as two graphs for `torch.compile`.

The engine's own code is run once under a recorder, so that the graphs hold what it does and no rule
is written twice. A compiler may round a bf16 number for one reader and not for another; then the
norm would be that of another gradient than is added. So the record is cut where the gradients'
materials are made (what a layer read, the gradient of what it wrote): the first graph writes them
to memory, rounded once, and the second makes norms, factors and sums of what stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pipeline.dpsgd.engine import ClippedGradientSum, PerImage
from pipeline.dpsgd.model_state import ModelState
from pipeline.dpsgd.products import exact_products
from pipeline.dpsgd.tape import UnsupportedOperationError

Losses = Callable[..., Tensor]
"""From the tensors of a microbatch to the loss of every image, [M]."""


class CompiledGradientSum:
    """`ClippedGradientSum.accumulate`, compiled; the same result to the precision of the dtype.

        compiled = CompiledGradientSum(clipped, lambda images: model.loss_per_image(images))
        for images, weights in microbatches:
            compiled.accumulate((images,), weights)        # adds to clipped.flat_sum

    Microbatches of a new shape, dtype, mode of the model or autocast are computed by `clipped`
    itself until the independence of their images is proven (and where `zero_` has it proven again),
    then recorded and compiled, which takes minutes for a large model; so give microbatches of one
    size. As in a CUDA graph, Python values that the losses use are those of the recording. Products
    of fp32 matrices are done in fp32, the model's own too, whatever the user allows (TF32): bf16
    autocast is the fast way.

    Args:
        clipped: what it adds to; without `two_backwards`.
        losses: from the tensors of a microbatch to the loss of every image. Everything else that it
            reads must be a parameter or buffer of the model.
        backend: of `torch.compile`.

    Raises:
        ValueError: `clipped` has two backwards.

    Guarantees:
        1. Equal to the engine, and with it to the reference (tests/dpsgd/test_compiled.py).
        2. Norms and sums are made of the same numbers in memory
           (test_norms_and_sums_read_the_same_numbers).
        3. A tensor that would be frozen into the record, such as images, is refused
           (test_a_tensor_from_outside_is_refused).
    """

    def __init__(
        self, clipped: ClippedGradientSum, losses: Losses, *, backend: str = "inductor"
    ) -> None:
        if clipped.two_backwards:
            raise ValueError(
                "two_backwards is True: a compiled step has one backward; leave activation "
                "checkpointing out, or do not compile"
            )
        self._clipped, self._losses, self._backend = clipped, losses, backend
        self._steps: dict[Hashable, _Step] = {}

    def accumulate(self, inputs: Sequence[Tensor], weights: Tensor | None = None) -> PerImage:
        """Add a microbatch to `clipped.flat_sum`, as `ClippedGradientSum.accumulate` does.

        Args:
            inputs: what `losses` is called with; tensors that need no gradient.
            weights: as for `ClippedGradientSum.accumulate`.

        Raises:
            UnsupportedOperationError: the losses cannot be recorded, use a tensor from outside, or
                are refused by the engine. Nothing was added.
            ValueError: as by the engine. Nothing was added.
        """
        inputs = tuple(inputs)
        for place, each in enumerate(inputs):
            if not isinstance(each, Tensor) or each.requires_grad:
                raise ValueError(f"inputs[{place}] must be a tensor that needs no gradient")
        constants = self._constants()
        key = self._key((*inputs, *constants))
        step = self._steps.get(key)
        if step is None or not self._clipped.has_proven_all:
            if step is None:
                step = self._recorded(inputs, constants)  # what is refused is refused before
            facts = self._clipped.accumulate(lambda: self._losses(*inputs), weights)
            if self._clipped.has_proven_all:
                self._steps[key] = step
            return facts
        weights_M = self._clipped.checked_weights(
            torch.empty(step.num_images, dtype=step.dtype, device=step.device), weights
        )
        return step.run([*self._clipped.parameters, *constants, *inputs, weights_M], self._clipped)

    def _constants(self) -> list[Tensor]:
        state = ModelState(self._clipped.model)
        state.check_trained(self._clipped.parameters)
        return state.constants

    def _key(self, tensors: Sequence[Tensor]) -> Hashable:
        """Everything that the record depends on besides the numbers in its inputs."""
        model = self._clipped.model
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        device = self._clipped.flat_sum.device.type
        return (
            tuple((each.shape, each.dtype, each.device, each.stride()) for each in tensors),
            tuple(module.training for module in modules),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )

    def _recorded(self, inputs: Sequence[Tensor], constants: Sequence[Tensor]) -> _Step:
        clipped = self._clipped
        with torch.no_grad():
            losses_M = self._losses(*inputs)
        num_before = len(clipped.parameters) + len(constants)
        places: list[int] = []
        num_materials = 0

        def run(*everything: Tensor) -> list[Tensor]:
            nonlocal num_materials
            *rows, weights_M = everything[num_before:]
            capture = clipped.captured(lambda: self._losses(*rows), weights_M)
            assert capture.facts is not None
            places[:] = capture.sums
            num_materials = len(capture.materials)
            facts = capture.facts
            results = [facts.norms_M, facts.block_norms_MK, facts.block_factors_MK]
            return [*capture.materials, facts.losses_M, *results, *capture.sums.values()]

        weights_M = clipped.checked_weights(losses_M, None)
        example = [*clipped.parameters, *constants, *inputs, weights_M]
        with exact_products():
            try:
                record = make_fx(run)(*example)
            except ValueError:  # the engine's own refusals
                raise
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                raise UnsupportedOperationError(
                    "the losses cannot be recorded for compiling, because what they do depends on "
                    f"numbers in their inputs ({type(error).__name__}: {first}); use "
                    "ClippedGradientSum without compiling"
                ) from error
        _refuse_frozen_tensors(record)
        first_graph, second_graph, crossing = _cut(record, num_materials + 1)
        options: dict[str, Any] = {"dynamic": False, "fullgraph": True, "backend": self._backend}
        return _Step(
            num_images=len(losses_M),
            dtype=losses_M.dtype,
            device=losses_M.device,
            places=tuple(places),
            num_crossing=crossing,
            first=torch.compile(first_graph, **options),
            second=torch.compile(second_graph, **options),
        )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A compiled microbatch.

    Args:
        num_images, dtype, device: of its losses.
        places: of the parameters that it gives sums of.
        num_crossing: how many tensors `first` hands to `second`; the losses are the last.
        first: from all inputs to the materials and the losses.
        second: from these, and all inputs, to facts and sums.
    """

    num_images: int
    dtype: torch.dtype
    device: torch.device
    places: tuple[int, ...]
    num_crossing: int
    first: Callable[..., Any]
    second: Callable[..., Any]

    def run(self, inputs: Sequence[Tensor], clipped: ClippedGradientSum) -> PerImage:
        """Add to the sum of `clipped`."""
        autocast_off = torch.autocast(clipped.flat_sum.device.type, enabled=False)
        with torch.no_grad(), autocast_off, exact_products():  # casts are in the record
            plain = [each.detach() for each in inputs]
            crossing = self.first(*plain)
            losses_M = crossing[-1]
            norms_M, block_norms_MK, block_factors_MK, *sums = self.second(*crossing, *plain)
            del crossing
            totals = [clipped.sum_of(place) for place in self.places]
            torch._foreach_add_(totals, sums)
        return PerImage(
            losses_M=losses_M,
            norms_M=norms_M,
            block_norms_MK=block_norms_MK,
            block_factors_MK=block_factors_MK,
        )


def _refuse_frozen_tensors(record: fx.GraphModule) -> None:
    """What may stand in a record is what the forward makes itself, as `torch.tensor(...)` does."""
    for node in record.graph.find_nodes(op="get_attr"):
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            continue
        value = getattr(record, str(node.target), None)
        shape = tuple(value.shape) if isinstance(value, Tensor) else "?"
        raise UnsupportedOperationError(
            f"the losses use a tensor of shape {shape} that is neither an input, a parameter nor a "
            "buffer of the model: it would be the same in every compiled microbatch. Give it as an "
            "input, or register it as a buffer"
        )


def _cut(record: fx.GraphModule, num_first: int) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """The record in two: what its first outputs need, and the rest.

    Args:
        record: its outputs are materials and losses, `num_first` of them, then the others.
        num_first: so many.

    Returns:
        The first graph, from all inputs to everything that the second one reads of it, the losses
        last; the second, from that and all inputs to the other outputs; and how many cross.
    """
    nodes = list(record.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args[0:1]
    before: set[fx.Node] = set()
    waiting = list(outputs[:num_first])
    while waiting:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += node.all_input_nodes
    before -= set(inputs)
    after = [n for n in nodes[:-1] if n not in before and n.op not in ("placeholder",)]
    _refuse_late_changes(after, before | set(inputs))
    read = {each for node in after for each in node.all_input_nodes if each in before}
    read |= {each for each in outputs[num_first:] if each in before}
    losses = outputs[num_first - 1]
    crossing = [*(node for node in nodes if node in read and node is not losses), losses]
    first = _graph_of(record, inputs, [n for n in nodes if n in before], crossing)
    second = _graph_of(record, [*crossing, *inputs], after, outputs[num_first:])
    return first, second, len(crossing)


def _graph_of(
    record: fx.GraphModule,
    inputs: Sequence[fx.Node],
    body: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{place}") for place, node in enumerate(inputs)}
    for node in body:
        copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(record, graph)


def _refuse_late_changes(after: Sequence[fx.Node], before: set[fx.Node]) -> None:
    """No operation of the second graph may change, in place, what the first one has made."""
    for node in after:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if isinstance(value, fx.Node) and _base_of(value) in before:
                raise UnsupportedOperationError(
                    f"the losses change a tensor in place by {node.target}, which a compiled step "
                    "cannot follow; use ClippedGradientSum without compiling"
                )


def _base_of(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        aliased = schema is not None and any(
            each.alias_info is not None for each in schema.arguments[:1]
        )
        if not aliased or not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]
    return node
