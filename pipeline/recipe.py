"""Recipe: every knob a person can turn, in one strict YAML file.

An unknown key, a wrong type or a value out of range is an error that names the field, before any
data is read or any machine is asked for. What a recipe leaves out has the default stated here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.recipe_text import RecipeError, read_content, readable
from pipeline.storage import checked_place, without_credentials

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            "allowed are lower-case letters, digits, '.', '_' and '-', at most 63, starting with a "
            "letter or digit (it becomes part of paths and job ids)"
        )
    return value


Search = Literal["not_stated", "none", "public", "unaccounted", "accounted"]
MAX_STEPS = 1_000_000
"""Of a phase, and of its reserve; beyond it the accountant takes minutes."""

Name = Annotated[str, AfterValidator(_checked_name)]
Probability = Annotated[float, Field(gt=0, le=1)]


def _checked_absolute(value: str) -> str:
    if "://" not in value and not Path(value).expanduser().is_absolute():
        raise ValueError(
            f"is {value!r}: it must be an absolute path or a URI, so that every process and every "
            "later run means the same place"
        )
    return without_credentials(value)


Place = Annotated[str, AfterValidator(checked_place)]
AbsolutePlace = Annotated[str, AfterValidator(_checked_absolute)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("true and false are not allowed here")
        return value


class Budget(_Strict):
    """The most that all runs over a privacy domain may spend together."""

    epsilon: PositiveFloat
    delta: Annotated[float, Field(gt=0, le=0.1)]


class Dataset(_Strict):
    """One set of images, where it comes from and whether it may be looked at.

    `source` is `imagefolder:DIR`, `webdataset:DIR`, `parquet:DIR`, `idx:IMAGES` or
    `synthetic:FAMILIES?…`.
    """

    source: Place
    visibility: Literal["public", "private"]
    domain: Name | None = None
    """Privacy domain (private sets): every run over it composes in one ledger."""
    budget: Budget | None = None
    """Of the domain (private sets): kept in its ledger, where every change stays on record; runs
    whose recipe names none are held to it too."""
    origin: str = ""
    """Where the pictures come from, in words, for the statement."""
    class_names: tuple[str, ...] | None = None
    """The class list, where the source states none: a public fact."""
    num_records: PositiveInt | None = None
    """N to plan with until the manifest's N rules; default of synthetic sets: their num_images."""
    where: str | None = None
    """Which images are taken, by their metadata (public), as in `width >= 256 and punsafe < 0.5`:
    columns of Parquet or metadata files, keys of a tar's `.json`. What is unknown is left out."""
    image_short_side: PositiveInt = 256
    deduplicate: Literal["exact", "none"] = "exact"
    splits: dict[Name, Probability] | None = None
    """Fractions, by salted hash of the record; each split is addressed as `dataset.split`."""
    split_salt: str = "dp-pretrain"
    records_per_shard: PositiveInt = 10_000

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        if (self.visibility == "private") != (self.domain is not None):
            raise ValueError(
                f"domain is {self.domain!r} for a {self.visibility} data set: a private set needs "
                "a domain (a name for these pictures under which all runs over them compose), a "
                "public one has none"
            )
        if self.budget is not None and self.visibility == "public":
            raise ValueError(
                f"budget is {self.budget.model_dump()} for a public data set: remove it"
            )
        if self.splits and abs(sum(self.splits.values()) - 1) > 1e-9:
            raise ValueError(f"splits add up to {sum(self.splits.values())}: they must add up to 1")
        if self.visibility == "private" and self.deduplicate == "none":
            raise ValueError(
                "deduplicate is 'none' for a private set: copies of one picture would weaken the "
                "guarantee, whose unit is a distinct prepared image; set it to 'exact'"
            )
        if self.source.startswith("synthetic:") and self.visibility == "private":
            raise ValueError("visibility is private for a synthetic source: it must be public")
        return self


class Model(_Strict):
    """The masked autoencoder (sizes: pipeline/models/sizes.py)."""

    size: str = "base"
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    """14 in the published form of `huge`."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    norm_pix_loss: bool = False
    norm_pix_epsilon: PositiveFloat = 1e-6
    init_seed: NonNegativeInt = 0
    """Public seed of the first weights."""

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size is {self.patch_size}: it must divide image_size {self.image_size}"
            )
        return self


class Optimizer(_Strict):
    """AdamW (or SGD) with linear warm-up and half-cosine decay, a pure function of the step."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: PositiveFloat | None = None
    base_learning_rate: PositiveFloat | None = None
    """Learning rate per 256 images of the logical batch: lr = base_learning_rate x B / 256."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["cosine", "constant"] = "cosine"

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        if (self.learning_rate is None) == (self.base_learning_rate is None):
            raise ValueError("give exactly one of learning_rate and base_learning_rate")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}: each must be in [0, 1)")
        return self

    def peak_learning_rate(self, batch_size: int) -> float:
        """The highest learning rate of the schedule for a logical batch of this many images."""
        if self.learning_rate is not None:
            return self.learning_rate
        assert self.base_learning_rate is not None
        return self.base_learning_rate * batch_size / 256


class Privacy(_Strict):
    """What a private phase promises (pipeline/privacy/mechanism.py)."""

    target_epsilon: PositiveFloat | None = None
    """Epsilon that this run may reach, reserve included; the noise is calibrated to it."""
    noise_multiplier: Annotated[float, Field(ge=0.01, le=1e6)] | None = None
    """Noise standard deviation / max_grad_norm; with target_epsilon too: checked against it."""
    delta: Annotated[float, Field(gt=0, le=0.1)] | None = None
    """Default 1/(2N)."""
    max_grad_norm: PositiveFloat = 1.0
    clipping: Literal["automatic", "flat", "global"] = "automatic"
    """How an image's gradient is bounded: scaled to almost max_grad_norm, shortened where it is
    longer, or dropped where it is longer."""
    clipping_style: Literal["all-layer", "per-layer", "per-block"] = "all-layer"
    """What is bounded together: the whole gradient, or each of K layers or transformer blocks by
    itself, to max_grad_norm / sqrt(K) (pipeline/dpsgd/blocks.py)."""
    gamma: PositiveFloat = 0.01
    """Stabiliser of automatic clipping: factor max_grad_norm / (norm + gamma)."""
    expected_batch_size: PositiveInt
    """B: the mean size of a logical batch and the only divisor."""
    max_sampling_probability: Probability | None = None
    """If B/N would exceed it, B is lowered to floor(N x this); N is public, so this is too."""
    reserve_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None
    """Spare steps for restarts; default max(min(4 checkpoint_interval, 2 steps), 2 % of steps)."""
    adjacency: Literal["replace_special", "add_or_remove_one"] = "replace_special"

    @model_validator(mode="after")
    def _check(self) -> Privacy:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("give target_epsilon (the noise is calibrated) or noise_multiplier")
        if self.adjacency == "add_or_remove_one":
            raise ValueError(
                "adjacency is 'add_or_remove_one': it hides N, and a run here derives its plan "
                "from the manifest's N; use 'replace_special' (same epsilon, N is public)"
            )
        return self


class Resources(_Strict):
    """Who computes a phase."""

    workers: NonNegativeInt | tuple[PositiveInt, PositiveInt] = 0
    """0 = in this process; W or [min, max] Ray Train workers."""
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0
    cpus_per_worker: PositiveInt | None = None
    """CPU threads that compute; default 1 a Ray worker, torch's own default in this process."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    data_cpus: PositiveInt = 2
    """Threads (workers = 0) or Ray Data CPUs (at most) that read and decode."""
    prefetch_units: PositiveInt = 4
    """Units of images that a worker has in work or waiting: more hides slower storage, and takes
    memory (of Ray's object store, where there are workers)."""
    cache_dir: str | None = None
    """A folder on each machine's own disk that keeps what was read from an object store. It tells
    which records were read, is readable by its owner only, and stays when the run ends."""
    cache_bytes: Annotated[int, Field(ge=2**20)] = 100 * 2**30
    """The most that cache_dir may take on each machine."""
    max_failures: NonNegativeInt = 3
    """Worker-group restarts before the phase gives up; each costs reserve steps."""
    shard_optimizer: bool = True
    """Where there are several workers, each holds 1/W of the optimizer's state and moves 1/W of the
    weights: as many bytes on the network and the same result to the bit; false: all, everywhere."""

    compile: bool = False
    """Compile the step with torch.compile, for GPUs; the first steps of a phase then take minutes.
    Whether it gains: `benchmarks/step.py --methods ours ours_compiled`."""

    @model_validator(mode="after")
    def _check(self) -> Resources:
        if isinstance(self.workers, tuple) and self.workers[0] > self.workers[1]:
            raise ValueError(f"workers is {list(self.workers)}: it must be [min, max], min <= max")
        if self.device == "cpu" and self.gpus_per_worker:
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker} but device is cpu: set it to 0"
            )
        if self.device == "cuda" and self.workers != 0 and not self.gpus_per_worker:
            raise ValueError("device is cuda but gpus_per_worker is 0: set it to 1")
        return self


class Phase(_Strict):
    """One public or private phase; phases run in the order given."""

    name: Name
    kind: Literal["public", "private"]
    objective: Literal["mae"] = "mae"
    data: str
    """`dataset` or `dataset.split`."""
    init: str = "previous"
    """`previous`, `fresh`, or the path of a finished phase's checkpoint."""
    reset_optimizer: Literal["none", "m", "all"] = "all"
    """What of Adam's state from the phase before is reset: nothing, its first moment m, or all."""
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]
    batch_size: PositiveInt | None = None
    """Logical batch of a public phase (private phases: privacy.expected_batch_size)."""
    reading: Literal["auto", "records", "shards"] = "auto"
    """Public phases: shuffle single records, or whole shards, a run of neighbours of each in turn;
    auto: whole shards where the set is a large one of small records in an object store."""
    optimizer: Optimizer
    privacy: Privacy | None = None
    microbatch_size: PositiveInt = 256
    microbatches_per_unit: PositiveInt = 2
    constant_microbatches: bool = False
    """Private phases: every step computes as many microbatches as mean + 6 sd of its size needs, so
    that its duration does not tell the realised size."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the model's blocks for the backward and compute the rest again: less
    memory for one more forward of the blocks; in a private phase for two more and a second backward
    (the first finds the norms)."""
    checkpoint_interval: PositiveInt = 100
    """K: steps between checkpoints, and the number of steps charged ahead."""
    crop_scale: tuple[Probability, Probability] = (0.2, 1.0)
    augment: bool = True
    views_per_image: PositiveInt = 1
    """Views (crop, flip, mask) of each image in a step. An image's loss is the mean of theirs, so
    that its gradient is clipped once; the microbatch counts images."""
    precision: Literal["float32", "bfloat16"] = "float32"
    held_out: str | None = None
    """A public data set whose loss may be shown while this phase trains."""
    held_out_images: PositiveInt = 512
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _check(self) -> Phase:
        if self.kind == "private" and self.privacy is None:
            raise ValueError(f"phase {self.name} is private: it needs a `privacy` section")
        if self.kind == "public" and self.privacy is not None:
            raise ValueError(f"phase {self.name} is public: remove its `privacy` section")
        if self.kind == "public" and self.constant_microbatches:
            raise ValueError(
                f"phase {self.name} is public: constant_microbatches is for private phases; all "
                "steps of a public one are equal anyway"
            )
        if self.kind == "public" and self.batch_size is None:
            raise ValueError(f"phase {self.name} is public: it needs `batch_size`")
        if self.kind == "private" and self.batch_size is not None:
            raise ValueError(
                f"phase {self.name}: batch_size is for public phases; a private one has "
                "privacy.expected_batch_size"
            )
        if self.resources.compile and self.activation_checkpointing:
            raise ValueError(
                f"phase {self.name}: resources.compile and activation_checkpointing do not go "
                "together; set one of them to false"
            )
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}: at most steps "
                f"({self.steps})"
            )
        if self.crop_scale[0] > self.crop_scale[1]:
            raise ValueError(f"crop_scale is {self.crop_scale}: it must be (low, high)")
        return self


class Evaluation(_Strict):
    """How the encoder is judged, on public labelled images disjoint from every private set."""

    train: str
    test: str
    rules: tuple[Literal["last_block", "last_12_blocks"], ...] = ("last_block", "last_12_blocks")
    shots: PositiveInt = 10
    draws: PositiveInt = 5
    max_images: PositiveInt | None = None
    seed: NonNegativeInt = 0


class Recipe(_Strict):
    """The whole run."""

    name: Name
    storage: Place = "storage"
    """Folder or URI below which runs, prepared data and ledgers live."""
    ledger_home: AbsolutePlace | None = None
    """Where the ledgers of the privacy domains live; default `{storage}/domains`. Runs compose
    in one ledger only if they name the same home."""
    private_storage: AbsolutePlace | None = None
    """Local folder of the private logs; default `{storage}/private` on a local disk, else none."""
    hyperparameter_search: Search = "not_stated"
    """What the choice of these hyper-parameters looked at; printed in the statement."""
    seed: NonNegativeInt | None = None
    """Tests only: pins all randomness; whatever is made is stamped NOT PRIVATE."""
    data: dict[Name, Dataset]
    model: Model = Model()
    phases: Annotated[list[Phase], Field(min_length=1)]
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        names = [phase.name for phase in self.phases]
        taken = {"chain", "prepare", "evaluate"} & set(names)
        if taken:
            raise ValueError(
                f"phases have the names {names}: {sorted(taken)} are stages of the chain"
            )
        if self.private_storage is not None and "://" in self.private_storage:
            raise ValueError(
                f"private_storage is {self.private_storage!r}: allowed is a local folder; leave it "
                "out to keep no private log"
            )
        self._check_budgets()
        if len(set(names)) != len(names):
            raise ValueError(f"phases have the names {names}: each must be different")
        for phase in self.phases:
            dataset = self.dataset_of(phase.data, f"phases.{phase.name}.data")
            if phase.kind == "public" and dataset.visibility == "private":
                raise ValueError(
                    f"phases.{phase.name}.data is {phase.data!r}, a private set: a public phase "
                    "gives no guarantee and takes public sets only"
                )
            if self.seed is not None and dataset.visibility == "private":
                raise ValueError(
                    f"seed is {self.seed} and phases.{phase.name} reads a private set: a seeded "
                    "run has no guarantee and takes public sets only; remove `seed`"
                )
            if phase.held_out is not None:
                self._require_public(phase.held_out, f"phases.{phase.name}.held_out")
        if self.evaluation is not None:
            self._require_public(self.evaluation.train, "evaluation.train")
            self._require_public(self.evaluation.test, "evaluation.test")
        return self

    def _check_budgets(self) -> None:
        budgets: dict[str | None, Budget] = {}
        for name, dataset in self.data.items():
            if dataset.budget is not None:
                first = budgets.setdefault(dataset.domain, dataset.budget)
                if first != dataset.budget:
                    raise ValueError(
                        f"data.{name}.budget differs from that of another set of domain "
                        f"{dataset.domain!r}: a domain has one budget"
                    )

    def budget_of(self, domain: str) -> Budget | None:
        """The budget that this recipe gives to a privacy domain."""
        found = [d.budget for d in self.data.values() if d.domain == domain and d.budget]
        return found[0] if found else None

    def dataset_of(self, reference: str, field: str) -> Dataset:
        """The data set that `dataset` or `dataset.split` names; ValueError if there is none."""
        name, _, split = reference.partition(".")
        if name not in self.data:
            known = list(self.data)
            raise ValueError(f"{field} is {reference!r}: no such data set; known: {known}")
        splits = self.data[name].splits
        if bool(split) != bool(splits) or (splits and split not in splits):
            allowed = [f"{name}.{key}" for key in splits] if splits else [name]
            raise ValueError(f"{field} is {reference!r}: allowed are {allowed}")
        return self.data[name]

    def _require_public(self, reference: str, field: str) -> None:
        if self.dataset_of(reference, field).visibility != "public":
            raise ValueError(
                f"{field} is {reference!r}, a private set: a published loss or accuracy on it "
                "would be a release; name a public set"
            )

    @property
    def ledgers(self) -> str:
        """The home of all ledgers of this storage."""
        return self.ledger_home or f"{self.storage.rstrip('/')}/domains"

    def phase(self, name: str) -> Phase:
        """The phase of this name; RecipeError if there is none."""
        phases = {phase.name: phase for phase in self.phases}
        if name not in phases:
            raise RecipeError(f"phase is {name!r}: no such phase; known: {list(phases)}")
        return phases[name]

    def to_yaml(self) -> str:
        """The resolved recipe, every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def digest(self) -> str:
        """SHA-256 (hex) of what decides the result.

        Machines, places, and what is only told or measured are left out: they may change between
        two calls of the same run.
        """
        content = self.model_dump(mode="json")
        for key in _WITHOUT_EFFECT:
            del content[key]
        for phase in content["phases"]:
            for key in _WITHOUT_EFFECT_IN_PHASE:
                del phase[key]
        for dataset in content["data"].values():
            del dataset["num_records"], dataset["origin"], dataset["budget"]
            if dataset["where"] is None:  # as before there was one
                del dataset["where"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_WITHOUT_EFFECT = (
    "name",
    "storage",
    "ledger_home",
    "private_storage",
    "hyperparameter_search",
    "evaluation",
)
_WITHOUT_EFFECT_IN_PHASE = (
    "resources",
    "microbatch_size",
    "microbatches_per_unit",
    "constant_microbatches",
    "activation_checkpointing",
    "held_out",
    "held_out_images",
)


def parse_recipe(
    text: str,
    overrides: Sequence[str] = (),
    *,
    origin: str = "recipe",
    tell: Callable[[str], None] | None = None,
) -> Recipe:
    """A Recipe from YAML text.

    Args:
        overrides: `path=value` strings as in `phases.private.privacy.target_epsilon=2`; the
            members of a list are addressed by their `name`, values are YAML. A new source of a
            data set drops the recipe's `origin`, which tells of the old one.
        tell: told in a sentence of each origin that is dropped.

    Raises:
        RecipeError: naming each wrong field, its value and what is allowed.
    """
    content = read_content(text, overrides, origin, tell)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(readable(error, content, origin)) from None


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] | None = None
) -> Recipe:
    """`parse_recipe` of a file; a missing or unreadable file is a RecipeError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe {path}: cannot be read: {error}") from None
    return parse_recipe(text, overrides, origin=str(path), tell=tell)
