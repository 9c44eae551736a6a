"""Per operation: how it is done in the forward so that the backward yields per-image gradients.

Each rule does one torch operation in which images meet trainable parameters. The parameters enter
detached, so the backward makes no weight gradient of its own; a small autograd function passes the
input gradient on and hands (what the operation read, its output gradient) to the tape.

The leading dimension of every activation is the image dimension, or a multiple of it in which each
image's rows are contiguous (windows, flattened tokens). The engine checks this once per model.

Shapes: N rows of the leading dimension (M images times rows per image), T positions, I inputs,
O outputs, C channels.

    side_by_side.py  arithmetic, concatenation, attention    linear.py         linear, matmul
    convolution.py   conv1d, conv2d                          normalisation.py  layer, group, RMS
    embedding.py     tables
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.dpsgd.layer_rules.convolution import convolution_1d, convolution_2d
from pipeline.dpsgd.layer_rules.embedding import embedding
from pipeline.dpsgd.layer_rules.linear import linear, matmul
from pipeline.dpsgd.layer_rules.normalisation import (
    batch_norm,
    group_norm,
    layer_norm,
    refuse_batch_statistics,
    refuse_running_statistics,
    rms_norm,
)
from pipeline.dpsgd.layer_rules.side_by_side import attention, concatenate, elementwise, lift
from pipeline.dpsgd.tracing import Rule, RuleBook

__all__ = ["RULE_BOOK", "lift"]


def _functions(names: str, *owners: object) -> Iterator[Callable[..., Any]]:
    """Every function or method of these names that the owners have."""
    for name in names.split():
        for owner in owners:
            found = getattr(owner, name, None)
            if found is not None:
                yield found


def _rules() -> dict[Callable[..., Any], Rule]:
    rules: dict[Callable[..., Any], Rule] = {
        F.linear: linear,
        F.conv1d: convolution_1d,
        F.conv2d: convolution_2d,
        F.layer_norm: layer_norm,
        torch.layer_norm: layer_norm,
        F.group_norm: group_norm,
        torch.group_norm: group_norm,
        F.rms_norm: rms_norm,
        torch.rms_norm: rms_norm,
        F.batch_norm: batch_norm,
        F.embedding: embedding,
        F.scaled_dot_product_attention: attention,
    }
    arithmetic = "add sub subtract mul multiply div divide true_divide"
    in_place = " ".join(f"{name}_" for name in arithmetic.split())
    operators = "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__"
    more = "__truediv__ __rtruediv__ __itruediv__ rsub where lerp addcmul addcdiv maximum minimum"
    names = " ".join([arithmetic, in_place, operators, more])
    rules.update(dict.fromkeys(_functions(names, torch, Tensor), elementwise))
    rules.update(dict.fromkeys(_functions("cat concat concatenate stack", torch), concatenate))
    rules.update(dict.fromkeys(_functions("matmul mm __matmul__", torch, Tensor), matmul))
    return rules


RULE_BOOK = RuleBook(
    rules=_rules(),
    refusals={
        F.batch_norm: refuse_batch_statistics,
        F.instance_norm: refuse_running_statistics,
    },
    indexing=frozenset(
        _functions("__getitem__ index_select gather take take_along_dim", torch, Tensor)
    ),
)
