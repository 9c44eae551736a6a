"""The Mechanism: the one record from which sampler, noise scale, divisor and DpEvent are made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.privacy.accountant import Adjacency, calibrate_noise_multiplier
from pipeline.privacy.sampling import PoissonPlan

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ADJACENCIES: tuple[Adjacency, ...] = ("replace_special", "add_or_remove_one")
_GROUP_PREFIX = "group_of_"
_MAX_GROUP = 64


class BrokenPromise(ValueError):
    """What a phase is about to use, or has released, is not what its mechanism says."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What a private phase promises: num_steps Poisson-subsampled Gaussian sums.

    Each step takes every record independently with probability q, adds the clipped gradients
    (each of norm at most `max_grad_norm`), adds one Gaussian vector of standard deviation
    `noise_std`, and divides by the constant `expected_batch_size`.

    Args:
        num_records: N, public under replace_special; None under add_or_remove_one, where N is
            private and enters no output.
        expected_batch_size: B, the only divisor, for ever; a public constant.
        sampling_probability: q in (0, 1], the primary fact; B / N under replace_special.
        noise_multiplier: noise std / max_grad_norm, > 0.
        max_grad_norm: the clipper's sensitivity, > 0: the most one record can add.
        num_steps: T, the logical steps of the phase.
        reserve_steps: steps that may be charged beyond T for what a crash loses; >= 0.
        delta: in (0, 1); no silent default (`default_delta` gives 1 / (2N)).
        adjacency: replace_special (zero-out: one record becomes the null record; N, q and B
            are shared) or add_or_remove_one.
        privacy_unit: "record", or "group_of_2" ... "group_of_64" for groups of that many.
        sampler: "poisson"; nothing else can be accounted.

    Guarantees:
        1. Sampler, noise scale, divisor and DpEvent come from this one object; what a phase
           really uses is compared with it by `require` (test_no_second_truth).
        2. `event` is the only maker of events of a phase (test_event_comes_from_the_mechanism).
        3. `digest` changes with every field (test_digest_covers_every_field).

    Source: arXiv 1607.00133 (DP-SGD); arXiv 2306.08842 (ViP).
    """

    num_records: int | None
    expected_batch_size: int
    sampling_probability: float
    noise_multiplier: float
    max_grad_norm: float
    num_steps: int
    reserve_steps: int = 0
    delta: float
    adjacency: Adjacency = "replace_special"
    privacy_unit: str = "record"
    sampler: str = "poisson"

    def __post_init__(self) -> None:
        _require_type(self)
        _require(
            self.adjacency in ADJACENCIES, "adjacency", self.adjacency, " or ".join(ADJACENCIES)
        )
        _require(
            self.sampler == "poisson",
            "sampler",
            self.sampler,
            "poisson: shuffled or fixed-size batches have another, weaker guarantee",
        )
        for name in ("expected_batch_size", "num_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        _require(self.reserve_steps >= 0, "reserve_steps", self.reserve_steps, ">= 0")
        for name in ("noise_multiplier", "max_grad_norm"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, name, value, "finite and > 0")
        _require(0 < self.delta < 1, "delta", self.delta, "in (0, 1), at most 1 / (2N)")
        q = self.sampling_probability
        _require(0 < q <= 1, "sampling_probability", q, "in (0, 1]; it is B / N")
        _ = self.group_size
        self._check_num_records()

    def _check_num_records(self) -> None:
        if self.adjacency == "add_or_remove_one":
            _require(
                self.num_records is None,
                "num_records",
                "(not shown)",
                "None under add_or_remove_one, where N is private; give q, B and delta, and "
                "pass N to `plan` only",
            )
            return
        n, b, q = self.num_records, self.expected_batch_size, self.sampling_probability
        _require(n is not None and n >= b, "num_records", n, f">= expected_batch_size = {b}")
        assert n is not None
        _require(
            abs(q * n - b) <= 1e-6 * b,
            "sampling_probability",
            q,
            f"expected_batch_size / num_records = {b / n!r}: a step divides by B what q N "
            "records are expected to add",
        )

    @property
    def noise_std(self) -> float:
        """The standard deviation of the noise on each coordinate of the clipped sum."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def max_charged_steps(self) -> int:
        """The most steps that may ever be charged to the phase: num_steps + reserve_steps."""
        return self.num_steps + self.reserve_steps

    @property
    def group_size(self) -> int:
        """How many records the privacy unit may hold: 1 for "record", k for "group_of_k"."""
        if self.privacy_unit == "record":
            return 1
        digits = self.privacy_unit.removeprefix(_GROUP_PREFIX)
        is_group = self.privacy_unit.startswith(_GROUP_PREFIX) and digits.isdecimal()
        _require(
            is_group and str(int(digits)) == digits and 2 <= int(digits) <= _MAX_GROUP,
            "privacy_unit",
            self.privacy_unit,
            f"record, or {_GROUP_PREFIX}2 to {_GROUP_PREFIX}{_MAX_GROUP}",
        )
        return int(digits)

    def event(self, num_steps: int | None = None) -> DpEvent:
        """Returns the DpEvent of `num_steps` steps (default: all, the reserve included).

        A unit of k records is taken Binomial(k, q) times, each time adding at most
        max_grad_norm: a mixture of Gaussians (arXiv 2310.15526).
        """
        import dp_accounting  # noqa: PLC0415 - takes 1.5 s, and data tasks never need it

        steps = self.max_charged_steps if num_steps is None else num_steps
        _require(steps >= 0, "num_steps", steps, ">= 0")
        if steps == 0:
            return dp_accounting.NoOpDpEvent()
        q, k = self.sampling_probability, self.group_size
        if q == 1.0:
            step = dp_accounting.GaussianDpEvent(self.noise_multiplier / k)
        elif k == 1:
            step = dp_accounting.PoissonSampledDpEvent(
                q, dp_accounting.GaussianDpEvent(self.noise_multiplier)
            )
        else:
            step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                self.noise_multiplier,
                tuple(float(i) for i in range(k + 1)),
                tuple(math.comb(k, i) * q**i * (1 - q) ** (k - i) for i in range(k + 1)),
            )
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def with_noise(self, noise_multiplier: float, *, privacy_unit: str | None = None) -> Mechanism:
        """Returns the same mechanism with another noise multiplier (and privacy unit)."""
        return dataclasses.replace(
            self,
            noise_multiplier=noise_multiplier,
            privacy_unit=privacy_unit or self.privacy_unit,
        )

    def plan(self, sampling_key: bytes, *, num_records: int | None = None) -> PoissonPlan:
        """Returns the sampler of this mechanism under `sampling_key`.

        Args:
            sampling_key: `AttemptKey.sampling_key()`.
            num_records: N of the data at hand; needed under add_or_remove_one, else checked.
        """
        if self.num_records is not None:
            _require(
                num_records in (None, self.num_records),
                "num_records",
                num_records,
                f"{self.num_records}, the N this mechanism was calibrated for; plan anew",
            )
            num_records = self.num_records
        if num_records is None:
            raise ValueError(
                "num_records must be given under add_or_remove_one; take it from the manifest"
            )
        return PoissonPlan(
            key=sampling_key,
            num_records=num_records,
            sampling_probability=self.sampling_probability,
        )

    def require(
        self, *, plan: PoissonPlan, sensitivity: float, noise_std: float, divisor: float
    ) -> None:
        """Raises unless what a phase is about to use is what this mechanism says.

        Args:
            plan: the sampler in use.
            sensitivity: what the clipper states.
            noise_std: the standard deviation the release will draw.
            divisor: what the noisy sum will be divided by.

        Raises:
            BrokenPromise: naming the first number that differs.
        """
        if not isinstance(plan, PoissonPlan):
            raise BrokenPromise(
                f"plan is a {type(plan).__name__}; allowed is the PoissonPlan of `plan`"
            )
        found = {
            "sampling_probability": (plan.sampling_probability, self.sampling_probability),
            "max_grad_norm": (sensitivity, self.max_grad_norm),
            "noise_std": (noise_std, self.noise_std),
            "expected_batch_size": (divisor, self.expected_batch_size),
        }
        if self.num_records is not None:
            found["num_records"] = (plan.num_records, self.num_records)
        for name, (used, promised) in found.items():
            if used != promised:
                raise BrokenPromise(
                    f"{name} is {used}; it must be {promised}, as the mechanism promises"
                )

    def to_json(self) -> dict[str, Any]:
        """Returns the public record of all fields (N is None under add_or_remove_one)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Mechanism:
        """Returns the mechanism of a `to_json` record; a missing or unknown field raises."""
        names = {f.name for f in dataclasses.fields(cls)}
        if set(record) != names:
            odd = sorted(set(record) ^ names)
            raise ValueError(f"mechanism record: fields missing or unknown: {', '.join(odd)}")
        return cls(**record)

    def digest(self) -> str:
        """Returns the SHA-256 hex digest of the canonical JSON of all fields."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def calibrate(
        cls,
        *,
        target_epsilon: float,
        num_records: int | None,
        expected_batch_size: int,
        max_grad_norm: float,
        num_steps: int,
        delta: float,
        reserve_steps: int = 0,
        sampling_probability: float | None = None,
        adjacency: Adjacency = "replace_special",
        privacy_unit: str = "record",
    ) -> Mechanism:
        """Returns the mechanism with the least noise whose epsilon, reserve included, is allowed.

        Args:
            target_epsilon: bound on epsilon at `delta` after num_steps + reserve_steps.
            sampling_probability: default expected_batch_size / num_records.

        Guarantees:
            1. `epsilon_of([(m, m.max_charged_steps)]).value <= target_epsilon`, and one unit
               of the fourth decimal less noise would not do (test_calibrated_is_least).
        """
        if sampling_probability is None:
            if num_records is None:
                raise ValueError("sampling_probability must be given where num_records is not")
            _require(num_records >= 1, "num_records", num_records, ">= 1")
            sampling_probability = expected_batch_size / num_records
        draft = cls(
            num_records=num_records,
            expected_batch_size=expected_batch_size,
            sampling_probability=sampling_probability,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            num_steps=num_steps,
            reserve_steps=reserve_steps,
            delta=delta,
            adjacency=adjacency,
            privacy_unit=privacy_unit,
        )
        noise_multiplier = calibrate_noise_multiplier(draft, target_epsilon=target_epsilon)
        return draft.with_noise(noise_multiplier)


def default_delta(num_records: int) -> float:
    """Returns 1 / (2N), the papers' choice; print it, never apply it unseen."""
    _require(num_records >= 1, "num_records", num_records, ">= 1")
    return 1.0 / (2 * num_records)


def default_reserve_steps(num_steps: int, checkpoint_interval: int) -> int:
    """Returns max(4K, 2 % of T), with 2T in place of a larger 4K.

    It is what two lost attempts may cost: each at most 2K steps, and never more than the phase's T.
    """
    _require(num_steps >= 1, "num_steps", num_steps, ">= 1")
    _require(checkpoint_interval >= 1, "checkpoint_interval", checkpoint_interval, ">= 1")
    return max(2 * min(2 * checkpoint_interval, num_steps), math.ceil(num_steps / 50))


def _require_type(mechanism: Mechanism) -> None:
    """Raises unless every field has its type: ints are no bools, floats may be given as ints."""
    for f in dataclasses.fields(mechanism):
        value = getattr(mechanism, f.name)
        kind = str(f.type)
        if kind == "float":
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
            if is_right:
                object.__setattr__(mechanism, f.name, float(value))
        elif kind.startswith("int"):
            is_right = (isinstance(value, int) and not isinstance(value, bool)) or (
                value is None and kind.endswith("None")
            )
        else:
            is_right = isinstance(value, str)
        _require(is_right, f.name, repr(value), f"of type {kind}")


def _require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} is {value}; it must be {allowed}")
