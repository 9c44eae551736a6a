"""Where the files of a run are, and what they say is finished.

    {storage}/runs/{run}/recipe.yaml                    the resolved recipe
                         phases/{phase}/checkpoint-…    training/checkpoint.py
                         evaluation.json  audit.json  export/  report.html
    {storage}/data/{name}-{digest}/…                    prepared data sets, shared by runs
    {storage}/domains/{domain}/{n:08d}.json             ledgers, shared by runs
    {storage}/private/                                  private logs (local disks only)

The markers in storage are the truth about what is done; nothing else is consulted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from pipeline.data.manifest import DatasetManifest
from pipeline.data.prepare import PrepareConfig, has_source_changed
from pipeline.privacy.ledger import Ledger, known_domains
from pipeline.recipe import Dataset, Phase, Recipe, RecipeError, parse_recipe
from pipeline.storage import Location
from pipeline.training.checkpoint import latest_checkpoint, read_facts


@dataclass(frozen=True)
class RunLayout:
    """The places of one run.

    Args:
        recipe: the resolved recipe; its name is the run's.
    """

    recipe: Recipe

    @property
    def storage(self) -> Location:
        """Below which everything lives."""
        return Location(self.recipe.storage)

    @property
    def root(self) -> Location:
        """The run's own folder."""
        return self.storage / "runs" / self.recipe.name

    def folders(self) -> list[Location]:
        """The folders of storage that runs share."""
        own = [self.storage / name for name in ("runs", "data", "domains")]
        return own if self.private_log is None else [*own, Location(self.private_log)]

    @property
    def ledger_home(self) -> str:
        """Home of the ledgers, absolute."""
        return str(Location(self.recipe.ledgers))

    def ledgers(self) -> list[Ledger]:
        """The ledgers of the privacy domains that the recipe names."""
        domains = {dataset.domain for dataset in self.recipe.data.values() if dataset.domain}
        return [Ledger(self.ledger_home, domain) for domain in sorted(domains)]

    def domain(self, phase: Phase) -> str:
        """The privacy domain that a private phase charges: its data set's, or one of its own."""
        dataset = self.recipe.dataset_of(phase.data, f"phases.{phase.name}.data")
        return dataset.domain or f"public-{phase.data}"

    @property
    def private_log(self) -> str | None:
        """Local folder of the private logs; None on shared object stores unless the recipe says."""
        if self.recipe.private_storage is not None:
            return str(Location(self.recipe.private_storage))
        return str(self.storage / "private") if self.storage.is_local else None

    @property
    def evaluation(self) -> Location:
        """The evaluation's results."""
        return self.root / "evaluation.json"

    @property
    def audit(self) -> Location:
        """Results of an audit of this recipe's mechanisms."""
        return self.root / "audit.json"

    @property
    def export(self) -> Location:
        """The directory that timm loads; privacy.json is written last."""
        return self.root / "export"

    @property
    def report(self) -> Location:
        """The HTML report."""
        return self.root / "report.html"

    def phase(self, name: str) -> Location:
        """A phase's folder."""
        return self.root / "phases" / name

    def dataset(self, name: str) -> Location:
        """A prepared data set's folder, named after what it is made from."""
        decides = self.recipe.data[name].model_dump(mode="json", exclude={"budget", "num_records"})
        text = json.dumps([decides, self._excluded(name)])
        return self.storage / "data" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def data_root(self, reference: str) -> Location:
        """The folder of `dataset` or `dataset.split`."""
        name, _, split = reference.partition(".")
        return self.dataset(name) / split if split else self.dataset(name)

    def references(self, name: str) -> list[str]:
        """How a data set, or each of its splits, is addressed."""
        splits = self.recipe.data[name].splits
        return [f"{name}.{split}" for split in splits] if splits else [name]

    def prepare_config(self, name: str) -> PrepareConfig:
        """How a data set is prepared; a private one leaves out what the public ones hold."""
        dataset: Dataset = self.recipe.data[name]
        return PrepareConfig(
            name=name,
            source=_absolute_source(dataset.source),
            visibility=dataset.visibility,
            domain=dataset.domain,
            ledger_home=self.ledger_home if dataset.domain else None,
            origin=dataset.origin,
            class_names=dataset.class_names,
            image_short_side=dataset.image_short_side,
            deduplicate=dataset.deduplicate,
            exclude=tuple(self._excluded(name)),
            other_private=self.private_sets() if dataset.domain else (),
            splits=dataset.splits,
            split_salt=dataset.split_salt,
            records_per_shard=dataset.records_per_shard,
            where=dataset.where,
        )

    def _excluded(self, name: str) -> list[str]:
        """The public sets of the recipe, whose pictures are left out of a private set."""
        if self.recipe.data[name].visibility == "public":
            return []
        public = [n for n, d in self.recipe.data.items() if d.visibility == "public"]
        return [str(self.data_root(ref)) for other in public for ref in self.references(other)]

    def private_sets(self) -> tuple[str, ...]:
        """Every private set prepared in this storage, whichever run made it."""
        found = [place.uri.removesuffix("/manifest.json") for place in self._manifest_files()]
        return tuple(r for r in found if DatasetManifest.load(Location(r)).is_private)

    def _manifest_files(self) -> list[Location]:
        folders = (self.storage / "data").list()
        inner = [place for folder in folders for place in folder.list()]
        known = [place / "manifest.json" for place in [*folders, *inner]]
        return [place for place in known if place.exists()]

    def manifests(self) -> dict[str, DatasetManifest]:
        """The manifests of the data that is prepared, by reference."""
        found = {}
        for name in self.recipe.data:
            for reference in self.references(name):
                root = self.data_root(reference)
                if DatasetManifest.exists(root):
                    found[reference] = DatasetManifest.load(root)
        return found

    def num_records(self) -> dict[str, int]:
        """N of each prepared data set, by reference. Raises ValueError if it cannot be read."""
        try:
            found = self.manifests()
        except OSError as error:
            raise ValueError(
                f"storage is {self.recipe.storage!r} and cannot be read: {error}; check the "
                "address, and that you may read it (credentials come from the environment)"
            ) from None
        return {reference: manifest.num_records for reference, manifest in found.items()}

    def is_prepared(self) -> bool:
        """Whether every data set has its manifest."""
        references = [ref for name in self.recipe.data for ref in self.references(name)]
        return all(DatasetManifest.exists(self.data_root(ref)) for ref in references)

    def changed_sources(self) -> list[str]:
        """Prepared data sets whose source's files are no longer those that were prepared."""
        return [
            name
            for name in self.recipe.data
            if all(DatasetManifest.exists(self.data_root(ref)) for ref in self.references(name))
            and has_source_changed(self.prepare_config(name), self.dataset(name))
        ]

    def is_trained(self, name: str) -> bool:
        """Whether a phase has ended."""
        return self.finished_phase(name) is not None

    def is_evaluated(self) -> bool:
        """Whether there is nothing to evaluate, or its results are whole."""
        return self.recipe.evaluation is None or _is_json(self.evaluation, {"probes", "losses"})

    def is_exported(self) -> bool:
        """Whether every part of the exported directory is there; `privacy verify` reads them."""
        parts = [self.export / name for name in ("model.safetensors", "README.md", "PRIVACY.md")]
        is_there = all(part.num_bytes() for part in parts) and _is_json(self.export / "config.json")
        return is_there and self.statements() is not None

    def statements(self) -> list[dict[str, Any]] | None:
        """The statements of the exported weights; None where there are none, or damaged ones."""
        try:
            found = json.loads((self.export / "privacy.json").read_bytes())["statements"]
            is_whole = all(f["domain"] and f["ledger"]["head_sha256"] for f in found)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if is_whole else None

    def is_complete(self) -> bool:
        """Whether all that a run leaves for people is there: the report is written last."""
        return self.report.exists() and self.is_evaluated() and self.is_exported()

    def forget_results(self) -> None:
        """What was made of weights that are no longer the run's is to be made anew."""
        for marker in (self.evaluation, self.export / "privacy.json", self.report):
            marker.delete()

    def finished_phase(self, name: str) -> Location | None:
        """The final checkpoint of a phase, or None while there is none."""
        latest = latest_checkpoint(self.phase(name))
        return latest if latest is not None and read_facts(latest).finished else None


def claim_run(recipe: Recipe) -> tuple[RunLayout, str | None]:
    """The run of this recipe: the one that exists, or a new one.

    A changed recipe never continues another's run: if the name is taken by a recipe that would
    give another result, the run is called `{name}-2`, `-3` and so on.

    Returns:
        the layout, and a sentence to show if the name had to be changed.
    """
    layout, before = _own_place(recipe)
    if before is not None:
        _forget_changed_results(layout, before)
    (layout.root / "recipe.yaml").write_text(layout.recipe.to_yaml())
    if layout.recipe.name == recipe.name:
        return layout, None
    return layout, (
        f"the name {recipe.name!r} belongs to a run of another recipe, or to one whose folder is "
        f"gone but not its charges (in {layout.storage}), so this run is called "
        f"{layout.recipe.name!r}; use --set name=… to choose"
    )


def find_run(recipe: Recipe) -> RunLayout:
    """The run that `claim_run` would give, with nothing written."""
    return _own_place(recipe)[0]


def _own_place(recipe: Recipe) -> tuple[RunLayout, Recipe | None]:
    """The first of NAME, NAME-2, … that is this recipe's or free, and the recipe saved there."""
    number = 1
    while True:
        name = recipe.name if number == 1 else f"{recipe.name}-{number}"
        layout = RunLayout(recipe.model_copy(update={"name": name}))
        saved = layout.root / "recipe.yaml"
        if not saved.exists():
            if not _is_charged(layout):
                return layout, None
        else:
            before = _saved_recipe(saved)
            if before.digest() == recipe.digest():
                return layout, before
        number += 1


def _saved_recipe(place: Location) -> Recipe:
    try:
        return parse_recipe(place.read_bytes().decode("utf-8", "replace"), origin=str(place))
    except RecipeError as error:
        raise RecipeError(
            f"{error}\n  This is the recipe that the run began with; it was damaged, or written by "
            "another version: restore it, or give the run another name (--set name=…)"
        ) from None


def _forget_changed_results(layout: RunLayout, before: Recipe) -> None:
    """Results that the changed parts of a recipe decide are made anew; training is not."""
    recipe, stale = layout.recipe, []
    if recipe.evaluation != before.evaluation:
        stale = [layout.evaluation, layout.export / "privacy.json", layout.report]
    if recipe.hyperparameter_search != before.hyperparameter_search:
        stale += [layout.export / "privacy.json", layout.report]
    for marker in stale:
        marker.delete()


def _is_charged(layout: RunLayout) -> bool:
    """Whether a ledger knows a run of this name: a new run must not live on its reserve."""
    return any(
        account.run == layout.recipe.name
        for ledger in layout.ledgers()
        for account in ledger.accounts()
    )


def open_run(name_or_folder: str, storage: str) -> RunLayout:
    """The layout of an existing run, by name (in `storage`) or by its folder.

    Raises:
        RecipeError: if there is no such run; the known ones are named.
    """
    folder = _run_folder(name_or_folder, storage)
    if folder is None:
        raise RecipeError(
            f"run {name_or_folder!r}: not found in {storage}/runs; known runs: "
            f"{_names_in(Location(storage) / 'runs')}. Give --storage, or the run's folder"
        )
    recipe = _saved_recipe(folder / "recipe.yaml")
    base = folder.uri.removesuffix(f"/runs/{recipe.name}")
    return RunLayout(recipe.model_copy(update={"storage": base}))


def open_ledgers(run_or_domain: str, storage: str, ledger_home: str | None = None) -> list[Ledger]:
    """The ledgers of the domains that a run reads, or that of a domain named itself.

    Args:
        run_or_domain: a run's name or folder (a run knows its ledger home), else a domain's name.
        storage: where runs live, and ledgers (in `domains`) unless `ledger_home` is given.
        ledger_home: where to look for a domain; the name is then not taken for a run's.

    Raises:
        RecipeError: if there is neither; what is known is named.
    """
    if ledger_home is None and _run_folder(run_or_domain, storage) is not None:
        return open_run(run_or_domain, storage).ledgers()
    home = str(Location(ledger_home or f"{storage.rstrip('/')}/domains"))
    known = known_domains(home)
    if run_or_domain not in known:
        raise RecipeError(
            f"{run_or_domain!r}: no run of this name in {storage}/runs (known runs: "
            f"{_names_in(Location(storage) / 'runs')}) and no ledger in {home} (known domains: "
            f"{known}). Give --storage, --ledger-home, or the run's folder"
        )
    return [Ledger(home, run_or_domain)]


def _run_folder(name_or_folder: str, storage: str) -> Location | None:
    places = (Location(name_or_folder), Location(storage) / "runs" / name_or_folder)
    return next((place for place in places if (place / "recipe.yaml").exists()), None)


def _names_in(folder: Location) -> list[str]:
    return sorted(place.name for place in folder.list())


def _absolute_source(source: str) -> str:
    """`kind:path` with a relative path made absolute, so that every process means the same."""
    kind, _, rest = source.partition(":")
    if kind == "synthetic" or "://" in rest or not rest:
        return source
    parts = rest.split(",") if kind == "idx" else [rest]
    return f"{kind}:" + ",".join(str(Location(part)) for part in parts)


def _is_json(place: Location, keys: Set[str] = frozenset()) -> bool:
    """Whether a file is a JSON object that has some keys."""
    try:
        content = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.keys() >= keys
