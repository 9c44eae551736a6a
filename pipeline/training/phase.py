"""The loop of one phase, public or private: logical steps, resume, checkpoints.

One step, as in the map: record ids from the plan -> units from the stream -> loss per image ->
clipped sum -> one released gradient -> optimizer. The ledger is charged before the steps run.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline import recipe
from pipeline.data.manifest import split_part
from pipeline.data.shards import CacheSettings, ShardStore, StorageFault
from pipeline.data.stream import DeliveryError, Plan, StreamConfig, Unit
from pipeline.dpsgd import UnsupportedOperationError
from pipeline.models.mae import MaskedAutoencoder, normalise_images
from pipeline.models.sizes import model_size
from pipeline.privacy.composition import epsilon_of_charges
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, Ledger, LedgerError, LedgerHead, ReserveExhausted
from pipeline.privacy.mechanism import BrokenPromise
from pipeline.privacy.sampling import (
    checksum,
    view_uniforms,
)
from pipeline.storage import Location
from pipeline.training.checkpoint import (
    CheckpointError,
    CheckpointFacts,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from pipeline.training.gradients import (
    GradientSource,
    PrivateGradients,
    PublicGradients,
)
from pipeline.training.held_out import HeldOutLoss
from pipeline.training.metrics import PrivateLog, PublicMetrics, TensorBoardLog, two_digits
from pipeline.training.optimizers import learning_rate
from pipeline.training.ranks import FirstRankFailed, Ranks
from pipeline.training.reading import public_plan
from pipeline.training.settings import PhaseSettings
from pipeline.training.sharding import PhaseOptimizer, open_optimizer

OpenUnits = Callable[[StreamConfig], Iterator[Unit]]
OnWindow = Callable[[PublicMetrics], None]

_NOT_PRIVATE = "NOT PRIVATE"
COMPLETE, RESERVE_USED_UP = "complete", "reserve_used_up"


@dataclass(frozen=True, kw_only=True)
class PhaseOutcome:
    """How a phase ended: after which step, why, and with which weights."""

    step: int
    finished: str
    weights_digest: str


@dataclass(kw_only=True)
class _State:
    """Where a phase stands between two windows."""

    step: int = 0
    finished: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    guarantee: str = "none needed (public data)"
    weights_digest: str = ""
    ledger_head: tuple[int, str] | None = None
    is_resumed: bool = False


def run_phase(
    settings: PhaseSettings, ranks: Ranks, open_units: OpenUnits, on_window: OnWindow
) -> PhaseOutcome:
    """Train one phase from where it stands to its end; the same call again resumes or returns.

    Args:
        ranks: the processes that train together.
        open_units: opens this rank's stream of units; called once.
        on_window: told the public metrics at each checkpoint, on rank 0.

    Raises:
        DeliveryError: if a step's images were not exactly the plan's.
        ValueError: if data, checkpoint or ledger do not fit the settings.

    Guarantees:
        1. No private step runs before the ledger has been charged for it
           (test_no_step_before_its_charge).
        2. A phase ends at step T, or earlier and validly when its reserve is used up
           (test_reserve_exhausted_ends_early).
        3. Every step's images are exactly the plan's, once each (test_exact_delivery).
        4. A failure of a private phase shows only words written for all
           (test_nothing_private_is_shown).
        5. A private phase goes on only from weights that its ledger names, at their step
           (test_tampered_checkpoints_are_not_resumed).
        6. Nothing of a window is shown before its checkpoint is on record
           (test_nothing_is_shown_before_it_is_on_record).
    """
    store = ShardStore(settings.dataset_root)
    _check_manifest(settings, store)
    model = build_model(settings.model).to(ranks.device)
    model.checkpoints_activations = settings.phase.activation_checkpointing
    is_private = settings.mechanism is not None
    optimizer = open_optimizer(model, settings.phase, ranks, is_private=is_private)
    state = _restore(settings, model, optimizer)
    if state.finished:
        return PhaseOutcome(
            step=state.step, finished=state.finished, weights_digest=state.weights_digest
        )
    phase = _OpenPhase(settings, ranks, model, optimizer, state)
    try:
        phase.start(store, open_units)
        while state.finished is None:
            phase.run_window(on_window)
    except StorageFault as fault:
        phase.private_log.write(storage_fault=str(fault), detail=fault.private_detail)
        raise
    except Exception as error:
        if settings.mechanism is None or isinstance(error, _WRITTEN_FOR_ALL):
            raise
        phase.private_log.write(failure=traceback.format_exc())
        raise _without_its_text(error) from None
    finally:
        phase.close()
    return PhaseOutcome(
        step=state.step, finished=state.finished, weights_digest=state.weights_digest
    )


_WRITTEN_FOR_ALL = (
    DeliveryError,
    LedgerError,
    CheckpointError,
    BrokenPromise,
    UnsupportedOperationError,
    FirstRankFailed,
)


def _without_its_text(error: Exception) -> Exception:
    """The failure of a private phase as all may see it: a library's words may hold private facts.

    A ValueError stays one (a new attempt would only meet it again), an OSError keeps the operating
    system's fixed words.
    """
    reason = type(error).__name__
    if isinstance(error, OSError) and error.errno is not None:
        reason += f" ({os.strerror(error.errno)})"
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(
        f"the private phase failed with {reason}; its text is in the private log only. Mend the "
        "cause (free space, memory, a file), then the same command resumes"
    )


def build_model(config: recipe.Model) -> MaskedAutoencoder:
    """The recipe's model with its public first weights."""
    model = MaskedAutoencoder(
        model_size(config.size),
        image_size=config.image_size,
        patch_size=config.patch_size,
        norm_pix_loss=config.norm_pix_loss,
        norm_pix_epsilon=config.norm_pix_epsilon,
        mask_ratio=config.mask_ratio,
    )
    model.initialise(torch.Generator().manual_seed(config.init_seed))
    return model


class _OpenPhase:
    """A phase under way: what `run_phase` opened and must close."""

    def __init__(
        self,
        settings: PhaseSettings,
        ranks: Ranks,
        model: MaskedAutoencoder,
        optimizer: PhaseOptimizer,
        state: _State,
    ) -> None:
        self.settings, self.ranks, self.state = settings, ranks, state
        self.model, self.optimizer = model, optimizer
        self.folder = Location(settings.output)
        self.is_first = ranks.rank == 0
        self.ledger: Ledger | None = None
        self.attempt: Attempt | None = None
        self.attempt_number = 0
        log_folder = None
        if settings.private_log is not None and settings.mechanism is not None:
            log_folder = Location(settings.private_log).local_path
        name = f"{settings.run}-{settings.phase.name}-rank{ranks.rank}"
        self.private_log = PrivateLog(log_folder, name)
        self.board = TensorBoardLog(self.folder / "tensorboard") if self.is_first else None
        self.held_out = HeldOutLoss(settings) if self.is_first else None

    def start(self, store: ShardStore, open_units: OpenUnits) -> None:
        """Draw or derive the keys, open the attempt, then the stream."""
        settings, mechanism = self.settings, self.settings.mechanism
        self.plan: Plan
        self.gradients: GradientSource
        num_records, gathers = store.num_records, not self.optimizer.is_sharded
        if mechanism is None:
            key = AttemptKey.from_bytes(_public_secret(settings))
            self.plan = public_plan(
                key.sampling_key(), store, settings.batch_size, settings.phase.reading
            )
            visibility = store.manifest.visibility
            self.gradients = PublicGradients(self.model, settings, visibility, gathers=gathers)
        else:
            key = self._open_attempt(store)
            self.plan = mechanism.plan(key.sampling_key(), num_records=num_records)
            self.gradients = PrivateGradients(
                self.model, settings, self.plan, key, self.private_log, gathers=gathers
            )
        self.augmentation_key = key.augmentation_key()
        resources, cache = settings.phase.resources, None
        if resources.cache_dir is not None:
            cache = CacheSettings(folder=resources.cache_dir, num_bytes=resources.cache_bytes)
        self.units = open_units(
            StreamConfig(
                plan=self.plan,
                store_root=settings.dataset_root,
                augmentation_key=self.augmentation_key,
                world_size=self.ranks.world_size,
                microbatch_size=settings.phase.microbatch_size,
                microbatches_per_unit=settings.phase.microbatches_per_unit,
                image_size=settings.model.image_size,
                crop_scale=settings.phase.crop_scale,
                first_step=self.state.step,
                num_steps=settings.phase.steps - self.state.step,
                is_private=mechanism is not None,
                augment=settings.phase.augment,
                views_per_image=settings.phase.views_per_image,
                is_constant=settings.phase.constant_microbatches,
                prefetch_units=resources.prefetch_units,
                cache=cache,
            )
        )

    def _open_attempt(self, store: ShardStore) -> AttemptKey:
        """A new key on rank 0, committed to in the ledger, then sent to the others in memory."""
        settings, mechanism = self.settings, self.settings.mechanism
        assert mechanism is not None and settings.ledger_home and settings.domain
        ledger = Ledger(settings.ledger_home, settings.domain)

        def open_on_first() -> bytes:
            seed = settings.seed
            key = AttemptKey.from_os_entropy() if seed is None else AttemptKey.seeded(seed)
            store.check_files()  # before it is paid for
            self._verify_ledger(ledger)
            self.attempt = ledger.open_attempt(
                run=settings.run,
                phase=settings.phase.name,
                mechanism=mechanism,
                key_commitment=key.commitment(),
                first_step=self.state.step,
                part=split_part(store.root),
                is_seeded=key.is_seeded,
            )
            self.ledger, self.attempt_number = ledger, self.attempt.number
            return key.secret

        shared = self.ranks.from_first(self.ranks.first_does(open_on_first))
        return AttemptKey.from_bytes(shared, is_seeded=settings.seed is not None)

    def _verify_ledger(self, ledger: Ledger) -> None:
        """The ledger holds what the checkpoint saw of it, and names its weights at its step."""
        state, settings = self.state, self.settings
        if not state.is_resumed:
            return
        if state.ledger_head is None:
            raise CheckpointError(
                f"the checkpoint of step {state.step} in {settings.output} keeps no ledger head, "
                "which every private one does: restore its checkpoint.json from a copy"
            )
        index, digest = state.ledger_head
        ledger.verify(head=LedgerHead(index=index, digest=digest))
        ledger.require_weights(
            state.weights_digest, run=settings.run, phase=settings.phase.name, step=state.step
        )

    def run_window(self, on_window: OnWindow) -> None:
        """Charge, run the steps up to the next checkpoint, and write it."""
        phase, state = self.settings.phase, self.state
        started = time.monotonic()
        num_steps = min(phase.checkpoint_interval, phase.steps - state.step)
        if num_steps and not self._charge(num_steps):
            if not state.step:
                raise ReserveExhausted(
                    f"phase {phase.name}: its reserve was used up before the first checkpoint, so "
                    "there is nothing to keep; start a new run (another name) with a smaller "
                    "checkpoint_interval or more reserve_steps"
                )
            state.finished = RESERVE_USED_UP
            self._save()
            return
        rate = 0.0
        for step in range(state.step, state.step + num_steps):
            rate = self._run_step(step)
        state.step += num_steps
        if state.step >= phase.steps:
            state.finished = COMPLETE
        seconds = max(time.monotonic() - started, 1e-9)
        metrics = self._public_metrics(rate, num_steps, seconds)
        self._save()
        if metrics is not None and self.board is not None:  # nothing is shown that is not on record
            self.board.write(metrics)
            on_window(metrics)

    def _charge(self, num_steps: int) -> bool:
        """Pay for the next steps on rank 0; every rank learns whether it was possible."""
        if self.settings.mechanism is None:
            return True

        def charge_on_first() -> bool:
            assert self.attempt is not None
            try:
                self.attempt.charge(self.state.step, num_steps)
            except ReserveExhausted:
                return False
            return True

        return self.ranks.from_first(self.ranks.first_does(charge_on_first))

    def _run_step(self, step: int) -> float:
        """One logical step; returns its learning rate."""
        settings = self.settings
        self.gradients.begin_step(step)
        delivered = np.zeros(2, dtype=np.int64)
        for unit in self._units_of(step):
            delivered += np.array(unit.receipt(), dtype=np.int64)
            self._accumulate(unit)
        self._check_delivery(step, delivered)
        gradient = self.gradients.finish_step(step)
        peak = settings.phase.optimizer.peak_learning_rate(settings.batch_size)
        rate = learning_rate(
            step,
            peak=peak,
            num_steps=settings.phase.steps,
            warmup_steps=settings.phase.optimizer.warmup_steps,
            schedule=settings.phase.optimizer.schedule,
        )
        self.optimizer.set_rate(rate)
        self.optimizer.step(gradient)
        return rate

    def _units_of(self, step: int) -> Iterator[Unit]:
        """This rank's units of one step, in order."""
        position, num_units = 0, 1
        while position < num_units:
            unit = next(self.units, None)
            if unit is None or (unit.step, unit.unit, unit.rank) != (
                step,
                position,
                self.ranks.rank,
            ):
                raise DeliveryError(
                    f"step {step}: the stream ended or brought another step's or rank's images; "
                    "start the same command again to resume from the last checkpoint"
                )
            num_units = unit.num_units
            position += 1
            yield unit

    def _accumulate(self, unit: Unit) -> None:
        """Feed a unit to the gradient source, one microbatch at a time."""
        phase, device = self.settings.phase, self.ranks.device
        for start in range(0, len(unit.record_ids), phase.microbatch_size):
            rows = slice(start, start + phase.microbatch_size)
            views = slice(rows.start * phase.views_per_image, rows.stop * phase.views_per_image)
            uniforms = self._mask_uniforms(unit.step, unit.record_ids[rows])
            images = torch.from_numpy(unit.images[views]).to(device)
            weights = torch.from_numpy(unit.weights[rows]).to(device)
            mask_uniforms = torch.from_numpy(uniforms).to(device)
            self.gradients.accumulate(normalise_images(images), mask_uniforms, weights)

    def _mask_uniforms(self, step: int, record_ids: np.ndarray) -> np.ndarray:
        """Uniforms of each view's mask, [n V, T], the views of a record one after the other."""
        uniforms = view_uniforms(
            self.augmentation_key,
            step,
            record_ids,
            "mask",
            num_values=self.model.num_patches,
            num_views=self.settings.phase.views_per_image,
        )
        return uniforms.reshape(-1, self.model.num_patches)

    def _check_delivery(self, step: int, delivered: np.ndarray) -> None:
        """Exactly-once delivery, proved over all ranks."""
        total = self.ranks.sum_int64(torch.from_numpy(delivered)).numpy()
        expected = self.plan.record_ids(step)
        is_exact = total[0] == len(expected) and (
            int(total[1]) % _CHECKSUM_MODULUS == checksum(expected) % _CHECKSUM_MODULUS
        )
        if not is_exact:
            raise DeliveryError(
                f"step {step}: the images that arrived are not exactly the plan's; nothing of "
                "this step was used. Start the same command again to resume"
            )

    def _public_metrics(self, rate: float, num_steps: int, seconds: float) -> PublicMetrics | None:
        if not self.is_first:
            return None
        settings = self.settings
        epsilon, num_images = None, settings.batch_size * num_steps
        if settings.mechanism is not None and self.ledger is not None:
            charges = self.ledger.charges(settings.run)
            epsilon = epsilon_of_charges(charges, settings.mechanism.delta).value
        metrics = PublicMetrics(
            step=self.state.step,
            learning_rate=rate,
            epsilon=epsilon,
            images_per_second=None if settings.mechanism else two_digits(num_images / seconds),
            held_out_loss=self.held_out.measure(self.model) if self.held_out else None,
            train_loss=self.gradients.public_loss(),
        )
        self.state.history.append(asdict(metrics))
        return metrics

    def _save(self) -> None:
        """Write the checkpoint on rank 0; the ledger names the weights before it exists."""
        optimizer_state = self.optimizer.tensors()

        def save_on_first() -> str:
            weights = self.model.state_dict()
            digest = save_checkpoint(self.folder, weights, optimizer_state, self._facts)
            prune(self.folder)
            if self.attempt is not None and self.state.finished:
                self.attempt.finish(self.state.finished, self.state.step)
            return digest

        self.state.weights_digest = self.ranks.from_first(self.ranks.first_does(save_on_first))

    def _facts(self, weights_digest: str) -> CheckpointFacts:
        settings, mechanism, state = self.settings, self.settings.mechanism, self.state
        head: tuple[int, str] | None = None
        guarantee, lineage = state.guarantee, list(state.lineage)
        if self.attempt is not None and self.ledger is not None:
            self.attempt.record_weights(state.step, weights_digest, "checkpoint")
            ledger_head = self.ledger.head()
            head = (ledger_head.index, ledger_head.digest)
            if guarantee != _NOT_PRIVATE:
                guarantee = "differential privacy" if settings.seed is None else _NOT_PRIVATE
            own = {"domain": settings.domain, "run": settings.run, "phase": settings.phase.name}
            lineage.append({**own, "num_steps": state.step})
        return CheckpointFacts(
            step=state.step,
            finished=state.finished,
            recipe_digest=settings.recipe_digest,
            mechanism_digest=mechanism.digest() if mechanism else None,
            ledger_head=head,
            attempt=self.attempt_number,
            history=state.history,
            model=settings.model.model_dump(mode="json"),
            origin=state.origin,
            lineage=lineage,
            guarantee=guarantee,
        )

    def close(self) -> None:
        """Let go of streams, threads and files."""
        for closing in (getattr(self, "units", None), getattr(self, "gradients", None)):
            close = getattr(closing, "close", None)
            if close is not None:
                close()
        self.private_log.close()
        if self.board is not None:
            self.board.close()


_CHECKSUM_MODULUS = 2**62


def _is_own(line: dict[str, Any], settings: PhaseSettings) -> bool:
    return (line["run"], line["phase"]) == (settings.run, settings.phase.name)


def _public_secret(settings: PhaseSettings) -> bytes:
    """Key bytes of a public phase: a function of public facts, so that a resume replays it."""
    text = f"public phase|{settings.recipe_digest}|{settings.phase.name}|{settings.seed}"
    return hashlib.sha256(text.encode()).digest()


def _check_manifest(settings: PhaseSettings, store: ShardStore) -> None:
    """The data is what the settings promise. Raises ValueError."""
    manifest, mechanism = store.manifest, settings.mechanism
    if mechanism is None and manifest.visibility != "public":
        raise ValueError(
            f"phase {settings.phase.name} is public but {settings.dataset_root} is marked "
            f"{manifest.visibility}: a public phase gives no guarantee and takes public sets only"
        )
    if mechanism is not None and mechanism.num_records != manifest.num_records:
        raise ValueError(
            f"the mechanism is for N = {mechanism.num_records} records but the manifest at "
            f"{settings.dataset_root} has {manifest.num_records}: plan again"
        )
    if settings.seed is not None and manifest.visibility != "public":
        raise ValueError(
            f"seed is {settings.seed} and {settings.dataset_root} is private: a seeded run has no "
            "guarantee; remove `seed`"
        )
    if manifest.visibility == "private" and manifest.domain != settings.domain:
        raise ValueError(
            f"{settings.dataset_root} belongs to the privacy domain {manifest.domain!r}, not "
            f"{settings.domain!r}: runs over the same pictures must compose in one ledger"
        )
    if manifest.visibility == "private" and manifest.ledger_home != settings.ledger_home:
        raise ValueError(
            f"{settings.dataset_root} was prepared for the ledger at {manifest.ledger_home}, not "
            f"{settings.ledger_home}: runs over the same pictures must compose in one ledger; set "
            "ledger_home to it"
        )


def _restore(
    settings: PhaseSettings, model: MaskedAutoencoder, optimizer: PhaseOptimizer
) -> _State:
    """The state of the newest checkpoint; else of the phase before; else a fresh start."""
    latest = latest_checkpoint(Location(settings.output))
    if latest is not None:
        saved = load_checkpoint(latest)
        facts = saved.facts
        digest = settings.mechanism.digest() if settings.mechanism else None
        if (facts.recipe_digest, facts.mechanism_digest) != (settings.recipe_digest, digest):
            raise ValueError(
                f"{latest} was trained under another recipe or mechanism: a phase keeps its "
                "promise to the end; use another run name"
            )
        model.load_state_dict(saved.weights)
        optimizer.restore(saved.optimizer)
        return _State(
            step=facts.step,
            finished=facts.finished,
            history=list(facts.history),
            origin=list(facts.origin),
            lineage=[line for line in facts.lineage if not _is_own(line, settings)],
            guarantee=facts.guarantee,
            weights_digest=saved.weights_digest,
            ledger_head=facts.ledger_head,
            is_resumed=True,
        )
    if settings.init_from is None:
        return _State()
    before = load_checkpoint(Location(settings.init_from))
    if before.facts.model != settings.model.model_dump(mode="json"):
        raise ValueError(f"{settings.init_from} holds another model than the recipe's")
    model.load_state_dict(before.weights)
    optimizer.restore(before.optimizer, settings.phase.reset_optimizer)
    return _State(
        origin=[*before.facts.origin, before.weights_digest],
        lineage=list(before.facts.lineage),
        guarantee=before.facts.guarantee,
    )
