"""From what was done to the epsilon it cost: two upper bounds, the smaller of which is reported."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import cache, lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from dp_accounting import DpEvent, NeighboringRelation

AccountantName = Literal["PLD", "RDP"]
Adjacency = Literal["replace_special", "add_or_remove_one"]

NOISE_MULTIPLIER_DECIMALS = 4
PLD_INTERVAL = 1e-4
MAX_TARGET_EPSILON = 1000.0
MIN_TARGET_EPSILON = 0.001
_NO_PROMISE = 1e9
_MAX_STEP_LOSS = 2000.0
_MAX_EVALUATIONS = 60
_RDP_SLACK_PER_STEP = 1e-14
_UNIT = 10.0**-NOISE_MULTIPLIER_DECIMALS


class Accountable(Protocol):
    """What the accountant reads of a Mechanism (mechanism.py), which makes the events."""

    @property
    def sampling_probability(self) -> float: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def delta(self) -> float: ...
    @property
    def adjacency(self) -> Adjacency: ...
    @property
    def privacy_unit(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def max_charged_steps(self) -> int: ...
    def event(self, num_steps: int | None = None) -> DpEvent: ...
    def with_noise(self, noise_multiplier: float, *, privacy_unit: str | None = None) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Epsilon:
    """An upper bound on epsilon at `delta`, and the two bounds it is the smaller of.

    Args:
        value: min(pld, rdp), four decimals, rounded up; 0 only for no steps at all.
        accountant: which bound gave it.
        pld: by privacy loss distributions; inf where they cannot resolve delta (or are not
            worth computing: epsilon beyond 1,000).
        rdp: by Rényi divergences; inf where they do not know the event (groups of records).
        delta: the delta of all three.
        version: of dp-accounting.
    """

    value: float
    accountant: AccountantName
    pld: float
    rdp: float
    delta: float
    version: str

    def to_json(self) -> dict[str, Any]:
        """Returns plain fields; an infinite bound is None."""
        return {
            name: None if value == math.inf else value
            for name, value in dataclasses.asdict(self).items()
        }


def epsilon_of(events: Sequence[tuple[Accountable, int]], delta: float) -> Epsilon:
    """Returns what the composition of `events` costs at `delta`.

    Args:
        events: (mechanism, number of steps) in any order and any cuts: phases, attempts and
            runs on the same records. Equal steps are counted together first.
        delta: in (0, 1).

    Raises:
        ValueError: for a delta outside (0, 1), negative steps, or mechanisms of different
            adjacency or privacy unit, whose guarantees do not add up to one statement.

    Guarantees:
        1. An upper bound at that adjacency and unit: pessimistic PLD at 1e-4 (floating-point
           error of its FFT below 1e-3 of delta, else it is not used), RDP with 1e-14 a step
           for rounding; then rounded up (test_oracles, test_pld_that_cannot_resolve_delta).
        2. Order and cuts do not matter (test_run_length_encoding).

    Source: arXiv 2207.04380 (connect-the-dots PLD); arXiv 1908.10530 (RDP).
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must be in (0, 1), at most 1 / (2N)")
    runs = _run_lengths(events)
    if not runs:
        return Epsilon(
            value=0.0, accountant="PLD", pld=0.0, rdp=0.0, delta=delta, version=_version()
        )
    rdp = _rdp_epsilon(*_events_and_adjacency(runs), delta)
    pld = _pld_epsilon_if_worth_it(runs, delta, rdp)
    return Epsilon(
        value=min(pld, rdp),
        accountant="PLD" if pld <= rdp else "RDP",
        pld=pld,
        rdp=rdp,
        delta=delta,
        version=_version(),
    )


def rdp_epsilon_of(events: Sequence[tuple[Accountable, int]], delta: float) -> float:
    """Returns the RDP bound alone: looser, and a hundred times quicker than `epsilon_of`."""
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta}; it must be in (0, 1), at most 1 / (2N)")
    runs = _run_lengths(events)
    return _rdp_epsilon(*_events_and_adjacency(runs), delta) if runs else 0.0


def calibrate_noise_multiplier(
    mechanism: Accountable,
    *,
    target_epsilon: float,
    accountant: Literal["pld", "rdp", "min"] = "min",
) -> float:
    """Returns the least noise multiplier (four decimals) that keeps `mechanism` within target.

    Args:
        mechanism: all its fields but noise_multiplier are used; the reserve is included.
        target_epsilon: from 0.001 to 1,000.
        accountant: the bound to calibrate by; "min" is what is reported.

    Raises:
        ValueError: for a target out of range, or one that no noise reaches.

    Guarantees:
        1. Rounded up: epsilon recomputed from the returned value and rounded up is at most
           the target, and with 0.0001 less it is not (test_calibrated_is_least).
    """
    if not MIN_TARGET_EPSILON <= target_epsilon <= MAX_TARGET_EPSILON:
        raise ValueError(
            f"target_epsilon is {target_epsilon}; it must be from {MIN_TARGET_EPSILON} to "
            f"{MAX_TARGET_EPSILON} (epsilon above about 10 promises little)"
        )
    if accountant not in ("pld", "rdp", "min"):
        raise ValueError(f"accountant is {accountant!r}; it must be pld, rdp or min")
    steps = mechanism.max_charged_steps
    group_size = mechanism.group_size

    def guide(units: int) -> float:
        """RDP, quick; for groups that of their records with all the noise a k-th: a guide only."""
        record = mechanism.with_noise(units * _UNIT / group_size, privacy_unit="record")
        return rdp_epsilon_of([(record, steps)], mechanism.delta)

    def bound(units: int) -> float:
        candidate = mechanism.with_noise(_from_units(units))
        epsilon = epsilon_of([(candidate, steps)], mechanism.delta)
        return epsilon.value if accountant == "min" else epsilon.pld

    start = _least_units(guide, target_epsilon)
    if accountant == "rdp":
        if group_size > 1:
            raise ValueError("accountant rdp does not know groups of records; use pld or min")
        return _from_units(start)
    return _from_units(_least_units_near(bound, guide, start, target_epsilon))


def _least_units(bound: Callable[[int], float], target: float) -> int:
    """Returns the least n >= 1 with bound(n) <= target, for a falling bound."""
    high = round(1.0 / _UNIT)
    while bound(high) > target:
        high *= 2
        if high * _UNIT > 1e7:
            raise ValueError(
                f"target_epsilon {target} cannot be reached by any noise; raise it or delta, "
                "or lower num_steps or the sampling probability"
            )
    low = high // 2
    while low > 0 and bound(low) <= target:
        low, high = low // 2, low
    return _bisect(bound, target, low, high)


def _least_units_near(
    bound: Callable[[int], float], guide: Callable[[int], float], start: int, target: float
) -> int:
    """Returns what `_least_units` would, in few evaluations of a slow `bound`.

    The first guess takes bound / guide to be constant; then the secant through the two points
    nearest the target, in logarithms, is followed; bisection if that is slow.
    """
    found: dict[int, float] = {}
    low, high = 0, 0  # high = 0: not known yet
    units = start
    while high == 0 or high - low > 1:
        if len(found) == _MAX_EVALUATIONS:
            raise ValueError(
                f"target_epsilon {target} was not met in {_MAX_EVALUATIONS} trials; give "
                "noise_multiplier in the recipe instead"
            )
        value = found[units] = bound(units)
        if value == math.inf and guide(units) <= target:
            raise ValueError(
                "target_epsilon cannot be certified by PLD at this delta: it is below what its "
                "floating-point numbers resolve; use accountant min, or a larger delta"
            )
        if value <= target:
            high = units
        else:
            low = units
        if len(found) == 1 and value < math.inf:
            units = _least_units(guide, min(target * guide(units) / value, 1e6))
        elif len(found) > 10 and high:
            units = (low + high) // 2
        else:
            units = _secant(found, target) or 2 * units
        units = max(units, low + 1)
        units = min(units, high - 1) if high else units
    return high


def _secant(found: dict[int, float], target: float) -> int:
    """Returns where log bound, linear in log n through the two nearest points, meets target."""
    nearest = sorted(
        (abs(math.log(value / target)), n) for n, value in found.items() if value < math.inf
    )
    if len(nearest) < 2:
        return 0
    (_, a), (_, b) = nearest[:2]
    rise = math.log(found[a] / found[b])
    if rise == 0.0:
        return 0
    log_n = math.log(a) + math.log(target / found[a]) * math.log(a / b) / rise
    return math.ceil(math.exp(min(log_n, 25.0)) - 1e-6)


def _bisect(bound: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Returns the least n in (low, high] with bound(n) <= target, given bound(high) is."""
    while high - low > 1:
        middle = (low + high) // 2
        if bound(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _from_units(units: int) -> float:
    """Returns the noise multiplier as the decimal that is printed and stored."""
    return round(units * _UNIT, NOISE_MULTIPLIER_DECIMALS)


def _round_up(epsilon: float) -> float:
    """Returns `epsilon` rounded up to four decimals, at least 0.0001; inf where it is absurd."""
    if epsilon > _NO_PROMISE:
        return math.inf
    step = Decimal("0.0001")
    return float(max(Decimal(epsilon).quantize(step, rounding=ROUND_CEILING), step))


def _run_lengths(events: Sequence[tuple[Accountable, int]]) -> list[tuple[Accountable, int]]:
    """Returns one (mechanism, steps) for each distinct (q, noise multiplier), in fixed order."""
    totals: dict[tuple[float, float], tuple[Accountable, int]] = {}
    promises: set[tuple[Adjacency, str]] = set()
    for mechanism, num_steps in events:
        if num_steps < 0:
            raise ValueError(f"num_steps is {num_steps}; it must be >= 0")
        promises.add((mechanism.adjacency, mechanism.privacy_unit))
        if num_steps > 0:
            key = (mechanism.sampling_probability, mechanism.noise_multiplier)
            first, total = totals.get(key, (mechanism, 0))
            totals[key] = (first, total + num_steps)
    if len(promises) > 1:
        raise ValueError(
            f"events of different adjacency or privacy unit cannot be composed: {sorted(promises)};"
            " use the same adjacency and privacy_unit for all runs over a privacy domain"
        )
    return [totals[key] for key in sorted(totals)]


def _events_and_adjacency(
    runs: list[tuple[Accountable, int]],
) -> tuple[tuple[DpEvent, ...], Adjacency]:
    return tuple(mechanism.event(steps) for mechanism, steps in runs), runs[0][0].adjacency


def _pld_epsilon_if_worth_it(
    runs: list[tuple[Accountable, int]], delta: float, rdp: float
) -> float:
    """Returns the PLD bound, or inf where its floating-point numbers or its size forbid it."""
    num_steps = sum(steps for _, steps in runs)
    # The FFT that composes T steps errs by up to about T 2^-56 in delta (measured: the sum of
    # its noise where the true tail is nil): below 1e-3 of delta from here on.
    if delta < 100 * num_steps * 2.0**-52:
        return math.inf
    is_costly = MAX_TARGET_EPSILON < rdp < math.inf
    for mechanism, _ in runs:
        ratio = mechanism.group_size / mechanism.noise_multiplier
        is_costly |= ratio * ratio / 2 + 10 * ratio > _MAX_STEP_LOSS
    if is_costly:
        return math.inf
    return _pld_epsilon(*_events_and_adjacency(runs), delta)


@lru_cache(maxsize=256)
def _pld_epsilon(events: tuple[DpEvent, ...], adjacency: Adjacency, delta: float) -> float:
    from dp_accounting import pld  # noqa: PLC0415 - takes 1.5 s, and data tasks never need it

    accountant = pld.PLDAccountant(_relation(adjacency), value_discretization_interval=PLD_INTERVAL)
    for event in events:
        if not accountant.supports(event):
            return math.inf
        accountant.compose(event)
    return _round_up(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def _rdp_epsilon(events: tuple[DpEvent, ...], adjacency: Adjacency, delta: float) -> float:
    from dp_accounting import GaussianDpEvent, rdp  # noqa: PLC0415 - as above

    _silence_known_warning()
    accountant = rdp.RdpAccountant(neighboring_relation=_relation(adjacency))
    num_steps = 0
    for event in events:
        if not accountant.supports(event):
            return math.inf
        accountant.compose(event)
        num_steps += getattr(event, "count", 1)
    # Divergences of very rare sampling drown in rounding and may come out as 0 or less. A
    # Gaussian event of divergence order x 1e-14 a step covers that (and moves no digit else).
    accountant.compose(GaussianDpEvent((2 * num_steps * _RDP_SLACK_PER_STEP) ** -0.5))
    return _round_up(accountant.get_epsilon(delta))


def _relation(adjacency: Adjacency) -> NeighboringRelation:
    from dp_accounting import NeighboringRelation  # noqa: PLC0415 - as above

    return {
        "replace_special": NeighboringRelation.REPLACE_SPECIAL,
        "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    }[adjacency]


@cache
def _silence_known_warning() -> None:
    """Keeps one warning of dp-accounting off the screen, once for this process.

    RDP leaves out fractional orders whose series does not converge; a minimum over fewer
    orders is still a valid bound.
    """

    class NotThatOne(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not str(record.msg).startswith("_compute_log_a_frac failed to converge")

    logging.getLogger("absl").addFilter(NotThatOne())


@cache
def _version() -> str:
    return f"dp-accounting {version('dp-accounting')}"
