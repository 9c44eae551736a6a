"""Everything the ranks need to know to train one phase; plain data, and no secret in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline import recipe
from pipeline.privacy.mechanism import Mechanism


@dataclass(frozen=True, kw_only=True)
class PhaseSettings:
    """One phase, resolved: what to train, on what, under which promise, and where it goes.

    Args:
        run: name of the run.
        phase: the recipe's section of this phase.
        model: the recipe's model section.
        recipe_digest: of the whole recipe.
        mechanism: the promise of a private phase; None for a public one.
        dataset_root: folder of the prepared data set.
        held_out_root: folder of the public data set whose loss may be shown, or None.
        output: the phase's folder; checkpoints go below it.
        init_from: checkpoint of the phase before, or None for fresh weights.
        ledger_home, domain: where a private phase is charged.
        private_log: local folder of the private log, or None.
        seed: tests only; pins every key, and stamps the result NOT PRIVATE.
    """

    run: str
    phase: recipe.Phase
    model: recipe.Model
    recipe_digest: str
    mechanism: Mechanism | None
    dataset_root: str
    held_out_root: str | None
    output: str
    init_from: str | None
    ledger_home: str | None
    domain: str | None
    private_log: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        is_private = self.phase.kind == "private"
        if is_private != (self.mechanism is not None):
            raise ValueError(
                f"phase {self.phase.name} is {self.phase.kind} and its mechanism is "
                f"{self.mechanism}: private phases have one, public phases have none"
            )
        if is_private and (self.ledger_home is None or self.domain is None):
            raise ValueError(f"phase {self.phase.name} is private: it needs a ledger and a domain")

    @property
    def batch_size(self) -> int:
        """B, the constant divisor of every step."""
        if self.mechanism is not None:
            return self.mechanism.expected_batch_size
        assert self.phase.batch_size is not None
        return self.phase.batch_size

    def to_json(self) -> dict[str, Any]:
        """Plain data for another process."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        content["phase"] = self.phase.model_dump(mode="json")
        content["model"] = self.model.model_dump(mode="json")
        content["mechanism"] = self.mechanism.to_json() if self.mechanism else None
        return json.loads(json.dumps(content))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> PhaseSettings:
        """The settings that `to_json` wrote."""
        mechanism = content["mechanism"]
        return cls(
            **{
                **content,
                "phase": recipe.Phase.model_validate(content["phase"]),
                "model": recipe.Model.model_validate(content["model"]),
                "mechanism": Mechanism.from_json(mechanism) if mechanism else None,
            }
        )
