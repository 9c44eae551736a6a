"""An audit of a mechanism, from its checks to its lower bound, as JSON and as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pipeline.audit.checks import FAMILY_ERROR, check_observation, check_step
from pipeline.audit.f_dp_bound import f_dp_lower_bound
from pipeline.audit.lower_bound import num_right_guesses, one_run_lower_bound
from pipeline.audit.membership import membership_inference
from pipeline.audit.phase_check import check_phase
from pipeline.audit.rank_check import check_ranks
from pipeline.audit.step import AuditSettings, observe
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.mechanism import Mechanism

STAMP = "NOT PRIVATE: an audit run over canaries; nothing of it is a model to release"
MAX_CANARIES = 2_000
MAX_STEPS = 400


def audit_mechanism(
    mechanism: Mechanism,
    *,
    clipping: str = "flat",
    gamma: float = 0.01,
    clipping_style: str = "all-layer",
    views_per_image: int = 1,
    seed: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Audits the training step under a mechanism, in minutes on a CPU.

    Args:
        mechanism: of a private phase. Its N is cut to at most MAX_CANARIES and its steps to
            MAX_STEPS; sampling probability, noise multiplier and clip stay what they are, and the
            claimed epsilon is that of the steps run.
        clipping, gamma, clipping_style, views_per_image: as in the recipe.
        seed: pins the audit's coins (tests); None draws them.
        progress: told what is done.

    Returns:
        JSON-ready: `checks`, `lower_bound`, `f_dp_lower_bound`, `membership`,
        `claimed_epsilon`, `passed`, `stamp`.
    """
    say = progress or (lambda _: None)
    scaled = _scaled(mechanism)
    settings = AuditSettings(
        mechanism=scaled,
        clipping=clipping,
        gamma=gamma,
        clipping_style=clipping_style,
        views_per_image=views_per_image,
        seed=seed,
    )
    say(f"{scaled.num_steps} steps over {settings.num_canaries} canaries, for the exact laws")
    checks = check_observation(observe(settings))
    say("one step again and again: neighbours, microbatches and ranks, attempts")
    checks += [*check_step(settings), check_ranks(settings), check_phase()]
    say("one run with every second canary left out, for the lower bound")
    coins = np.random.default_rng(None if seed is None else [seed, 77])
    included = coins.random(settings.num_canaries) < 0.5
    seen = observe(replace(settings, is_included=included, seed=None if seed is None else seed + 1))
    contributions = settings.contributions()
    usable = contributions == contributions.max()
    scores = seen.responses.sum(0)[usable]
    truth = included[usable]
    claimed = epsilon_of([(scaled, scaled.num_steps)], mechanism.delta)
    bound = one_run_lower_bound(scores, truth, delta=mechanism.delta)
    tighter = f_dp_lower_bound(
        replace(scaled, delta=mechanism.delta),
        num_canaries=len(scores),
        num_guesses=(guesses := 2 * (len(scores) // 10)),
        num_right=num_right_guesses(scores, truth, guesses),
    )
    attack = membership_inference(scores[truth][:, None], scores[~truth][:, None], seed=seed or 0)
    return {
        "stamp": STAMP,
        "mechanism": scaled.to_json(),
        "cut_from": {"num_records": mechanism.num_records, "num_steps": mechanism.num_steps},
        "clipping": clipping,
        "clipping_style": clipping_style,
        "views_per_image": views_per_image,
        "family_error": FAMILY_ERROR,
        "checks": [asdict(check) for check in checks],
        "claimed_epsilon": claimed.to_json(),
        "lower_bound": asdict(bound),
        "f_dp_lower_bound": tighter,
        "membership": asdict(attack),
        "passed": all(check.passed for check in checks)
        and bound.epsilon <= claimed.value
        and tighter < claimed.value,
    }


def _scaled(mechanism: Mechanism) -> Mechanism:
    """The same q, noise and clip over fewer records and steps: B / N must stay exactly q."""
    assert mechanism.num_records is not None
    steps = min(mechanism.num_steps, MAX_STEPS)
    num = mechanism.num_records
    if num <= MAX_CANARIES:
        return replace(mechanism, num_steps=steps, reserve_steps=0)
    batch = max(1, round(mechanism.sampling_probability * MAX_CANARIES))
    # The nearest q that small numbers have; told in the result's mechanism.
    num = min(num, max(batch, math.floor(batch / mechanism.sampling_probability + 0.5)))
    return replace(
        mechanism,
        num_records=num,
        expected_batch_size=batch,
        sampling_probability=batch / num,
        num_steps=steps,
        reserve_steps=0,
    )


def table_lines(result: Mapping[str, Any]) -> list[str]:
    """The result as text, one line a check."""
    lines = [str(result["stamp"])]
    for check in result["checks"]:
        p = "exact" if check["p_value"] is None else f"p {check['p_value']:.2g}"
        mark = "ok  " if check["passed"] else "FAIL"
        lines.append(f"{mark}  {check['name']:<26} {p:<10} {check['detail']}")
    bound, claimed = result["lower_bound"], result["claimed_epsilon"]
    lines.append(
        f"epsilon: at least {bound['epsilon']:.3f} (one run, {bound['num_right']} of "
        f"{bound['num_guesses']} guesses right, {bound['num_canaries']} canaries, 95 %), claimed "
        f"at most {claimed['value']} for the steps run, delta {claimed['delta']:.3g}"
    )
    lines.append(
        f"epsilon of the least private mechanism of this kind that the guesses refute: "
        f"{result['f_dp_lower_bound']:.3f} (one run, f-DP, 95 %)"
    )
    attack = result["membership"]
    low, high = attack["intervals"]["auc"]
    lines.append(
        f"membership inference: AUC {attack['auc']:.3f} [{low:.3f}, {high:.3f}], accuracy "
        f"{attack['accuracy']:.3f} over {attack['num_scored']} canaries (.5 is chance)"
    )
    lines.append("passed" if result["passed"] else "NOT PASSED")
    return lines
