"""The engine: the loop and what it stands on; imports no hook, no step, no recipe.

Read the code in this order: trainer, walk, fetching, task, stepping, accumulator, gradients,
optimizers, events, phases, phase_plan, stages, data/plan, data/loader, checkpoint/contents,
checkpoint/store.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not __name__.startswith("phaseloop."):
    raise ImportError("import phaseloop.engine, not engine: a second copy has its own registries")

if TYPE_CHECKING:
    from phaseloop.engine.backends import Backend, Ddp, Fsdp, Horovod, Single, Xla
    from phaseloop.engine.checkpoint.fitting import WeightsReport
    from phaseloop.engine.checkpoint.weights import Weights, load_weights
    from phaseloop.engine.data.augment import Draws
    from phaseloop.engine.data.augmentations import Affine, Erase, Flip, ResizedCrop, Shift
    from phaseloop.engine.data.batch import Batch
    from phaseloop.engine.data.batch_transforms import CutMix, MixUp, MixUpOrCutMix
    from phaseloop.engine.data.colours import Blur, ColourJitter, Greyscale, Noise, Solarize
    from phaseloop.engine.data.mix import Mix, Source
    from phaseloop.engine.data.reader import TensorData
    from phaseloop.engine.data.samplers import Sampler
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        MetricError,
        NoBatchError,
        NonFiniteError,
        PhaseloopError,
        RegistryError,
    )
    from phaseloop.engine.events import Hook, Order
    from phaseloop.engine.features import Features, load_features
    from phaseloop.engine.gathered import Gathered
    from phaseloop.engine.group_rules import GroupRules, LayerDecay, parameter_groups
    from phaseloop.engine.images import image_grid
    from phaseloop.engine.lars import LARS
    from phaseloop.engine.meters import Accuracy, Mean, Meter
    from phaseloop.engine.model_options import Compile, ModelOptions
    from phaseloop.engine.phases import Phase, Phases
    from phaseloop.engine.precision import Precision
    from phaseloop.engine.progress import Progress
    from phaseloop.engine.registry import (
        register_augmentation,
        register_backend,
        register_batch_transform,
        register_collate,
        register_criterion,
        register_dataset,
        register_hook,
        register_meter,
        register_model,
        register_optimizer,
        register_sampler,
        register_schedule,
        register_to_device,
        register_train_step,
    )
    from phaseloop.engine.schedules import ScaleWithBatch, Schedule, TorchSchedule, Warmup
    from phaseloop.engine.settings import Debug, Gradients, LossScale, Run
    from phaseloop.engine.stages import Stage
    from phaseloop.engine.task import Task
    from phaseloop.engine.trainer import Outcome, Trainer

_PLACES = {
    "backends": ["Backend", "Ddp", "Fsdp", "Horovod", "Single", "Xla"],
    "checkpoint.fitting": ["WeightsReport"],
    "checkpoint.weights": ["Weights", "load_weights"],
    "data.augment": ["Draws"],
    "data.augmentations": ["Affine", "Erase", "Flip", "ResizedCrop", "Shift"],
    "data.batch": ["Batch"],
    "data.batch_transforms": ["CutMix", "MixUp", "MixUpOrCutMix"],
    "data.colours": ["Blur", "ColourJitter", "Greyscale", "Noise", "Solarize"],
    "data.mix": ["Mix", "Source"],
    "data.reader": ["TensorData"],
    "data.samplers": ["Sampler"],
    "data.source": ["Data"],
    "errors": [
        "CheckpointError", "ConfigError", "DataError", "MetricError", "NoBatchError",
        "NonFiniteError", "PhaseloopError", "RegistryError",
    ],
    "events": ["Hook", "Order"],
    "features": ["Features", "load_features"],
    "gathered": ["Gathered"],
    "meters": ["Accuracy", "Mean", "Meter"],
    "images": ["image_grid"],
    "lars": ["LARS"],
    "group_rules": ["GroupRules", "LayerDecay", "parameter_groups"],
    "model_options": ["Compile", "ModelOptions"],
    "phases": ["Phase", "Phases"],
    "precision": ["Precision"],
    "progress": ["Progress"],
    "registry": [
        "register_augmentation",
        "register_backend",
        "register_batch_transform",
        "register_collate",
        "register_criterion",
        "register_dataset",
        "register_hook",
        "register_meter",
        "register_model",
        "register_optimizer",
        "register_sampler",
        "register_schedule",
        "register_to_device",
        "register_train_step",
    ],
    "schedules": ["ScaleWithBatch", "Schedule", "TorchSchedule", "Warmup"],
    "settings": ["Debug", "Gradients", "LossScale", "Run"],
    "stages": ["Stage"],
    "task": ["Task"],
    "trainer": ["Outcome", "Trainer"],
}  # fmt: skip

_PLACE = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "LARS",
    "Accuracy",
    "Affine",
    "Backend",
    "Batch",
    "Blur",
    "CheckpointError",
    "ColourJitter",
    "Compile",
    "ConfigError",
    "CutMix",
    "Data",
    "DataError",
    "Ddp",
    "Debug",
    "Draws",
    "Erase",
    "Features",
    "Flip",
    "Fsdp",
    "Gathered",
    "Gradients",
    "Greyscale",
    "GroupRules",
    "Hook",
    "Horovod",
    "LayerDecay",
    "LossScale",
    "Mean",
    "Meter",
    "MetricError",
    "Mix",
    "MixUp",
    "MixUpOrCutMix",
    "ModelOptions",
    "NoBatchError",
    "Noise",
    "NonFiniteError",
    "Order",
    "Outcome",
    "Phase",
    "PhaseloopError",
    "Phases",
    "Precision",
    "Progress",
    "RegistryError",
    "ResizedCrop",
    "Run",
    "Sampler",
    "ScaleWithBatch",
    "Schedule",
    "Shift",
    "Single",
    "Solarize",
    "Source",
    "Stage",
    "Task",
    "TensorData",
    "TorchSchedule",
    "Trainer",
    "Warmup",
    "Weights",
    "WeightsReport",
    "Xla",
    "image_grid",
    "load_features",
    "load_weights",
    "parameter_groups",
    "register_augmentation",
    "register_backend",
    "register_batch_transform",
    "register_collate",
    "register_criterion",
    "register_dataset",
    "register_hook",
    "register_meter",
    "register_model",
    "register_optimizer",
    "register_sampler",
    "register_schedule",
    "register_to_device",
    "register_train_step",
]


def __getattr__(name: str) -> Any:
    if name in _PLACE:
        return getattr(importlib.import_module(f"{__name__}.{_PLACE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
