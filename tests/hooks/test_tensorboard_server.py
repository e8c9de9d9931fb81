"""A run of digits as TensorBoard shows it: its files, its real server over HTTP, its page."""

from __future__ import annotations

import io
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS, STATUS_UNKNOWN

from phaseloop import Hook
from phaseloop.hooks.histograms import Histograms
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import board, browser, cli, events, process, r1

HOOKS = ["hooks.histograms={}", "hooks.sample_images={n: 10}", "hooks.gradient_norm={}"]
UPDATES = 23
"""Of an epoch of digits: 1,438 images in batches of 64."""

SESSIONS = {
    "allowedStatuses": [f"STATUS_{s}" for s in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")],
    "colParams": [],
    "startIndex": 0,
    "sliceSize": 100,
    "includeMetrics": True,
}


def train(folder: Path, *words: str) -> Path:
    """Digits in ``folder/runs/digits``; goes on where it was."""
    ended = cli.forked(["config=digits", "hooks.curves=null", "run.log_every=3", *HOOKS, *words], folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "runs" / "digits"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch, and a second one by another command."""
    folder = tmp_path_factory.mktemp("digits")
    train(folder, "phases.epochs=1")
    return train(folder, "phases.epochs=2")


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "event" not in row]


def points(run: Path, name: str, phase: str) -> list[tuple[int, float]]:
    """What the rows of the file have."""
    return [(r["update"], r[name]) for r in rows(run) if r["phase"] == phase and name in r]


def names() -> set[str]:
    """The parameters of the model."""
    from phaseloop.recipes.digits import DigitsCNN

    return {name for name, _ in DigitsCNN().named_parameters()}


def test_the_files_have_all_of_it(run: Path) -> None:
    found = events.everything(run)
    for tag, row, phase in [
        ("train/loss", "loss", "train"), ("lr", "lr", "train"),
        ("gradient_norm", "gradient_norm", "train"), ("epoch/train/loss", "train/loss", "train"),
        ("test/accuracy", "test/accuracy", "test"),
    ]:  # fmt: skip
        wanted = points(run, row, phase)
        assert wanted and [step for step, _ in found[tag]] == [step for step, _ in wanted]
        assert [v for _, v in found[tag]] == pytest.approx([v for _, v in wanted], rel=1e-6)
    scores = [value for _, value in points(run, "test/accuracy", "test")]
    best = [max(scores[: n + 1]) for n in range(len(scores))]
    assert [value for _, value in found["best/test/accuracy"]] == pytest.approx(best)
    for kind in ("weights", "gradients"):
        tags = {t.removeprefix(f"{kind}/") for t in found if t.startswith(f"{kind}/")}
        assert tags == names()
        for name in tags:
            assert [step for step, _ in found[f"{kind}/{name}"]] == [1, UPDATES + 1]
    assert [step for step, _ in found["samples/train"]] == [1]
    assert [step for step, _ in found["samples/test"]] == [UPDATES]


def test_the_configuration_is_a_text_where_it_has_changed(run: Path) -> None:
    texts = events.everything(run)["config"]
    assert [step for step, _ in texts] == [0, UPDATES]
    fences = [re.fullmatch(r"```yaml\n(.*)```", text, re.DOTALL) for _, text in texts]
    configs = [yaml.safe_load(fence[1]) for fence in fences if fence is not None]
    assert [config["phases"]["epochs"] for config in configs] == [1, 2]
    assert configs[1] == yaml.safe_load((run / "resolved.yaml").read_text())


def test_it_is_one_run_among_hyper_parameters(run: Path) -> None:
    values, status = events.hyper_parameters(run)
    assert status == STATUS_SUCCESS
    wanted = {
        "optimizer.lr": 0.1, "optimizer.name": "sgd", "optimizer.nesterov": True,
        "phases.epochs": 2.0, "data.train.batch_size": 64.0, "seed": 0.0,
        "schedule.warmup.fraction": 0.175,
    }  # fmt: skip
    assert {name: values.get(name) for name in wanted} == wanted
    roots = {name.split(".")[0] for name in values}
    shaping = {"phases", "data", "model", "criterion", "optimizer", "schedule", "gradients",
               "precision", "train_step", "freeze", "seed"}  # fmt: skip
    assert roots == shaping
    assert not any(name.endswith(("workers", "prefetch")) for name in values)


@pytest.mark.parametrize(
    ("words", "status"),
    [(["hooks.stopper.signal=15"], STATUS_UNKNOWN), (["hooks.stopper.signal=0"], STATUS_FAILURE)],
    ids=["stopped by a signal", "failed"],
)
def test_how_a_run_ended(tmp_path: Path, words: list[str], status: int) -> None:
    """And once it has gone on, and has ended well, that."""
    (tmp_path / "stopper.py").write_text(
        "import os\n"
        "from phaseloop import Hook, register_hook\n"
        "@register_hook('stopper')\n"
        "class Stopper(Hook):\n"
        "    only_watches = True\n"
        "    def __init__(self, signal: int): self.signal = signal\n"
        "    def on_step(self, task):\n"
        "        if task.progress.updates == 4 and not task.resumed:\n"
        "            if not self.signal: raise ValueError('asked for by the test')\n"
        "            os.kill(os.getpid(), self.signal)\n"
    )
    common = ["config=tiny", "hooks.tensorboard={}", "imports=[tests.rigs.tiny,./stopper.py]",
              "hooks.checkpoint.every_updates=2", "hooks.average.decay=0.5"]  # fmt: skip
    cli.folder(tmp_path)
    assert cli.forked([*common, *words], tmp_path).returncode != 0
    values, found = events.hyper_parameters(tmp_path / "runs/tiny")
    assert found == status
    assert values["hooks.average.decay"] == 0.5  # this hook changes the training
    assert not {name for name in values if name.startswith(("hooks.stopper", "hooks.checkpoint"))}
    ended = cli.forked(common, tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert events.hyper_parameters(tmp_path / "runs/tiny") == (values, STATUS_SUCCESS)


# --- the real server ---


@pytest.fixture(scope="module", params=[True, False], ids=["data server", "Python reader"])
def served(request: pytest.FixtureRequest, run: Path) -> Iterator[tuple[board.Board, str]]:
    """A server over the folder of the run, and what it calls the run."""
    with board.serving(run, fast=request.param) as found:
        wait_for(lambda: found.ask("runs"))
        (name,) = found.ask("runs")
        last = points(run, "test/accuracy", "test")[-1][0]
        ask = {"run": name, "tag": "test/accuracy"}

        def is_read() -> bool:
            tags = found.ask("plugin/scalars/tags").get(name, {})
            if "test/accuracy" not in tags or "save/bytes" not in tags:
                return False
            return bool(found.ask("plugin/scalars/scalars", **ask)[-1][1] == last)

        wait_for(is_read)
        yield found, name


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + board.LIMIT
    while not condition():
        assert time.monotonic() < until, "TensorBoard has not read the run"
        time.sleep(0.2)


@pytest.mark.slow
def test_scalars_over_http(run: Path, served: tuple[board.Board, str]) -> None:
    server, name = served
    found = {
        tag: [
            (step, value)
            for _, step, value in server.ask("plugin/scalars/scalars", run=name, tag=tag)
        ]
        for tag in server.ask("plugin/scalars/tags")[name]
    }
    wanted = {t: v for t, v in events.everything(run).items() if isinstance(v[0][1], float)}
    for tag, values in wanted.items():
        assert found[tag] == values, tag
    rest = found.keys() - wanted.keys()
    assert rest == {"save/bytes", "save/stall", "save/seconds", events.SPEED}
    assert all(value > 0 for tag in rest for _, value in found[tag])


@pytest.mark.slow
def test_histograms_over_http(run: Path, served: tuple[board.Board, str]) -> None:
    server, name = served
    tags = server.ask("plugin/histograms/tags")[name]
    assert set(tags) == {f"{kind}/{n}" for kind in ("weights", "gradients") for n in names()}
    wanted = events.everything(run)
    for tag in tags:
        answer = server.ask("plugin/histograms/histograms", run=name, tag=tag)
        for (_, step, bins), (at, histogram) in zip(answer, wanted[tag], strict=True):
            assert step == at and sum(count for _, _, count in bins) == histogram.num
            ends = [bins[0][0], bins[-1][1]]
            assert ends == pytest.approx([histogram.min, histogram.max], rel=1e-6)


@pytest.mark.slow
def test_images_and_texts_over_http(run: Path, served: tuple[board.Board, str]) -> None:
    server, name = served
    assert set(server.ask("plugin/images/tags")[name]) == {"samples/train", "samples/test"}
    for tag, update in (("samples/train", 1), ("samples/test", UPDATES)):
        (meta,) = server.ask("plugin/images/images", run=name, tag=tag, sample="0")
        assert meta["step"] == update
        png = server.raw(f"plugin/images/individualImage?{meta['query']}")
        # Ten images of 8 by 8 in rows of 8, each pixel 4 by 4, and a pixel between them.
        assert Image.open(io.BytesIO(png)).size == (8 * 33 + 1, 2 * 33 + 1)
    tags = {"config", "samples/train/labels", "samples/test/labels"}
    assert set(server.ask("plugin/text/tags")[name]) == tags
    (labels,) = server.ask("plugin/text/text", run=name, tag="samples/test/labels")
    assert labels["text"].count("<tr>") == 11 and "<th>prediction</th>" in labels["text"]
    texts = server.ask("plugin/text/text", run=name, tag="config")
    assert [text["step"] for text in texts] == [0, UPDATES]
    assert "weight_decay: 0.0005" in texts[0]["text"]


@pytest.mark.slow
def test_hyper_parameters_over_http(run: Path, served: tuple[board.Board, str]) -> None:
    server, name = served
    (group,) = server.ask("plugin/hparams/session_groups", SESSIONS)["sessionGroups"]
    assert group["name"] == name
    (session,) = group["sessions"]
    assert session["status"] == "STATUS_SUCCESS"
    assert group["hparams"]["optimizer.lr"] == 0.1 and group["hparams"]["phases.epochs"] == 2
    metrics = {m["name"]["tag"]: m for m in group["metricValues"]}
    scores = points(run, "test/accuracy", "test")
    final, best = metrics["test/accuracy"], metrics["best/test/accuracy"]
    assert (final["trainingStep"], final["value"]) == pytest.approx(scores[-1])
    assert best["value"] == pytest.approx(max(value for _, value in scores))


class Paint(Hook):
    """A picture and a text at each fifth update."""

    def on_update(self, task: Any) -> None:
        if task.progress.updates % 5 == 4:
            task.record_image("picture", torch.full((1, 2, 2), task.progress.updates / 20))
            task.record_text("text", f"after {task.progress.updates}")


def shown(server: board.Board, run: str) -> dict[str, list[tuple[int, Any]]]:
    """Tag to (update, what is shown), without the times of day, as far as it can be compared."""
    kinds = {
        "scalars": lambda tag: [
            (p[1], p[2]) for p in server.ask("plugin/scalars/scalars", run=run, tag=tag)
        ],
        "histograms": lambda tag: [
            (p[1], p[2]) for p in server.ask("plugin/histograms/histograms", run=run, tag=tag)
        ],
        "images": lambda tag: [
            (i["step"], server.raw(f"plugin/images/individualImage?{i['query']}"))
            for i in server.ask("plugin/images/images", run=run, tag=tag, sample="0")
        ],
        "text": lambda tag: [
            (t["step"], t["text"]) for t in server.ask("plugin/text/text", run=run, tag=tag)
        ],
    }  # fmt: skip
    return {
        tag: values(tag)
        for kind, values in kinds.items()
        for tag in server.ask(f"plugin/{kind}/tags").get(run, ())
        if not tag.startswith(("save/", "speed/"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("fast", [True, False], ids=["data server", "Python reader"])
def test_what_was_killed_and_resumed_is_shown_as_if_nothing_had_happened(
    tmp_path: Path, fast: bool
) -> None:
    """By both readers, which find out in two ways what to forget."""

    def train(folder: Path, at: Any = None) -> int:
        hooks = {"tensorboard": TensorBoard(), "histograms": Histograms(4), "paint": Paint(),
                 **({} if at is None else {"at": at})}  # fmt: skip
        save = {"every_epochs": None, "every_updates": 10}
        return process.run(r1.train, folder, save=save, hooks=hooks, epochs=2, test=True).code

    assert train(tmp_path / "whole") == 0
    assert train(tmp_path / "run", r1.At("on_step", 16)) == -signal.SIGKILL
    assert train(tmp_path / "run", r1.At("on_forward", 10, phase="test")) == -signal.SIGKILL
    assert train(tmp_path / "run") == 0
    with board.serving(tmp_path, fast) as server:

        def is_read() -> bool:
            tags = server.ask("plugin/scalars/tags")
            ask = [{"run": f"{r}/tensorboard", "tag": "test/accuracy"} for r in ("whole", "run")]
            if not all("test/accuracy" in tags.get(one["run"], {}) for one in ask):
                return False
            return all(server.ask("plugin/scalars/scalars", **one)[-1][1] == 20 for one in ask)

        wait_for(is_read)
        whole = shown(server, "whole/tensorboard")
        assert [step for step, _ in whole["picture"]] == [5, 10, 15, 20]
        assert [step for step, _ in whole["weights/0.bias"]] == [1, 4, 8, 11, 12, 16, 20]
        assert shown(server, "run/tensorboard") == whole


# --- its page ---


@pytest.mark.browser
def test_curves_are_drawn(run: Path, tmp_path: Path) -> None:
    losses = [value for _, value in points(run, "loss", "train")]
    assert losses[0] > losses[-1]
    with board.serving(run) as server:
        wait_for(lambda: server.ask("plugin/scalars/tags"))
        place = f"{server.url}?tagFilter=%5Etrain%2Floss&smoothing=0#timeseries"
        with browser.opened(place, width=1500, height=1000) as page:
            chart = "scalar-card line-chart .series-view"
            wait_for(lambda: page.find_elements("css selector", chart))
            wait_for(lambda: len(curve(page.find_element("css selector", chart))) > 100)
            assert page.save_screenshot(str(tmp_path / "tensorboard.png"))
            (drawn,) = page.find_elements("css selector", chart)
            places = curve(drawn)
            said = [e for e in page.get_log("browser") if e["level"] == "SEVERE"]
            assert not said
    # The loss falls: one line from the left above to the right below. Where it begins may be cut
    # off, since TensorBoard takes no heed of outliers where it chooses its scale.
    left, right = min(places), max(places)
    assert right[0] - left[0] > 60 and right[1] - left[1] > 60
    assert {x for x, _ in places} == set(range(left[0], right[0] + 1))


def curve(element: Any) -> list[tuple[int, int]]:
    """Pixels of a chart that have a colour: axes and letters are grey."""
    image = Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")
    pixels = np.asarray(image).astype(int)
    spread = pixels.max(axis=2) - pixels.min(axis=2)
    return [(int(x), int(y)) for y, x in np.argwhere(spread > 20)]
