"""The exported directory, read by timm itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from timm.data import create_transform, resolve_data_config

from pipeline.models.export import GUARANTEES, export_encoder
from pipeline.models.mae import IMAGE_MEAN, IMAGE_STD, MaskedAutoencoder
from pipeline.models.sizes import SIZES
from pipeline.storage import Location


@pytest.fixture
def model() -> MaskedAutoencoder:
    model = MaskedAutoencoder(SIZES["test"], image_size=28, patch_size=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def export(model: MaskedAutoencoder, folder: Path, **changes):
    options = {
        "tag": "dp_mae_demo",
        "guarantee": "differential privacy",
        "card_markdown": "# A card\n",
    } | changes
    return export_encoder(model, Location(str(folder)), **options)


def test_timm_gives_equal_features(model: MaskedAutoencoder, tmp_path: Path) -> None:
    """Guarantee 1 of export_encoder."""
    export(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(3, 3, 28, 28)
    assert torch.equal(loaded(images), model.features(images, "last_block"))
    assert torch.equal(loaded.pos_embed, model.encoder.pos_embed)


def test_a_head_can_be_put_on(model: MaskedAutoencoder, tmp_path: Path) -> None:
    export(model, tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=10).eval()
    images = torch.randn(2, 3, 28, 28)
    features = model.features(images, "last_block")
    torch.testing.assert_close(loaded(images), loaded.head(features))


def test_nothing_of_the_architectures_own_configuration_survives(
    model: MaskedAutoencoder, tmp_path: Path
) -> None:
    """Guarantee 2 of export_encoder."""
    export(model, tmp_path, pretrained_cfg={"origin_url": "https://example.org/dp"})
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    found = {key: value for key, value in loaded.pretrained_cfg.items() if value is not None}
    assert tuple(found["mean"]) == IMAGE_MEAN
    assert tuple(found["std"]) == IMAGE_STD
    assert (found["tag"], found["license"]) == ("dp_mae_demo", "apache-2.0")
    assert found["fixed_input_size"] and "test_input_size" not in found
    assert found["origin_url"] == "https://example.org/dp"
    assert "differential privacy" in found["description"]
    assert not {"hf_hub_id", "url", "paper_ids", "paper_name", "notes"} & found.keys()
    transform = create_transform(**resolve_data_config(model=loaded))
    assert transform.transforms[0].size == 28


def test_files_and_digest(model: MaskedAutoencoder, tmp_path: Path) -> None:
    exported = export(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert (tmp_path / "README.md").read_text() == "# A card\n"
    assert export(model, tmp_path / "again").weights_digest == exported.weights_digest
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        assert not any("decoder" in name for name in weights.keys())
    assert exported.num_parameters == sum(t.numel() for t in model.encoder.state_dict().values())


def test_a_folder_under_way_is_not_a_model(model: MaskedAutoencoder, tmp_path: Path, monkeypatch):
    export(model, tmp_path)
    written = Location.write_bytes

    def fail_at_card(self: Location, content: bytes) -> None:
        if self.name == "README.md":
            raise OSError("disk full")
        written(self, content)

    monkeypatch.setattr(Location, "write_bytes", fail_at_card)
    with pytest.raises(OSError, match="disk full"):
        export(model, tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_the_stamp_travels(model: MaskedAutoencoder, tmp_path: Path, guarantee: str) -> None:
    export(model, tmp_path, guarantee=guarantee)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["guarantee"] == guarantee
    assert guarantee in config["pretrained_cfg"]["description"]


@pytest.mark.parametrize("field", ["mean", "input_size", "speed"])
def test_fields_that_are_not_ours_to_give_are_refused(
    model: MaskedAutoencoder, tmp_path: Path, field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        export(model, tmp_path, pretrained_cfg={field: 1})
