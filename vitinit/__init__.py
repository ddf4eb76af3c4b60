"""vitinit: turn a pretrained CNN into a relative-position vision transformer that computes the same function.

Importing it registers vitinit's models with timm, so `timm.create_model("local-dir:FOLDER")` loads an export.
"""

from vitinit import attention_cnn, resnet_cifar  # noqa: F401 (registers their names with timm)
from vitinit.checkpoint import load
from vitinit.convert import convert
from vitinit.distance import distance_from_convolution
from vitinit.errors import VitinitError
from vitinit.fuse import fuse
from vitinit.version import __version__

__all__ = ["VitinitError", "__version__", "convert", "distance_from_convolution", "fuse", "load"]
