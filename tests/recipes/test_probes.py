"""Recipe probes: what the probes measure, and that nothing about how samples came changes it."""

from __future__ import annotations

import math
import pathlib

import numpy as np
import pytest
import torch
from torch import nn

from phaseloop import ConfigError, Data, Phases, Run, Task, Trainer
from phaseloop.recipes.digits import Digits
from phaseloop.recipes.probes import (
    FewLabel,
    Labelled,
    Linear,
    Neighbours,
    Probe,
    ProbeSet,
    functions,
)
from phaseloop.recipes.probes.__main__ import main
from phaseloop.recipes.probes.functions import _regression, standardised
from phaseloop.train_steps import Extract


def digits(split: str) -> Labelled:
    """The pixels themselves as features."""
    data = Digits(split)
    return Labelled(*data.fetch(torch.arange(len(data))))


def labelled(features: list[list[float]], labels: list[int]) -> Labelled:
    return Labelled(torch.tensor(features), torch.tensor(labels))


# --- the functions ---


@pytest.mark.parametrize("penalty", [0.001, 1.0, 100.0])
def test_the_linear_probe_is_the_logistic_regression_of_scikit_learn(penalty):
    from sklearn.linear_model import LogisticRegression

    bank, queries = digits("train"), digits("test")
    known, asked = (part.numpy() for part in standardised(bank.rows, queries.rows))
    theirs = LogisticRegression(C=1 / penalty, max_iter=5000, tol=1e-9)
    theirs.fit(known, bank.labels.numpy())
    expected = np.mean(theirs.predict(asked) == queries.labels.numpy())
    assert Linear(penalty)(bank, queries) == pytest.approx(expected, abs=1e-9)


def test_a_class_that_is_not_there_changes_nothing():
    bank = labelled([[0.0], [1.0], [3.0], [4.0]], [0, 0, 1, 1])
    gap = Labelled(bank.features, bank.labels * 5)
    asked = torch.tensor([[0.4], [1.9], [2.1], [9.0]], dtype=torch.float64)
    found = _regression(bank.rows, bank.labels, asked, 1.0)
    assert found.tolist() == [0, 0, 1, 1]
    assert torch.equal(_regression(gap.rows, gap.labels, asked, 1.0), found * 5)


def test_a_regression_that_is_not_at_its_minimum_says_so(monkeypatch):
    monkeypatch.setattr(functions, "_MOST_ITERATIONS", 3)
    with pytest.warns(UserWarning, match="penalty 1 is not at its minimum after 3 iterations"):
        Linear()(digits("test"), digits("test"))


def test_features_are_standardised_by_the_bank_and_a_constant_one_is_no_noise():
    bank = torch.tensor([[1.0, 0.1], [3.0, 0.1], [5.0, 0.1]], dtype=torch.float64)
    queries = torch.tensor([[3.0, 0.1 + 1e-12]], dtype=torch.float64)
    known, asked = standardised(bank, queries)
    deviation = math.sqrt(8 / 3)  # of 1, 3, 5 about 3
    torch.testing.assert_close(known[:, 0] * deviation, torch.tensor([-2.0, 0, 2]).double())
    assert known[:, 1].abs().max() < 1e-9 and asked.abs().max() < 1e-9


def test_scale_and_place_of_a_feature_do_not_matter_to_the_linear_probes():
    bank, queries = digits("train"), digits("test")
    scale = torch.logspace(-1, 1, 64)
    for probe in (Linear(), FewLabel()):
        moved = [
            Labelled(part.rows * scale + scale.flip(0), part.labels) for part in (bank, queries)
        ]
        assert probe(*moved) == pytest.approx(probe(bank, queries), abs=1e-9)


def test_few_labels_are_ten_of_each_class_and_others_at_each_draw():
    labels = digits("train").labels
    probe = FewLabel()
    choices = [probe.choice(labels, draw) for draw in range(probe.draws)]
    for choice in choices:
        assert len(choice.unique()) == 100
        assert torch.bincount(labels[choice]).tolist() == [10] * 10
    assert not torch.equal(choices[0], choices[1])
    assert torch.equal(choices[2], FewLabel(seed=2).choice(labels, 0))


def test_the_few_label_probe_is_the_mean_of_regressions_that_saw_nothing_else():
    bank, queries = digits("train"), digits("test")
    probe = FewLabel(draws=2)
    single = [FewLabel(draws=1, seed=seed)(bank, queries) for seed in (0, 1)]
    assert probe(bank, queries) == pytest.approx(sum(single) / 2, abs=1e-12)
    # Wrong labels elsewhere change nothing: they are never looked at.
    wrong = (bank.labels + 1) % 10
    for draw in range(2):
        chosen = probe.choice(bank.labels, draw)
        wrong[chosen] = bank.labels[chosen]

    class Fixed(FewLabel):
        def choice(self, labels, draw):
            return FewLabel.choice(self, bank.labels, draw)

    assert Fixed(draws=2)(Labelled(bank.features, wrong), queries) == probe(bank, queries)


def test_the_nearest_neighbours_vote_by_their_similarity():
    angles = {0: [0.0], 1: [0.5, 0.6]}  # class to the directions of its samples, in radians
    bank = labelled(
        [[math.cos(a), math.sin(a)] for of_class in angles.values() for a in of_class], [0, 1, 1]
    )
    query = labelled([[3.0, 0.3]], [0])  # its length has no part in it
    away = [a - math.atan2(0.3, 3.0) for of_class in angles.values() for a in of_class]

    def winner(temperature):
        first, *others = (math.exp(math.cos(a) / temperature) for a in away)
        return 0 if first > sum(others) else 1

    assert winner(0.07) == 0 and winner(1.0) == 1  # so that the temperature is seen
    assert Neighbours(k=3, temperature=0.07)(bank, query) == 1.0
    assert Neighbours(k=3, temperature=1.0)(bank, query) == 0.0
    assert Neighbours(k=1, temperature=1.0)(bank, query) == 1.0


def test_a_tiny_temperature_does_not_overflow():
    bank = labelled([[1.0, 0], [0, 1.0]], [0, 1])
    assert Neighbours(k=2, temperature=1e-4)(bank, bank) == 1.0


def test_no_probe_moves_a_generator_and_all_work_where_gradients_are_off():
    bank, queries = digits("train"), digits("test")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.no_grad():
        found = [probe(bank, queries) for probe in (Linear(), FewLabel(), Neighbours())]
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())
    assert all(0.85 < accuracy < 1 for accuracy in found)  # chance is 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0), "penalty is 0"),
        (lambda: FewLabel(per_class=0), "per_class is 0"),
        (lambda: FewLabel(draws=-1), "draws is -1"),
        (lambda: Neighbours(k=0), "k is 0"),
        (lambda: Neighbours(temperature=0), "temperature is 0"),
        (lambda: Neighbours(k=9)(digits("train"), labelled([[1.0]], [0])), None),
        (lambda: Neighbours(k=2)(labelled([[1.0]], [0]), labelled([[1.0]], [0])), "1 samples"),
        (lambda: FewLabel()(labelled([[1.0]], [4]), labelled([[1.0]], [0])), "of class 4"),
        (lambda: labelled([[1.0]], [0, 1]), r"must be \[2, D\]"),
        (lambda: labelled([[1.0]], [-1]), "no label below 0"),
        (lambda: Labelled(torch.ones(1, 1), torch.ones(1)), "whole numbers"),
    ],
)
def test_what_does_not_go_is_said(make, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        make()


# --- dataset and meter ---


def filled(probe: Probe, order: torch.Tensor, batch: int) -> Probe:
    data = ProbeSet(Digits("train"), Digits("test"))
    for indices in order.split(batch):
        images, targets = data.fetch(indices)
        probe.update(images.flatten(1), targets)
    return probe


def test_a_probe_set_gives_label_part_and_position_one_by_one_and_at_once():
    train, test = Digits("train"), Digits("test")
    data = ProbeSet(train, test)
    assert len(data) == len(train) + len(test)
    indices = torch.tensor([len(train), 3, len(data) - 1, 0])
    images, targets = data.fetch(indices)
    assert targets[:, 1].tolist() == [1, 0, 1, 0] and targets[:, 2].tolist() == indices.tolist()
    for number, index in enumerate(indices.tolist()):
        image, target = data[index]
        own = train[index] if index < len(train) else test[index - len(train)]
        assert torch.equal(image, images[number]) and torch.equal(target, targets[number])
        assert torch.equal(image, own[0]) and int(target[0]) == own[1]
    only_bank, _ = data.fetch(torch.tensor([2, 1]))
    assert torch.equal(only_bank[0], train[2][0])
    assert not hasattr(ProbeSet(Digits("train", max_shift=1), test), "fetch")


def test_the_meter_gives_what_the_functions_give():
    found = filled(Probe(), torch.arange(1797), 359).compute()
    parts = digits("train"), digits("test")
    assert found == {
        "linear": Linear()(*parts),
        "few_label": FewLabel()(*parts),
        "knn": Neighbours()(*parts),
    }


def test_the_order_of_samples_does_not_matter_to_the_last_bit():
    mixed = torch.randperm(1797, generator=torch.Generator().manual_seed(1))
    probe = Probe(linear={"penalty": 2.0}, knn={"k": 5})
    assert (
        filled(probe, mixed, 100).compute()
        == filled(Probe(linear=Linear(2.0), knn=Neighbours(k=5)), torch.arange(1797), 500).compute()
    )


def test_what_several_processes_have_put_together_is_the_same():
    probe = filled(Probe(linear=None), torch.arange(1797), 359)
    expected = probe.compute()
    probe.features, probe.targets = torch.cat(probe.features), torch.cat(probe.targets)
    probe._computed = None
    assert probe.compute() == expected


def test_of_a_phase_without_samples_nothing_is_known():
    found = Probe().compute()
    assert list(found) == ["linear", "few_label", "knn"]
    assert all(math.isnan(value) for value in found.values())


def test_the_meter_says_what_it_cannot_use():
    with pytest.raises(ConfigError, match="none is left of linear, few_label, knn"):
        Probe(linear=None, few_label=None, knn=None)
    with pytest.raises(ConfigError, match=r"probe\.knn: k is 0"):
        Probe(knn={"k": 0})
    with pytest.raises(ConfigError, match=r"targets are \[4\], but must be \[B, 3\]"):
        Probe().update(torch.ones(4, 2), torch.ones(4).long())
    with pytest.raises(ConfigError, match=r"features are \[3, 2\], but must be \[4, D\]"):
        Probe().update(torch.ones(3, 2), torch.ones(4, 3).long())
    probe = Probe()
    probe.update(torch.ones(1, 2), torch.tensor([[0, 0, 0]]))
    with pytest.raises(ConfigError, match="no sample of the queries"):
        probe.compute()
    probe.update(torch.ones(1, 2), torch.tensor([[0, 1, 1]]))
    with pytest.raises(ConfigError, match=r"probe\.few_label: per_class is 10, and the bank has 1"):
        probe.compute()


@pytest.mark.parametrize(
    ("probes", "key", "message"),
    [
        ({"linear": {"penaltyy": 1}}, "probe.linear.penaltyy", "There are: penalty"),
        ({"linear": 3}, "probe.linear", "neither a mapping of its options"),
        ({"linear": FewLabel()}, "probe.linear", "neither a mapping of its options"),
        ({"linear": {"penalty": math.inf}}, "probe.linear", "penalty is inf"),
        ({"few_label": {"per_class": 2.5}}, "probe.few_label", "per_class is 2.5"),
        ({"few_label": {"draws": 2.5}}, "probe.few_label", "draws is 2.5"),
        ({"few_label": {"seed": -1}}, "probe.few_label", "seed is -1"),
        ({"knn": {"k": "5"}}, "probe.knn", "k is '5'"),
        ({"knn": {"k": True}}, "probe.knn", "k is True"),
        ({"knn": {"temperature": "1"}}, "probe.knn", "temperature is '1'"),
    ],
)
def test_wrong_options_are_named_when_the_meter_is_made(probes, key, message):
    with pytest.raises(ConfigError, match=message) as error:
        Probe(**probes)
    assert error.value.key == key


def test_a_probe_that_is_left_out_is_not_reported():
    found = filled(Probe(linear=None, few_label=None), torch.arange(1797), 359).compute()
    assert list(found) == ["knn"]
    assert Probe(linear=None, few_label=None).higher_is_better == {"knn": True}


# --- the commands ---


def extracted(folder: pathlib.Path, sets: dict[str, Data]) -> None:
    """Pixels of the digits as features, by the step."""
    task = Task(
        model=nn.Flatten(), train_step=Extract(), test=sets, phases=Phases(epochs=0),
        run=Run(dir=str(folder), threads=1),
    )  # fmt: skip
    Trainer(task, hooks={}).train()


def test_the_commands_give_what_the_functions_give(tmp_path, capsys):
    extracted(
        tmp_path,
        {
            "probe": Data(ProbeSet(Digits("train"), Digits("test")), 359),
            "bank": Data(Digits("train"), 359),
            "queries": Data(Digits("test"), 359),
        },
    )
    bank, queries = digits("train"), digits("test")
    folder = tmp_path / "features"
    capsys.readouterr()
    assert main(["all", str(folder / "probe"), "k=5"]) == 0
    of_one = capsys.readouterr().out
    for name, probe in {"linear": Linear(), "few_label": FewLabel(), "knn": Neighbours(5)}.items():
        line = f"{name:<10} {probe(bank, queries):.4f}  of 359 queries, bank of 1,438\n"
        assert line in of_one
        own = ["k=5"] if name == "knn" else []
        assert main([name, str(folder / "bank"), str(folder / "queries"), *own]) == 0
        assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, ""),
        (["nearest", "x"], 2, "wrong arguments: PROBE: 'nearest' is not one of linear, few_label"),
        (["knn"], 2, "FOLDER: give one folder"),
        (["knn", "x", "penalty=1"], 2, "penalty: there is no such option. There are: k, temp"),
        (["knn", "x", "k=many"], 2, "k: 'many' is not int"),
        (["knn", "x", "k=0"], 2, "knn: k is 0"),
        (["knn", "nowhere"], 1, "DataError: nowhere holds no features.json"),
    ],
)
def test_wrong_words_are_named(capsys, words, code, message):
    assert main(words) == code
    assert message in capsys.readouterr().err


def test_one_folder_has_to_be_of_a_probe_set(tmp_path, capsys):
    extracted(tmp_path, {"bank": Data(Digits("test"), 359)})
    assert main(["knn", str(tmp_path / "features/bank")]) == 1
    assert "its targets are [359], and not [N, 3]" in capsys.readouterr().err
