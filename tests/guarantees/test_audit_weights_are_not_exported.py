"""Pitfall 27: canaries were left in a released model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.models.export import export_encoder
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES
from pipeline.storage import Location


@pytest.mark.parametrize("stamp", ["audit", "AUDIT: holds canaries", "", "Differential Privacy"])
def test_an_unknown_stamp_is_refused_and_nothing_is_written(stamp: str, tmp_path: Path) -> None:
    """Guarantee 3 of export_encoder."""
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    with pytest.raises(ValueError, match="guarantee"):
        export_encoder(
            model, Location(str(tmp_path)), tag="x", guarantee=stamp, card_markdown="# Card"
        )
    assert list(tmp_path.iterdir()) == []
