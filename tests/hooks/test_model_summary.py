"""Hook ``model_summary``: the right numbers, and a training that does not notice."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from phaseloop import ConfigError, Data, Phases, Task, TensorData, Trainer
from phaseloop.engine.model_summary import summarize, summarize_task
from phaseloop.hooks.model_summary import ModelSummary
from tests.rigs import r1

FIRST, LAST = 4 * 8, 8 * 2
"""Multiply-adds of R1's two linear layers for one sample."""


class Convolution(nn.Module):
    """A convolution, batch norm, ReLU and a linear layer, with a frozen bias."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Linear(3, 2)
        self.body[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)).softmax(1))


def built(model, dataset=None, **options):
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        train=Data(dataset or TensorData(torch.rand(6, 1, 4, 4), torch.zeros(6).long()), 2),
        phases=Phases(epochs=1),
        **options,
    )
    task.build()
    return task


def test_numbers_of_r1():
    summary = summarize_task(r1_task())
    assert [(row.name, row.kind, row.parameters, row.flops) for row in summary.rows] == [
        ("", "Sequential", 4 * 8 + 8 + 8 * 2 + 2, FIRST + LAST),
        ("0", "Linear", 4 * 8 + 8, FIRST),
        ("1", "ReLU", 0, 0),
        ("2", "Dropout", 0, 0),
        ("3", "Linear", 8 * 2 + 2, LAST),
    ]
    assert summary.total.flops == FIRST + LAST
    assert summary.problem == ""


def r1_task(**options):
    task = r1.make_task(None, **options)
    task.build()
    return task


def test_numbers_of_a_convolution():
    rows = {row.name: row for row in summarize_task(built(Convolution())).rows}
    assert rows["body.0"].flops == 1 * 3 * 3 * 3 * (4 * 4)
    assert (rows["body.0"].parameters, rows["body.0"].trainable) == (3 * 9 + 3, 3 * 9)
    assert rows["head"].flops == 3 * 2
    assert rows[""].parameters == (3 * 9 + 3) + (3 + 3) + (3 * 2 + 2)
    assert rows[""].trainable == rows[""].parameters - 3


def test_depth():
    names = {
        depth: [row.name for row in summarize(Convolution(), torch.rand(1, 1, 4, 4), depth).rows]
        for depth in (0, 1, 2)
    }
    assert names == {
        0: [""],
        1: ["", "body", "head"],
        2: ["", "body", "body.0", "body.1", "body.2", "head"],
    }
    with pytest.raises(ConfigError, match=r"hooks\.model_summary\.depth"):
        ModelSummary(depth=-1)


def test_what_is_not_counted_is_named():
    summary = summarize(Convolution(), torch.rand(1, 1, 4, 4))
    assert summary.uncounted == {"aten::mean": 1, "aten::softmax": 1}
    assert summary.lines()[-1] == "not in the FLOPs  2 operations: aten::mean 1, aten::softmax 1"


def test_shared_parameters_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    summary = summarize(model, torch.rand(1, 4))
    assert [row.parameters for row in summary.rows] == [16, 16, 16]
    assert summary.total.flops == 2 * 16


def test_the_table_is_logged(capsys):
    Trainer(r1.make_task(None, epochs=1), {"model_summary": ModelSummary()}).train()
    assert capsys.readouterr().out.splitlines() == [
        "module  type        parameters  trainable  FLOPs per sample",
        "model   Sequential          58         58                48",
        "  0     Linear              40         40                32",
        "  1     ReLU                 0          0                 0",
        "  2     Dropout              0          0                 0",
        "  3     Linear              18         18                16",
    ]


def test_nothing_is_printed_beside_the_table(capfd, recwarn):
    task = built(Convolution())
    capfd.readouterr()
    summarize_task(task)
    assert tuple(capfd.readouterr()) == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


class Drawing(nn.Module):
    """Draws and counts in every forward pass, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2, momentum=0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.passes += 1
        return self.norm(self.linear(x)) + 0.1 * torch.rand(2) + random.random()


def test_nothing_is_changed():
    model = Drawing()
    model.norm.eval()
    model.linear.register_forward_hook(lambda *_: None)
    task = built(model, r1.Samples(8, augment=True))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    summary = summarize_task(task)
    assert summary.total.flops > 0
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert model.training and not model.norm.training and model.calls == 0
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert torch.is_grad_enabled()


def test_the_training_is_the_same_with_it_and_without():
    ends = []
    for hooks in ({}, {"model_summary": ModelSummary()}):
        torch.manual_seed(0)
        task = r1.make_task(None, augment=True, epochs=2)
        Trainer(task, hooks).train()
        ends.append(task.bare_model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Stubborn(nn.Module):
    """Fails on a batch of one, inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        if len(x) == 1:
            raise ValueError("one sample is not enough\nreally")
        return self.linear(x)


def test_a_model_that_cannot_be_traced(capsys):
    model = Stubborn()
    task = r1.make_task(None, epochs=1, model=model)
    outcome = Trainer(task, {"model_summary": ModelSummary()}).train()
    said = capsys.readouterr().out
    assert "FLOPs not counted  ValueError: one sample is not enough\n" in said
    assert "model     Stubborn          10         10                 -" in said
    assert outcome.updates == 10
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_data_that_cannot_be_read():
    class Broken(r1.Samples):
        def __getitem__(self, index):
            raise OSError("no such file")

    summary = summarize_task(built(nn.Linear(4, 2), Broken()))
    assert summary.problem == "no sample could be read: OSError: no such file"
    assert summary.total.parameters == 4 * 2 + 2


def test_test_data_alone_will_do():
    model = nn.Linear(4, 2)
    task = Task(model=model, test=Data(r1.Samples(3), 2), phases=Phases(epochs=0))
    task.build()
    assert summarize_task(task).total.flops == 4 * 2


def test_double_precision():
    assert summarize_task(r1_task(precision="float64")).total.flops == FIRST + LAST


def test_inputs_by_name():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, data):
            return self.linear(data["a"]) + self.linear(data["b"])

    class Named(r1.Samples):
        def __getitem__(self, index):
            return {"a": self.x[index], "b": self.x[index]}

    assert summarize_task(built(Pair(), Named())).total.flops == 2 * 4 * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_with_kept_results():
    model = torch.nn.utils.weight_norm(nn.Linear(4, 2))
    assert summarize(model, torch.rand(1, 4)).problem == ""


def test_ranks_but_the_primary_are_silent(capsys, monkeypatch):
    task = r1.make_task(None, epochs=1)
    monkeypatch.setattr(type(task), "primary", property(lambda self: False))
    Trainer(task, {"model_summary": ModelSummary()}).train()
    assert capsys.readouterr().out == ""
