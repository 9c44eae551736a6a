"""Where the memory of a private step goes, with and without activation checkpointing.

    python benchmarks/memory.py --sizes base large --microbatch 2

Each row is a process of its own, on the CPU: one microbatch, then the release with its noise and
the AdamW step. "kept" is what stays between two steps (weights, sum of gradients, moments, by
count), "microbatch" how far the resident memory rises while one is computed, "whole step" its peak
over all, libraries included (about 0.4 GiB).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

PATCH_SIZES = {"huge": 14}
MIB = 2**20


def measure(size: str, microbatch: int, checkpoints: bool) -> dict[str, float]:
    """One private step in this process."""
    import torch

    from pipeline.dpsgd import ClippedGradientSum, FlatClipping, release_gradient
    from pipeline.models.mae import MaskedAutoencoder
    from pipeline.models.sizes import SIZES
    from pipeline.privacy.keys import AttemptKey
    from pipeline.privacy.noise import KeyedNoise
    from pipeline.recipe import Optimizer
    from pipeline.training.optimizers import make_optimizer, set_rate

    patch_size = PATCH_SIZES.get(size, 16)
    model = MaskedAutoencoder(SIZES[size], image_size=224, patch_size=patch_size)
    model.checkpoints_activations = checkpoints
    engine = ClippedGradientSum(model, FlatClipping(1.0), checks_independence=False)
    optimizer = make_optimizer(model.named_parameters(), Optimizer(learning_rate=1e-4))
    set_rate(optimizer, 1e-4)
    images = torch.randn(microbatch, 3, 224, 224)
    uniforms = torch.rand(microbatch, model.num_patches)
    before = _resident_bytes()
    started = time.process_time()
    engine.accumulate(lambda: model(images, uniforms))
    seconds = time.process_time() - started
    after = _peak_bytes()
    released = release_gradient(
        engine.flat_sum,
        step=0,
        noise_std=1.0,
        divisor=microbatch,
        noise_source=KeyedNoise(noise_key=AttemptKey.seeded(0).noise_key()),
        layout=engine.layout,
    )
    released.assign(model)
    optimizer.step()
    num_bytes = 4 * engine.layout.num_coordinates
    return {
        "parameters": num_bytes / MIB,
        "kept": 4 * num_bytes / MIB,
        "microbatch": (after - before) / MIB,
        "whole step": _peak_bytes() / MIB,
        "CPU s": seconds,
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["base"])
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--one", choices=("plain", "checkpointed"), help="one row, in this process")
    chosen = parser.parse_args()
    if chosen.one:
        found = measure(chosen.sizes[0], chosen.microbatch, chosen.one == "checkpointed")
        print(json.dumps(found))
        return
    print("MiB  | parameters | kept | microbatch | whole step | CPU s\n---|---|---|---|---|---")
    for size in chosen.sizes:
        for kind in ("plain", "checkpointed"):
            command = [sys.executable, __file__, "--sizes", size, "--one", kind]
            command += ["--microbatch", str(chosen.microbatch)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            print(" | ".join([f"{size}, {kind}", *(f"{value:,.0f}" for value in row.values())]))


if __name__ == "__main__":
    main()
