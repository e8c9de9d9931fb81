"""Step contrastive: an update is that of the whole batch, however many processes share it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from phaseloop import ConfigError, Data, Draws, Phases, Run, Stage, Task, TensorData, Trainer
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.recipes.ssl import NTXent, VICReg
from phaseloop.train_steps.contrastive import contrastive_train_step
from tests.rigs import pairs

SAMPLES = 22
NOISE = 0.5
LOSSES = {"nt_xent": NTXent, "vicreg": VICReg}
RATES = {"nt_xent": 0.2, "vicreg": 0.005}
# Even shares; uneven ones, and a last batch of one sample, so that the second process has none.
BATCHES = (11, 7)


class Net(nn.Module):
    """[B, 4] to features [B, 8] and projections [B, 3]; without a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, output: str = "projection") -> Tensor:
        features: Tensor = self.backbone(x)
        return features if output == "features" else self.head(features)


class Two(Net):
    """The same, whose output is a tree: two tensors."""

    def forward(self, x: Tensor, output: str = "projection") -> Any:
        found = super().forward(x, output)
        return found if output == "features" else {"a": found, "b": [found * 2]}


class OfTrees(NTXent):
    def forward(self, own: Any, everyone: Any) -> Tensor:
        first, second = ({"x": one["a"] + one["b"][0]} for one in own)
        of_all = everyone._replace(
            first=everyone.first["a"] + everyone.first["b"][0],
            second=everyone.second["a"] + everyone.second["b"][0],
        )
        return super().forward((first["x"], second["x"]), of_all)


def noisy(x: Tensor, draws: Draws) -> Tensor:
    return x + NOISE * draws.normal(*x.shape[1:]).to(x)


def samples() -> TensorData:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return TensorData(x, (x.sum(1) > 0).long())


def task_of(criterion: Any, model: nn.Module | None = None, **options: Any) -> Task:
    torch.manual_seed(3)
    model = model or Net()
    data = {"batch_size": 11, "augment": noisy, "views": 2, **options.pop("data", {})}
    settings: dict[str, Any] = {
        "criterion": criterion,
        "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9),
        "train": Data(options.pop("dataset", samples()), **data),
        "train_step": "contrastive",
        "phases": Phases(epochs=3),
        "precision": "float64",
        "run": Run(threads=1, log_every=1),
    }
    return Task(model=model, **{**settings, **options})


def trained(loss: str, batch_size: int, tree: bool = False) -> dict[str, Tensor]:
    """Parameters at the end, and the loss that was logged last."""
    criterion = OfTrees() if tree else LOSSES[loss]()
    task = task_of(
        criterion,
        Two() if tree else None,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=RATES[loss], momentum=0.9),
        data={"batch_size": batch_size},
        backend=pairs.ddp(),
    )
    before = {name: value.clone() for name, value in task.bare_model.state_dict().items()}
    outcome = pairs.train(task, meter_sync=MeterSync())
    after = dict(task.bare_model.state_dict())
    weights = [name for name in after if name.endswith("weight")]
    assert all((after[name] - before[name]).abs().max() > 0.01 for name in weights)
    return {**after, "loss": torch.tensor(outcome.final["train/loss"], dtype=torch.float64)}


def test_two_processes_make_the_updates_of_one() -> None:
    cases = [
        *((trained, {"loss": loss, "batch_size": size}) for loss in LOSSES for size in BATCHES),
        (trained, {"loss": "nt_xent", "batch_size": 7, "tree": True}),
    ]
    alone = pairs.play(cases)
    for case, one, (first, second) in zip(cases, alone, pairs.results(cases), strict=True):
        assert not isinstance(one, str), one
        for name, value in one.items():
            for found in (first, second):
                assert not isinstance(found, str), found
                torch.testing.assert_close(
                    found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, c=case: f"{c}: {m}"
                )


class Pieces(torch.utils.data.IterableDataset[Any]):
    """The samples of a stream: both views, and no label."""

    def __iter__(self) -> Any:
        for x in samples().tensors[0]:
            yield (x, x + NOISE), 0


def streamed() -> list[tuple[int, int, int]]:
    """What the criterion gets at each update: own rows, all rows, start."""
    seen = []

    def criterion(own: Any, everyone: Any) -> Tensor:
        seen.append((len(own[0]), len(everyone.first), everyone.start))
        return (own[0] - own[1]).square().sum() + 0 * everyone.second.sum()

    data = {"batch_size": 5, "augment": None, "views": 1, "shuffle": False}
    task = task_of(
        criterion, dataset=Pieces(), data=data, backend=pairs.ddp(), phases=Phases(epochs=1)
    )
    pairs.train(task)
    return seen


def messages() -> list[list[str]]:
    """What processes said to one another inside of the step, at each update."""
    backend = pairs.ddp()
    said: list[list[str]] = []

    def noted(name: str) -> Any:
        real = getattr(backend, name)

        def call(*args: Any) -> Any:
            said[-1].append(name)
            return real(*args)

        return call

    def step(task: Task) -> None:
        said.append([])
        names = ("_gather", "all_reduce", "all_gather_object", "total_on_host")
        patches = {name: noted(name) for name in names}
        with mock.patch.multiple(backend, **patches):
            contrastive_train_step(task)

    step.whole_model_forward = step.one_piece = True  # type: ignore[attr-defined]
    pairs.train(task_of(OfTrees(), Two(), train_step=step, backend=backend))
    return said


def test_processes_gather_all_leaves_at_once_and_the_rows_of_a_stream() -> None:
    said, seen = pairs.results([(messages, {}), (streamed, {})])
    # Rows are known from the plan; both leaves of both views go together, and back. In the first
    # update the engine asks whether all give weights.
    assert [one[1:] for one in said] == [[["_gather", "all_reduce"]] * 5] * 2
    # Of a stream each process reads its own samples, in batches of 3 and 2 of 11 each.
    first, second = seen
    assert len(first) == len(second) > 1
    for (own, rows, start), (other, same, behind) in zip(first, second, strict=True):
        assert own + other == rows == same and (start, behind) == (0, own)
    assert first[0][0] == 3 and second[0][0] == 2


class Kept(Metric):
    """How many rows, and the sum of all features times label + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.tensor(0), "sum")
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        self.rows += len(output)
        self.total += (output.sum(dim=1) * (target + 1)).sum()

    def compute(self) -> dict[str, Tensor]:
        return {"rows": self.rows, "total": self.total}


def test_features_go_to_the_meters_of_a_test_and_there_is_no_loss() -> None:
    task = task_of(NTXent(), test=Data(samples(), 8), test_meters={"kept": Kept()})
    final = pairs.train(task, meter_sync=MeterSync()).final
    assert "test/loss" not in final
    images, labels = samples().fetch(torch.arange(SAMPLES))
    with torch.no_grad():
        features = task.bare_model(images.double(), output="features")
    total = float((features.sum(dim=1) * (labels + 1)).sum())
    assert final["test/kept/rows"] == SAMPLES
    assert final["test/kept/total"] == pytest.approx(total, rel=1e-5)


def test_the_views_of_a_dataset_do_as_well() -> None:
    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            x = torch.full((4,), float(index))
            return (x, x + torch.rand(4)), 0

    options = {"data": {"batch_size": 4, "augment": None, "views": 1}}
    assert Trainer(task_of(NTXent(), dataset=Pairs(), **options), hooks={}).train().updates == 9


def classify(task: Task) -> None:
    batch = task.next_batch()
    task.measure(None, task.forward(batch.input), batch.target)


class Keywords(Net):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x, **options)


class Plain(nn.Linear):
    """No argument ``output``."""


@pytest.mark.parametrize(
    "options",
    [
        {"model": Keywords()},
        {
            "model": Plain(4, 2),
            "phases": [
                Stage(name="pretrain", epochs=1, test_sets=[]),
                Stage(name="tested", updates=0, test_at_start=True, train_step=classify),
            ],
        },
    ],
    ids=["any keyword", "another step's tests"],
)
def test_what_it_does_not_need_is_not_asked_for(options: dict[str, Any]) -> None:
    task = task_of(NTXent(), test=Data(samples(), 8), **options)
    assert Trainer(task, hooks={}).train().updates > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"criterion": None}, "criterion: the step contrastive needs one"),
        (
            {"data": {"micro_batch_size": 4}},
            r"data.train.micro_batch_size: it cuts a batch into 3 micro-batches",
        ),
        ({"data": {"views": 1}}, r"data\.train\.views: it is 1, and .*; set it to 2"),
        ({"data": {"views": 3}}, r"data\.train\.views: it is 3, and .*; set it to 2"),
        (
            {"data": {"views": 1, "augment": None}},  # as if the dataset gave pairs
            r"data.train.views: .* the batch's input is one tensor \[11, 4\]; set .*views=2",
        ),
        (
            {"model": nn.Linear(4, 3), "test": Data(samples(), 8)},
            "model: Linear.forward takes no argument 'output'",
        ),
    ],
)
def test_what_it_needs_is_missed_by_name(options: dict[str, Any], problem: str) -> None:
    task = task_of(**{"criterion": NTXent(), **options})
    with pytest.raises(ConfigError, match=problem):
        Trainer(task, hooks={}).train()
