"""What exists: models, their checkpoints and GPU classes, typed, read from `configs/`.

Owns the facts and their sources. Leaves what a deployment does with them to
`stack`, `checks` and `planner`; imports none of them.
"""

from serving.catalog.errors import CatalogError, ConfigError
from serving.catalog.gpus import GpuClass
from serving.catalog.load import configs_dir, find_gpu, find_model, list_gpus, list_models
from serving.catalog.models import Architecture, Checkpoint, ModelEntry

__all__ = [
    "Architecture",
    "CatalogError",
    "Checkpoint",
    "ConfigError",
    "GpuClass",
    "ModelEntry",
    "configs_dir",
    "find_gpu",
    "find_model",
    "list_gpus",
    "list_models",
]
