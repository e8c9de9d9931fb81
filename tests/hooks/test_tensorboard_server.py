"""A run of digits as TensorBoard shows it: its files, its real server over HTTP, its page."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tensorboard.plugins.hparams.api_pb2 import STATUS_FAILURE, STATUS_SUCCESS, STATUS_UNKNOWN

from tests.rigs import board, cli, events

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
    ended = cli.forked(["config=digits", "hooks.curves=null", *HOOKS, *words], folder)
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
    kept = {"average.decay": 1.0}  # no hook of this run
    assert not kept.keys() & values.keys()
    roots = {name.split(".")[0] for name in values}
    assert not roots & {"run", "hooks", "launch", "imports", "plan", "only", "weights", "debug"}


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
        assert found[tag] == pytest.approx(values), tag
    rest = found.keys() - wanted.keys()
    assert rest == {"save/bytes", "save/stall", "save/seconds", events.SPEED}
    assert all(value > 0 for tag in rest for _, value in found[tag])


@pytest.mark.slow
def test_histograms_over_http(run: Path, served: tuple[board.Board, str]) -> None:
    server, name = served
    tags = server.ask("plugin/histograms/tags")[name]
    assert set(tags) == {f"{kind}/{n}" for kind in ("weights", "gradients") for n in names()}
    for tag in tags:
        wanted = events.everything(run)[tag]
        answer = server.ask("plugin/histograms/histograms", run=name, tag=tag)
        for (_, step, bins), (at, histogram) in zip(answer, wanted, strict=True):
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
