"""The attention CNN as a timm model: a source architecture and the attention layers that stand in it.

`timm.create_model("vitinit_attention_cnn", source=..., layers=...)` builds it with random weights; an export
names these arguments in its config.json, so timm rebuilds it from the folder alone.
"""

from __future__ import annotations

import timm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vitinit.convert import replace_convolutions
from vitinit.errors import ConversionError

ARCHITECTURE = "vitinit_attention_cnn"

# What an export does not say itself; its own pretrained_cfg carries the source's normalization and image size.
default_cfgs = generate_default_cfgs(
    {
        ARCHITECTURE: {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "first_conv": None,
            "classifier": None,
        }
    }
)


def build_attention_cnn(
    source: str, layers: dict[str, dict], source_args: dict | None = None, **kwargs: object
) -> nn.Module:
    """A CNN with random weights whose named convolutions are attention layers.

    Args:
        source: timm's name of the CNN.
        layers: Arguments of each `AttentionConv2d` by the name of the convolution that it replaces, see
            `convert.attention_specs`.
        source_args: Arguments of the CNN that an export fixes.
        kwargs: What timm's factory passes on (num_classes, in_chans, drop_path_rate, ...), for the CNN too.

    Raises:
        ConversionError: A layer that the CNN does not have.
    """
    return replace_convolutions(timm.create_model(source, **{**kwargs, **(source_args or {})}), layers)


@register_model
def vitinit_attention_cnn(pretrained: bool = False, **kwargs) -> nn.Module:
    """timm's entry point of `build_attention_cnn`.

    Raises:
        ConversionError: No `source` or no `layers`.
    """
    missing = [f"{key}=" for key in ("source", "layers") if kwargs.get(key) is None]
    if missing:
        raise ConversionError(
            f"{ARCHITECTURE} got no {' and no '.join(missing)}: it is built from source= (timm's name of the CNN) and "
            'layers= (its attention layers); to load an export, call timm.create_model("local-dir:FOLDER", '
            "pretrained=True)"
        )
    features = _read_feature_config(kwargs) if kwargs.get("features_only") else None
    return build_model_with_cfg(build_attention_cnn, ARCHITECTURE, pretrained, feature_cfg=features, **kwargs)


def _read_feature_config(kwargs: dict) -> dict:
    """The feature maps that the CNN gives, read from the whole network: without head some CNNs name layers anew."""
    cnn = timm.create_model(kwargs["source"], features_only=True, **(kwargs.get("source_args") or {}))
    return {"feature_cls": "getter", "out_indices": cnn.feature_info.out_indices}
