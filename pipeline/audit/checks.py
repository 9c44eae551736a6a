"""What an honest step must look like from outside, each as a test with a stated error.

Statistical checks give p-values; together they refuse an honest step with probability at most
FAMILY_ERROR (Bonferroni). The others hold exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from pipeline.audit.step import HOSTILE, AuditSettings, Observation, observe

FAMILY_ERROR = 1e-3
_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check: whether it held, its least p-value (None for an exact one), and in words."""

    name: str
    passed: bool
    p_value: float | None
    detail: str


@dataclass(frozen=True, kw_only=True)
class _Finding:
    name: str
    p_values: npt.NDArray[np.float64]
    detail: str


def check_observation(observation: Observation) -> list[CheckResult]:
    """The statistical checks of one attempt.

    Guarantees:
        1. An honest step passes all with probability >= 1 - FAMILY_ERROR
           (test_the_honest_step_passes).
        2. Each of the planted faults of tests/audit/faults.py fails one of these or of
           `check_step` (test_planted_faults_are_caught).
    """
    findings = [
        _response_law(observation),
        _contributions(observation),
        _noise_scale(observation),
        _noise_law(observation),
        _noise_over_steps(observation),
        _noise_over_slices(observation),
        _sampling_rate(observation),
        _batch_variance(observation),
        _batch_size_law(observation),
        _record_counts(observation),
        _independence_over_steps(observation),
        _independence_over_records(observation),
    ]
    level = FAMILY_ERROR / sum(len(finding.p_values) for finding in findings)
    results = [
        CheckResult(
            name=finding.name,
            passed=bool((finding.p_values >= level).all()),
            p_value=float(np.nan_to_num(finding.p_values, nan=0.0).min()),
            detail=finding.detail,
        )
        for finding in findings
    ]
    exact = (_released_numbers, _release_grid, _delivered_once, _delivered_as_planned)
    return [*results, *(check(observation) for check in exact)]


# ------------------------------------------------------------------- what comes out: the release


def _response_law(seen: Observation) -> _Finding:
    """Each response is (taken with probability q) x contribution + a standard normal."""
    q, mean_N = seen.settings.mechanism.sampling_probability, seen.settings.contributions()
    responses = seen.responses
    levels = (1 - q) * stats.norm.cdf(responses) + q * stats.norm.cdf(responses - mean_N)
    p = stats.kstest(levels[np.isfinite(levels)], "uniform").pvalue if levels.size else 0.0
    if not np.isfinite(responses).all():
        p = 0.0
    return _finding("response_law", [p], f"{responses.size:,} canary responses, exact mixture law")


def _contributions(seen: Observation) -> _Finding:
    """What a delivered canary adds: its clipped norm, neither more nor less."""
    mean_N = seen.settings.contributions()
    taken = np.array([_counts(ids, len(mean_N)) for ids in seen.delivered])
    p_values, details = [], []
    for name, chosen in (("long", mean_N >= mean_N.max()), ("other", mean_N < mean_N.max())):
        surplus = (seen.responses - taken * mean_N)[taken.astype(bool) & chosen]
        if surplus.size:
            p_values.append(_two_sided(surplus.mean() * math.sqrt(surplus.size)))
            details.append(f"{name} {surplus.mean():+.3f} over {surplus.size:,}")
    return _finding("contribution", p_values, "surplus in noise std: " + ", ".join(details))


def _noise_scale(seen: Observation) -> _Finding:
    """Standard deviation 1 in every step, and over all."""
    squares = np.array([np.square(z).sum() for z in seen.residuals])
    dof = len(seen.residuals[0])
    p_values = [_chi_square(s, dof) for s in squares]
    p_values.append(_chi_square(squares.sum(), dof * len(squares)))
    std = math.sqrt(squares.mean() / dof)
    return _finding("noise_scale", p_values, f"std {std:.5f} of 1 over {dof * len(squares):,}")


def _noise_law(seen: Observation) -> _Finding:
    """Gaussian, not only of the right width."""
    values = np.concatenate([z[-10_000:] for z in seen.residuals])
    p = stats.kstest(values, "norm").pvalue if np.isfinite(values).all() else 0.0
    return _finding("noise_law", [p], f"{len(values):,} silent coordinates, KS to the normal")


def _noise_over_steps(seen: Observation) -> _Finding:
    """Steps 1, 2 and 3 apart are not correlated."""
    z = seen.residuals
    p_values = [
        _correlation(zip(z[:-lag], z[lag:], strict=True)) for lag in (1, 2, 3) if len(z) > lag
    ]
    return _finding("noise_over_steps", p_values, "correlation of steps 1 to 3 apart")


def _noise_over_slices(seen: Observation) -> _Finding:
    """No part of the vector repeats another: halves, thirds, quarters (ranks' slices), chunks."""
    size = len(seen.residuals[0])
    shifts = sorted({-(-size // world) for world in (2, 3, 4, 8)} | {65_536} - {size})
    p_values = [_correlation((z[shift:], z[:-shift]) for z in seen.residuals) for shift in shifts]
    return _finding("noise_over_slices", p_values, f"correlation at shifts {shifts}")


def _released_numbers(seen: Observation) -> CheckResult:
    """Finite numbers of full precision: bf16 noise would take a few thousand values only."""
    is_finite = all(bool(np.isfinite(flat).all()) for flat in seen.released)
    silent = [flat[-65_536:] for flat in seen.released]
    distinct = min(len(np.unique(flat)) / len(flat) for flat in silent)
    return CheckResult(
        name="released_numbers",
        passed=is_finite and distinct > 0.5,
        p_value=None,
        detail=f"finite: {is_finite}; {100 * distinct:.1f} % distinct",
    )


def _release_grid(seen: Observation) -> CheckResult:
    """Sum + noise lies on the grid 2^(floor(log2(noise std)) - 20): no low bit tells the sum.

    The division by B, rounded to fp32, and its undoing here move a number by at most 2^-24 of
    itself: a sixteenth of the grid for numbers up to half a noise std.

    Source: arXiv 2112.05307.
    """
    std = seen.settings.mechanism.noise_std
    grid = 2.0 ** (math.floor(math.log2(std)) - 20)
    worst = 0.0
    for flat in seen.released:
        small = flat[np.abs(flat) <= std / 2] / grid
        worst = max(worst, float(np.abs(small - np.rint(small)).max(initial=0.0)))
    return CheckResult(
        name="release_grid",
        passed=worst <= 1 / 16 + 1e-3,
        p_value=None,
        detail=f"{worst:.3f} of the grid away from it; B's rounding moves by up to 0.063",
    )


# ------------------------------------------------------------------------ what went in: the sampler


def _sampling_rate(seen: Observation) -> _Finding:
    """Each record of each step with probability q."""
    num, q = seen.settings.num_canaries, seen.settings.mechanism.sampling_probability
    total = sum(map(len, _all_ids(seen)))
    p = stats.binomtest(total, num * len(seen.delivered), q).pvalue
    rate = total / (num * len(seen.delivered))
    return _finding("sampling_rate", [p], f"{rate:.5f} of {q:.5f}")


def _batch_variance(seen: Observation) -> _Finding:
    """Batch sizes vary as Binomial(N, q): fixed, shuffled and capped batches do not."""
    num, q = seen.settings.num_canaries, seen.settings.mechanism.sampling_probability
    sizes = np.array([len(ids) for ids in _all_ids(seen)], np.float64)
    expected = num * q * (1 - q)
    p = _chi_square(np.square(sizes - num * q).sum() / expected, len(sizes))
    return _finding(
        "batch_variance", [p], f"variance {np.square(sizes - num * q).mean():.1f} of {expected:.1f}"
    )


def _batch_size_law(seen: Observation) -> _Finding:
    """The whole law of the batch sizes: a cap at B halves the steps' variance, but not surely.

    Each size is spread evenly over its own step of the distribution function, with public coins, so
    that the Kolmogorov-Smirnov test is exact.
    """
    num, q = seen.settings.num_canaries, seen.settings.mechanism.sampling_probability
    sizes = np.array([len(ids) for ids in _all_ids(seen)])
    coins = np.random.default_rng(0).random(len(sizes))
    levels = stats.binom.cdf(sizes - 1, num, q) + coins * stats.binom.pmf(sizes, num, q)
    p = stats.kstest(levels, "uniform").pvalue
    share = float((sizes > num * q).mean())
    return _finding("batch_size_law", [p], f"{100 * share:.0f} % of the steps above B")


def _record_counts(seen: Observation) -> _Finding:
    """How often each record came, over the steps: Binomial(T, q)."""
    num, q, steps = _shape(seen)
    counts = sum((_counts(ids, num) for ids in seen.delivered), np.zeros(num))
    squares = np.square(counts - steps * q).sum() / (steps * q * (1 - q))
    p = _two_sided((squares - num) / math.sqrt(num * _chi_spread(steps, q)))
    return _finding("record_counts", [p], f"dispersion {squares / num:.3f} of 1")


def _independence_over_steps(seen: Observation) -> _Finding:
    """Records of a step come again in the next ones as often as chance has it."""
    num, q, steps = _shape(seen)
    ids = _all_ids(seen)
    p_values, shares = [], []
    for lag in (1, 2):
        common = sum(len(np.intersect1d(a, b)) for a, b in zip(ids[:-lag], ids[lag:], strict=True))
        trials = num * (steps - lag)
        # Records' own counts differ; given those the overlap's spread is that of a binomial.
        p_values.append(_two_sided((common - trials * q * q) / _pair_spread(trials, q)))
        shares.append(f"{common / trials:.5f}")
    return _finding(
        "independence_over_steps", p_values, f"repeated {', '.join(shares)} of {q * q:.5f}"
    )


def _independence_over_records(seen: Observation) -> _Finding:
    """Record i and its counterpart on another rank come together as often as chance has it."""
    num, q, steps = _shape(seen)
    p_values = []
    for world in (2, 4):
        shift = num // world
        together = sum(
            int((np.isin(ids + shift, ids) & (ids + shift < num)).sum()) for ids in _all_ids(seen)
        )
        trials = (num - shift) * steps
        p_values.append(_two_sided((together - trials * q * q) / _pair_spread(trials, q)))
    return _finding("independence_over_records", p_values, "counterparts at N/2 and N/4")


def _delivered_once(seen: Observation) -> CheckResult:
    """No record twice in a step, on one rank or on two: read off the pixels."""
    repeated = sum(len(ids) - len(np.unique(ids)) for ids in _all_ids(seen))
    return CheckResult(
        name="delivered_once",
        passed=repeated == 0,
        p_value=None,
        detail=f"{repeated} repeated deliveries in {len(seen.delivered)} steps",
    )


def _delivered_as_planned(seen: Observation) -> CheckResult:
    """The pictures that came are those of the records that were drawn: none lost, none swapped."""
    differing = sum(
        not np.array_equal(np.sort(ids), np.sort(planned))
        for ids, planned in zip(_all_ids(seen), seen.planned, strict=True)
    )
    return CheckResult(
        name="delivered_as_planned",
        passed=differing == 0,
        p_value=None,
        detail=f"{differing} of {len(seen.delivered)} steps differ",
    )


# ------------------------------------------------------------------------- the same step, run twice


def check_step(settings: AuditSettings) -> list[CheckResult]:
    """The exact checks: neighbours, microbatches and ranks, attempts."""
    return [
        _outcome("neighbours", lambda: _neighbours(settings)),
        _outcome("microbatches_and_ranks", lambda: _invariance(settings)),
        _outcome("attempts", lambda: _attempts(settings)),
    ]


def _outcome(name: str, check: Callable[[], tuple[bool, str]]) -> CheckResult:
    """A check that raises has failed: the step could not be run."""
    try:
        passed, detail = check()
    except Exception as error:
        passed, detail = False, f"raised {type(error).__name__}"
    return CheckResult(name=name, passed=passed, p_value=None, detail=detail)


def _neighbours(settings: AuditSettings) -> tuple[bool, str]:
    """With the same randomness, one record more or less moves the released sum by <= the bound.

    Of ordinary canaries, orthogonal, and of hostile ones that all point the same way.
    """
    pinned = replace(settings, seed=settings.seed or 0)
    worst = {
        name: max(_moves(replace(pinned, is_hostile=is_hostile), period), default=0.0)
        for name, is_hostile, period in (("ordinary", False, 10), ("hostile", True, len(HOSTILE)))
    }
    bound = settings.mechanism.max_grad_norm
    grid = settings.mechanism.noise_std * 2.0**-19
    return max(worst.values()) <= bound + grid, (
        f"moved by {worst['ordinary']:.6g}, by hostile ones {worst['hostile']:.6g}, "
        f"sensitivity {bound:g}"
    )


def _moves(settings: AuditSettings, period: int) -> Iterator[float]:
    """How far the released sum moves when a record is left out: one of each kind of norm."""
    first = observe(settings, num_steps=1)
    taken = np.concatenate(first.delivered[0])
    kinds = np.where(taken == settings.num_canaries - 1, -1, taken % period)
    for record in taken[np.unique(kinds, return_index=True)[1]]:
        included = np.ones(settings.num_canaries, bool)
        if settings.is_included is not None:
            included = settings.is_included.copy()
        included[record] = False
        other = observe(replace(settings, is_included=included), num_steps=1)
        norm = float(np.linalg.norm(first.released[0] - other.released[0]))
        yield norm if math.isfinite(norm) else math.inf


def _invariance(settings: AuditSettings) -> tuple[bool, str]:
    """The release does not depend on how rows are cut or dealt."""
    pinned = replace(settings, seed=settings.seed or 0)
    first = observe(pinned, num_steps=1).released[0]
    worst = 0.0
    for microbatch, world in ((1, 1), (4, 1), (64, 1), (16, 2), (16, 4)):
        other = replace(pinned, microbatch_size=microbatch, world_size=world)
        moved = np.abs(observe(other, num_steps=1).released[0] - first).max()
        worst = max(worst, float(moved) / settings.mechanism.max_grad_norm)
    return worst <= _ROUNDING, f"largest difference {worst:.2g} of max_grad_norm"


def _attempts(settings: AuditSettings) -> tuple[bool, str]:
    """Two attempts from one checkpoint draw other samples and other noise."""
    included = np.ones(settings.num_canaries, bool)
    included[-1] = False  # the one that is not a number has its own check
    fresh = replace(settings, seed=None, is_included=included)
    one, two = (observe(fresh, num_steps=6) for _ in range(2))
    same = sum(
        np.array_equal(np.concatenate(a), np.concatenate(b))
        for a, b in zip(one.delivered, two.delivered, strict=True)
        if len(np.concatenate(a)) > 2
    )
    p = _correlation(zip(one.residuals, two.residuals, strict=True))
    return (
        same == 0 and p > FAMILY_ERROR / 100,
        f"{same} equal samples; noise correlation p {p:.2g}",
    )


# ------------------------------------------------------------------------------------------ pieces


def _finding(name: str, p_values: Iterable[float], detail: str) -> _Finding:
    return _Finding(name=name, p_values=np.array(list(p_values), np.float64), detail=detail)


def _all_ids(seen: Observation) -> list[npt.NDArray[np.int64]]:
    return [np.concatenate(shares) for shares in seen.delivered]


def _counts(shares: Iterable[npt.NDArray[np.int64]], num: int) -> npt.NDArray[np.float64]:
    return np.bincount(np.concatenate(list(shares)), minlength=num).astype(np.float64)


def _shape(seen: Observation) -> tuple[int, float, int]:
    mechanism = seen.settings.mechanism
    return seen.settings.num_canaries, mechanism.sampling_probability, len(seen.delivered)


def _two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z))) if math.isfinite(z) else 0.0


def _chi_square(value: float, dof: int) -> float:
    if not math.isfinite(value):
        return 0.0
    return float(min(1.0, 2 * min(stats.chi2.sf(value, dof), stats.chi2.cdf(value, dof))))


def _chi_spread(steps: int, q: float) -> float:
    """Variance of a standardised squared Binomial(steps, q) count."""
    return 2.0 + (1 - 6 * q * (1 - q)) / (steps * q * (1 - q))


def _pair_spread(trials: int, q: float) -> float:
    """Standard deviation of how often two independent takings coincide; chains add covariance."""
    own = q * q * (1 - q * q)
    neighbours = 2 * q**3 * (1 - q)
    return math.sqrt(trials * (own + neighbours))


def _correlation(
    pairs: Iterable[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]],
) -> float:
    """p-value of the sum of products of independent standard normals, over all pairs."""
    total, count = 0.0, 0
    for a, b in pairs:
        total += float(a @ b)
        count += len(a)
    return _two_sided(total / math.sqrt(count)) if count else 1.0
