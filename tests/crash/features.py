"""What a training of a crash scenario may be made of, and the configuration that says so."""

from __future__ import annotations

from random import Random
from typing import Any

BATCH = 4
SAMPLES = 20
"""Five updates an epoch."""

# What each may be; the first is the plain one.
CHOICES: dict[str, tuple[Any, ...]] = {
    "optimizer": ("sgd", "nesterov", "adam", "adamw", "lars", "groups", "two", "closure"),
    "schedule": ("none", "warmup", "milestones", "torch", "plateau"),
    "precision": ("float32", "bfloat16", "float16", "float64"),
    "pieces": ("whole", "micro 3", "micro 2", "accumulate 2"),
    "workers": (0, 0, 0, 2),
    "data": (
        "plain",
        "mix",
        "balanced",
        "weighted",
        "limit",
        "sizes",
        "ordered",
        "stream",
        "buffered",
    ),
    "augment": (False, True),
    "noise": (False, True),
    "test": ("none", "epochs", "updates", "half", "start", "two sets"),
    "average": ("none", "ema", "swa", "both"),
    "early_stop": ("none", "patient", "strict"),
    "norm": ("none", "norm", "precise"),
    "freeze": ("none", "first", "late", "for good"),
    "stages": ("one", "one", "two", "repeat"),
    "step": ("standard", "state"),
    "clip": (False, True),
    "skip": (False, True),
    "roll_back": (False, False, False, False, False, True),
    "log_every": (1, 3),
    "tensorboard": (False, False, True),
    "clock": (False, False, False, True),
    "background": (True, True, False),
    "keep_every": (False, False, True),
    "every_updates": (2, 1, 3, 5, None),
    "keep_last": (1, 2, 3),
    "keep_best": (0, 1, 2),
    "length": ("epochs", "updates", "part"),
}


STREAMS = {"stream": "crash_stream", "buffered": "crash_buffered"}


def drawn(random: Random, processes: int = 1) -> dict[str, Any]:
    """One of each, of those that can be had together on so many processes."""
    return settled({name: random.choice(values) for name, values in CHOICES.items()}, processes)


def settled(f: dict[str, Any], processes: int = 1) -> dict[str, Any]:
    """The same, without what cannot be had with the rest."""
    f = {**{name: values[0] for name, values in CHOICES.items()}, **f}
    plain = {name: values[0] for name, values in CHOICES.items()}

    def leave_out(*names: str) -> None:
        f.update({name: plain[name] for name in names})

    if f["data"] in STREAMS:  # of unknown length: the whole run has one, and no fraction of it
        leave_out("stages", "roll_back")
        f["schedule"] = "none" if f["schedule"] == "milestones" else f["schedule"]
        f["length"] = "updates"
        f["test"] = "epochs" if f["test"] == "half" else f["test"]
        f["norm"] = "norm" if f["norm"] == "precise" else f["norm"]
    if f["optimizer"] == "closure":  # takes whole batches, has a step of its own, and no scaler
        leave_out("pieces", "step", "skip", "roll_back", "schedule")
        f["precision"] = "float32" if f["precision"] == "float16" else f["precision"]
        f["stages"] = "one" if f["stages"] == "repeat" else f["stages"]
    if f["optimizer"] == "two" and f["freeze"] != "none":
        leave_out("freeze")
    if f["norm"] != "none":  # a micro-batch of one sample has no variance
        f["pieces"] = "whole" if f["pieces"] in ("micro 3", "micro 2") else f["pieces"]
        f["data"] = "plain" if f["data"] in ("sizes", "limit") else f["data"]
        if processes > 1:  # nor has a share of two in two pieces
            leave_out("pieces")
    if f["test"] == "none":
        leave_out("early_stop", "keep_best")
        f["schedule"] = "none" if f["schedule"] == "plateau" else f["schedule"]
    if f["stages"] != "one":
        leave_out("length")
        f["schedule"] = "none" if f["schedule"] == "warmup" else f["schedule"]
        f["freeze"] = "none" if f["freeze"] in ("for good", "first") else f["freeze"]
    if f["roll_back"]:  # it goes back to the newest checkpoint, so there has to be one
        f["every_updates"] = f["every_updates"] or 3
        leave_out("skip", "keep_best")
        f["precision"] = "float32" if f["precision"] == "float16" else f["precision"]
    return f


def config(f: dict[str, Any], seconds: float = 0.0005, processes: int = 1) -> dict[str, Any]:
    """The configuration, as it is written to a file.

    Args:
        f: the features.
        seconds: time that each sample takes to read, so that instants fall into the training.
        processes: that it is trained on.
    """
    made: dict[str, Any] = {
        "imports": ["./crash_probe.py"],
        "run": {"threads": 1, "log_every": f["log_every"], "dir": "run"},
        "phases": _phases(f),
        "data": {"train": _train(f, seconds), **_tests(f)},
        "model": {"name": "crash_model", "norm": f["norm"] != "none"},
        "meters": {"train": {"accuracy": {}}, "test": {"accuracy": {}}},
        "precision": _precision(f["precision"]),
        "gradients": {"clip_norm": 0.5, "clip_value": 0.3} if f["clip"] else {},
        "train_step": "crash_step" if f["step"] == "state" else "standard",
        "hooks": _hooks(f),
        **_optimizer(f),
        **_schedule(f["schedule"]),
    }
    if processes > 1:
        made["backend"] = {"name": "ddp", "processes": processes}
    if f["optimizer"] == "closure":
        made["train_step"] = "closure"
    if f["freeze"] == "for good":
        made["freeze"] = ["first.bias"]
    return made


def _phases(f: dict[str, Any]) -> Any:
    tests: dict[str, Any] = {
        "updates": {"test_every_updates": 3, "test_every_epochs": None},
        "half": {"test_every_epochs": 0.5},
        "start": {"test_at_start": True},
    }.get(f["test"], {})
    if f["stages"] == "two":
        return [
            {"name": "warm", "epochs": 0.6, "freeze": ["last.*"], **tests},
            {"name": "main", "epochs": 1.5, "schedule": {"name": "cosine"}, **tests},
        ]
    if f["stages"] == "repeat":
        return [
            {"name": "up", "updates": 4, "repeat": 2, **tests},
            {"name": "down", "epochs": 1, "train_step": "crash_step", **tests},
        ]
    lengths = {"epochs": {"epochs": 3}, "updates": {"updates": 13}, "part": {"epochs": 2.6}}
    return {**lengths[f["length"]], **tests}


def _train(f: dict[str, Any], seconds: float) -> dict[str, Any]:
    dataset = {"name": "crash_data", "augment": f["augment"], "seconds": seconds}
    dataset["count"] = SAMPLES + 2  # the last batch of an epoch is smaller
    data: dict[str, Any] = {"dataset": dataset, "batch_size": BATCH, "workers": f["workers"]}
    pieces: dict[str, dict[str, int]] = {
        "whole": {},
        "micro 3": {"micro_batch_size": 3},
        "micro 2": {"micro_batch_size": 2},
        "accumulate 2": {"accumulate": 2},
    }
    data.update(pieces[f["pieces"]])
    if f["norm"] != "none" or f["pieces"] == "accumulate 2":
        dataset["count"] = SAMPLES + BATCH
    if f["data"] == "mix":
        small = {**dataset, "count": 9}
        del data["dataset"]
        data["mix"] = {
            "large": {"dataset": dataset, "weight": 2},
            "small": {"dataset": small, "weight": 1},
        }
        data["epoch_samples"] = SAMPLES
    elif f["data"] in ("balanced", "weighted"):
        data["sampler"] = {"name": f["data"]}
    elif f["data"] == "limit":
        data["limit"] = 0.8
    elif f["data"] == "sizes":
        data["batch_size"] = {1: BATCH, 2: 7}
    elif f["data"] in STREAMS:
        dataset["name"] = STREAMS[f["data"]]
        data["shuffle"] = False
    elif f["data"] == "ordered":
        data["shuffle"] = False
    if f["noise"]:
        data["batch_transform"] = {"name": "crash_noise"}
    return data


def _tests(f: dict[str, Any]) -> dict[str, Any]:
    if f["test"] == "none":
        return {}
    dataset = {"name": "crash_data", "count": 6, "augment": f["augment"]}
    one = {"dataset": dataset, "batch_size": BATCH, "workers": f["workers"]}
    if f["test"] == "two sets":
        more = {**one, "dataset": {**dataset, "count": 7}, "batch_size": 3}
        return {"test": {"test": one, "more": more}}
    return {"test": one}


def _precision(name: str) -> Any:
    if name != "float16":
        return name
    # So large a scale that some updates overflow, and it grows again.
    return {"name": name, "loss_scale": {"initial": 2.0**20, "growth_interval": 3}}


def _optimizer(f: dict[str, Any]) -> dict[str, Any]:
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    rules = {"no_decay": ["bias"], "rules": {"head": {"match": "last.*", "lr_scale": 3}}}
    one: dict[str, dict[str, Any]] = {
        "sgd": sgd,
        "nesterov": {**sgd, "nesterov": True, "weight_decay": 0.01},
        "adam": {"name": "adam", "lr": 0.01},
        "adamw": {"name": "adamw", "lr": 0.01, "amsgrad": True},
        "lars": {"name": "lars", "lr": 0.5, "momentum": 0.9},
        "groups": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "groups": rules},
        "closure": {"_target_": "torch.optim.LBFGS", "lr": 0.1, "max_iter": 3, "history_size": 4},
    }
    if f["optimizer"] != "two":
        return {"optimizer": one[f["optimizer"]]}
    first = ["first.*"] if f["norm"] == "none" else ["first.*", "norm.*"]
    adam = {"name": "adam", "lr": 0.01, "parameters": "last.*", "every": 2}
    return {"optimizers": {"body": {**sgd, "parameters": first}, "head": adam}}


def _schedule(name: str) -> dict[str, Any]:
    made: dict[str, dict[str, Any]] = {
        "warmup": {"name": "cosine", "warmup": {"updates": 3, "start": 0.001}},
        "milestones": {"name": "multi_step", "milestones": [0.5, 0.8], "interval": "epoch"},
        "torch": {
            "_target_": "torch.optim.lr_scheduler.StepLR",
            "step_size": 2,
            "interval": "update",
            "frequency": 3,
        },
        "plateau": {
            "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau",
            "metric": "test/loss",
            "patience": 0,
        },
    }
    return {"schedule": made[name]} if name in made else {}


def _hooks(f: dict[str, Any]) -> dict[str, Any]:
    hooks: dict[str, Any] = {
        "curves": None,
        "crash_probe": {"file": "run.probe"},
        "crash_counter": {},
        "checkpoint": {
            "every_updates": f["every_updates"],
            "keep_last": f["keep_last"],
            "background": f["background"],
            **(
                {"keep_every_updates": f["every_updates"]}
                if f["keep_every"] and f["every_updates"]
                else {}
            ),
            **({"keep_best": f["keep_best"], "metric": "test/loss"} if f["keep_best"] else {}),
        },
    }
    if not f["tensorboard"]:
        hooks["tensorboard"] = None
    if f["average"] in ("ema", "both"):
        hooks["ema"] = {"name": "average", "decay": 0.9}
    if f["average"] in ("swa", "both"):
        hooks["swa"] = {"name": "average", "kind": "swa", "start_updates": 4}
        if f["average"] == "both":
            hooks["swa"]["test"] = False
    if f["early_stop"] != "none":
        patience = 50 if f["early_stop"] == "patient" else 1
        hooks["early_stop"] = {"metric": "test/loss", "patience": patience}
    if f["norm"] == "precise":
        hooks["precise_bn"] = {"batches": 3}
    if f["freeze"] == "first":
        hooks["freeze"] = {"patterns": ["first.*"], "first_updates": 4}
    elif f["freeze"] == "late":
        hooks["freeze"] = {"patterns": ["last.bias"], "after_updates": 6}
    if f["skip"]:
        hooks["crash_skip"] = {}
    if f["roll_back"]:
        hooks["non_finite"] = {"policy": "roll_back"}
        hooks["crash_blow_up"] = {"update": 8}
    if f["clock"]:
        hooks["crash_clock"] = {}
    return hooks
