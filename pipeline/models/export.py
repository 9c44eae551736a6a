"""The encoder as a directory that timm and the Hugging Face hub understand."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save
from timm.models import PretrainedCfg

from pipeline.models.mae import IMAGE_MEAN, IMAGE_STD, MaskedAutoencoder
from pipeline.storage import Location

# Any registered plain ViT would do: `model_args` in config.json replace all its dimensions.
_ARCHITECTURE = "vit_base_patch16_224"

GUARANTEES = ("differential privacy", "none needed (public data)", "NOT PRIVATE")


@dataclass(frozen=True, kw_only=True)
class ExportedEncoder:
    """What was written, to be named by a ledger and a statement.

    Args:
        location: The directory.
        weights_digest: SHA-256 (hex) of `model.safetensors`.
        num_parameters: Numbers in it, fixed positions included.
    """

    location: Location
    weights_digest: str
    num_parameters: int


def export_encoder(
    model: MaskedAutoencoder,
    destination: Location,
    *,
    tag: str,
    guarantee: str,
    card_markdown: str,
    pretrained_cfg: Mapping[str, Any] | None = None,
) -> ExportedEncoder:
    """Write `model.safetensors`, `README.md` and, last, `config.json`.

    `timm.create_model("local-dir:DIR", pretrained=True)` then gives the encoder, whose output is
    the "last_block" feature of `MaskedAutoencoder.features`.

    Args:
        model: The trained autoencoder; only its encoder is written, in float32.
        destination: The directory; files in it are replaced.
        tag: Short name of these weights; it replaces the architecture's own tag.
        guarantee: One of `GUARANTEES`, as the training run stamped its weights.
        card_markdown: The model card (`pipeline/report/card.py`).
        pretrained_cfg: More of timm's descriptive fields, such as `description` or `origin_url`.
    Raises:
        ValueError: for a stamp that is not one of `GUARANTEES` (an audit's weights hold canaries
            and are never released), an unknown field, or one that the model itself decides.

    Guarantees:
        1. timm's model gives the features of the trained one (test_timm_gives_equal_features).
        2. No value of the architecture's own pretrained configuration survives
           (test_nothing_of_the_architectures_own_configuration_survives).
        3. Weights with an unknown stamp are refused (test_audit_weights_are_not_exported).
    """
    files = encoder_files(
        model,
        tag=tag,
        guarantee=guarantee,
        card_markdown=card_markdown,
        pretrained_cfg=pretrained_cfg,
    )
    (destination / "config.json").delete()
    for name, content in files.items():
        (destination / name).write_bytes(content)
    return ExportedEncoder(
        location=destination,
        weights_digest=hashlib.sha256(files["model.safetensors"]).hexdigest(),
        num_parameters=sum(tensor.numel() for tensor in model.encoder.state_dict().values()),
    )


def encoder_files(
    model: MaskedAutoencoder,
    *,
    tag: str,
    guarantee: str,
    card_markdown: str,
    pretrained_cfg: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """What `export_encoder` writes, by file name and in its order; equal calls, equal bytes.

    Raises:
        ValueError: as `export_encoder`.
    """
    if guarantee not in GUARANTEES:
        raise ValueError(
            f"guarantee is {guarantee!r}; exported are only weights stamped one of {GUARANTEES}: "
            f"train the model again without an audit"
        )
    config = _config(model, tag, guarantee, dict(pretrained_cfg or {}))
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in model.encoder.state_dict().items()
    }
    # One metadata key only: safetensors writes several in random order, and digests would differ.
    weights = save(tensors, metadata={"format": "pt"})
    return {
        "model.safetensors": weights,
        "README.md": card_markdown.encode(),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _config(
    model: MaskedAutoencoder, tag: str, guarantee: str, descriptive: dict[str, Any]
) -> dict[str, Any]:
    """timm's config.json."""
    size = model.size
    decided: dict[str, Any] = {
        "tag": tag,
        "custom_load": False,
        "input_size": [model.channels, model.image_size, model.image_size],
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
        "mean": list(IMAGE_MEAN),
        "std": list(IMAGE_STD),
        "num_classes": 0,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    known = {field.name for field in dataclasses.fields(PretrainedCfg)}
    for field in descriptive:
        if field not in known or field in decided:
            allowed = sorted(known - decided.keys())
            raise ValueError(
                f"pretrained_cfg has {field!r}, which "
                f"{'the model decides' if field in decided else 'timm does not know'}: allowed are "
                f"{', '.join(allowed)}"
            )
    named = {
        "license": "apache-2.0",
        "description": f"Masked autoencoder encoder, {size.name}; guarantee: {guarantee}",
    }
    return {
        "architecture": _ARCHITECTURE,
        "num_classes": 0,
        "num_features": size.width,
        "global_pool": "avg",
        "model_args": {
            "img_size": model.image_size,
            "patch_size": model.patch_size,
            "in_chans": model.channels,
            "num_classes": 0,
            "global_pool": "avg",
            "fc_norm": False,
            "embed_dim": size.width,
            "depth": size.depth,
            "num_heads": size.num_heads,
            "mlp_ratio": size.mlp_ratio,
            "class_token": True,
        },
        "guarantee": guarantee,
        "pretrained_cfg": {**named, **descriptive, **decided},
    }
