"""Options of backend horovod: gradients in 16 bits, messages put together, and all its types."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Gradients, Hook, Task, register_train_step
from phaseloop.engine.backends import Horovod
from phaseloop.engine.backends.reducer import Reducer
from phaseloop.engine.errors import ConfigError
from tests.engine.test_ddp import bare, make, network, seeded, state
from tests.rigs import pairs, ranks
from tests.rigs.pairs import Failed

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGE = 3.0e5
"""More than float16 has; bfloat16 has it."""


def averaged(step: Any, compression: str, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Own and averaged gradients of the first update, in float32."""
    model = nn.Linear(301, 1, bias=False)  # an odd number: parts of other sizes
    rank = pairs.rank()
    own = torch.linspace(-1, 1, 301) * (1 + rank) * scale
    backend = pairs.ddp(compression=compression)
    backend.setup()
    backend.prepare_model(model)
    if step is not bare:
        backend.wrap(model)
    backend.sync_gradients(True)
    (model.weight[0] * own).sum().backward()
    backend.reduce_gradients(list(model.parameters()))
    assert model.weight.grad is not None
    found = model.weight.grad[0].clone()
    backend.teardown()
    return own, found


def types() -> dict[str, Any]:
    """What is added up, sent and gathered of every type, and of odd shapes."""
    backend = pairs.ddp()
    backend.setup()
    rank, found = pairs.rank(), {}
    kinds = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
             torch.bfloat16, torch.float32, torch.float64, torch.complex64]  # fmt: skip
    for kind in kinds:
        tensor = torch.tensor([1 + rank, 3], dtype=kind)
        found[str(kind)] = backend.all_reduce(tensor).tolist()
        equal = [torch.tensor([[5 - rank]], dtype=kind), torch.tensor(7 - rank, dtype=kind)]
        backend.make_equal(equal)
        assert [one.item() for one in equal] == [5, 7], kind
        if not kind.is_complex:
            rows = backend.gather_with_grad(torch.full((rank + 1, 2), rank + 2).to(kind))
            assert rows.tolist() == [[2, 2], [3, 3], [3, 3]], kind
    flags = torch.tensor([rank == 0, False, True])
    assert backend.all_reduce(flags.clone()).tolist() == [True, False, True]
    backend.make_equal([flags])
    assert flags.tolist() == [True, False, True]
    assert backend.all_reduce(torch.ones(())).item() == 2
    assert backend.all_reduce(torch.zeros(0)).tolist() == []
    layout = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert backend.gather_with_grad(layout).shape == (4, 3, 4, 5)
    backend.teardown()
    return found


def in_bfloat16(step: Any) -> dict[str, Tensor]:
    """Parameters of a type that Horovod does not know, laid out in another way than it wants."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    model = seeded(lambda: model).to(torch.bfloat16)
    model.to(memory_format=torch.channels_last)
    backend = pairs.ddp()
    backend.setup()
    backend.prepare_model(model)
    if step is not bare:
        backend.wrap(model)
    backend.sync_gradients(True)
    generator = torch.Generator().manual_seed(pairs.rank())
    x = torch.randn(2, 3, 4, 4, generator=generator).to(torch.bfloat16)
    model(x.to(memory_format=torch.channels_last)).square().mean().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    backend.reduce_gradients(list(model.parameters()))
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(found[n].dtype == torch.bfloat16 for n in own)
    assert all(found[n].stride() == own[n].stride() for n in own)
    backend.teardown()
    return found


def while_backward_runs() -> dict[str, Any]:
    """What there is of gradients at several places of two micro-batches."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for layer in model:
        nn.init.ones_(layer.weight)
    backend = pairs.ddp()
    backend.setup()
    backend.prepare_model(model)
    backend.wrap(model)
    first, last = (layer.weight for layer in model)
    under_way: list[bool] = []

    def look(_: Tensor) -> None:
        handles = backend._reducer._optimizer._handles
        under_way.append(handles.get(last, (None, None))[0] is not None)

    first.register_hook(look)  # the last layer's gradient is there by then
    found: dict[str, Any] = {"under way": under_way}
    for name, on in (("first", False), ("last", True)):
        backend.sync_gradients(on)
        model(torch.full((1, 1), 1.0 + pairs.rank(), dtype=torch.float64)).sum().backward()
        found[name] = [p.grad.item() for p in (first, last)]
    backend.reduce_gradients([first, last])
    found["end"] = [p.grad.item() for p in (first, last)]
    first.grad = last.grad = None
    backend.sync_gradients(True)
    if not pairs.rank():  # the other has no loss that depends on any parameter
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    backend.reduce_gradients([first, last])
    found["one-sided"] = [p.grad.item() for p in (first, last)]
    backend.teardown()
    return found


def clipped(**data: Any) -> dict[str, Tensor]:
    return state(make(network(), gradients=Gradients(clip_norm=0.05), data=data))


def trained(compression: str) -> dict[str, Tensor]:
    options = {} if compression == "none" else {"compression": compression}
    return state(make(network(), backend=options))


CASES: dict[Any, pairs.Case] = {
    **{
        (kind, step): (averaged, {"step": function, "compression": kind})
        for kind in ("none", *HALVES)
        for step, function in (("standard", None), ("bare", bare))
    },
    "large": (averaged, {"step": bare, "compression": "bf16", "scale": LARGE}),
    "types": (types, {}),
    "bfloat16": (in_bfloat16, {"step": None}),
    "bfloat16, bare": (in_bfloat16, {"step": bare}),
    "while backward runs": (while_backward_runs, {}),
    "clipped": (clipped, {}),
    "clipped, windows": (clipped, {"micro_batch_size": 2}),
    **{kind: (trained, {"compression": kind}) for kind in HALVES},
}
_found: dict[Any, list[Any]] = {}


def of_two(name: Any) -> list[Any]:
    if not _found:
        _found.update(zip(CASES, pairs.results(list(CASES.values())), strict=True))
    assert not isinstance(_found[name][0], Failed), _found[name]
    return _found[name]


@pytest.mark.parametrize("step", ["standard", "bare"])
@pytest.mark.parametrize("kind", ["none", *HALVES])
def test_gradients_on_their_way(kind: str, step: str) -> None:
    (own, first), (other, second) = of_two((kind, step))
    assert torch.equal(first, second)
    exact = (own + other) / 2
    if kind == "none":
        assert torch.equal(first, exact)  # halves and sums of two are exact, up to one rounding
        return
    assert not torch.equal(first, exact)  # it was sent in 16 bits
    # Each of the two halves is rounded, and their sum: by half a unit of the last place of the
    # largest of them at most.
    bound = 3 * torch.finfo(HALVES[kind]).eps / 2 * exact.abs().max()
    assert float((first - exact).abs().max()) <= float(bound)


def test_gradients_travel_while_backward_runs_and_once_a_window() -> None:
    first, second = of_two("while backward runs")
    for found, own in ((first, 1.0), (second, 2.0)):
        assert found["under way"][:2] == [False, True]
        assert found["first"] == [own, own]
        assert found["last"] == found["end"] == [2 * (1.0 + 2.0) / 2] * 2
        assert found["one-sided"] == [1.0 / 2] * 2


def test_bfloat16_has_the_range_of_float32() -> None:
    (own, first), (other, second) = of_two("large")
    assert torch.equal(first, second) and first.isfinite().all()
    torch.testing.assert_close(first, (own + other) / 2, rtol=2**-7, atol=0)


@pytest.mark.parametrize("kind", HALVES)
def test_weights_are_equal_on_both_when_gradients_are_compressed(kind: str) -> None:
    first, second = of_two(kind)
    exact = trained("none")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert not torch.equal(value, exact[name])
        # Adam moves each weight by 0.05 at most, in 10 updates, and hardly otherwise than exact
        # gradients would.
        torch.testing.assert_close(value, exact[name], rtol=0, atol=0.05)


def test_every_type_is_added_up_sent_and_gathered() -> None:
    first, second = of_two("types")
    assert first == second
    assert set(map(str, first.values())) == {"[3, 6]", "[3.0, 6.0]", "[(3+0j), (6+0j)]"}


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, bare"])
def test_parameters_in_bfloat16_and_channels_last(name: str) -> None:
    first, second = of_two(name)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(value.abs().sum() > 0 for value in first.values())


@pytest.mark.parametrize("name", ["clipped", "clipped, windows"])
def test_clipping_is_that_of_one_process(name: str) -> None:
    first, second = of_two(name)
    alone = clipped(**CASES[name][1])
    for key, value in alone.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-10)


def two_in_one_process() -> tuple[list[float], str]:
    found = []
    for _ in range(2):
        backend = ranks.ddp()
        backend.setup()
        found.append(backend.all_reduce(torch.ones(())).item())
        backend.teardown()
    backend = ranks.ddp(fusion_mb=3.0)
    try:
        backend.setup()
    except ConfigError as error:
        return found, str(error)
    return found, ""


def test_horovod_is_initialized_once_in_a_process_with_one_fusion() -> None:
    found, said = ranks.agreed(ranks.results(two_in_one_process))
    assert found == [2.0, 2.0]
    assert said.startswith("backend.fusion_mb: Horovod was initialized in this process")


def sparse(compression: str = "none", step: Any = "standard") -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(4, 2))
    rows = torch.randint(5, (8, 2), generator=torch.Generator().manual_seed(0))
    sgd = partial(torch.optim.SGD, lr=0.1)
    task = make(
        model, samples=(rows, rows[:, 0] % 2), optimizer=lambda model: sgd(model.parameters()),
        precision="float32", train_step=step, backend={"compression": compression},
    )  # fmt: skip
    pairs.train(task)


def test_sparse_gradients_are_an_error_by_every_way() -> None:
    # The last has begun to send them when it finds them.
    ways = [{"step": bare}, {"compression": "bf16"}, {"compression": "fp16"}, {}]
    *before, last = pairs.results([(sparse, way) for way in ways])
    for by_rank in before:
        assert all(isinstance(said, Failed) and _is_of_sparse(said) for said in by_rank)
    assert any(_is_of_sparse(said) for said in last)
    # A process that is slower may hear of the other's end first.
    shut_down = "HorovodInternalError: Horovod has been shut down"
    assert all(_is_of_sparse(said) or said.startswith(shut_down) for said in last)


def _is_of_sparse(said: str) -> bool:
    begins = said.startswith("PhaseloopError: a parameter of shape [5, 2] has a sparse grad")
    return begins and "sparse=False" in said


def synced() -> None:
    pairs.train(make(nn.Sequential(network(), nn.SyncBatchNorm(2).double())))


def test_a_batch_norm_that_would_be_each_process_s_own_is_refused() -> None:
    for said in pairs.results([(synced, {})])[0]:
        assert isinstance(said, Failed)
        assert said.startswith("ConfigError: model: 1 is a torch.nn.SyncBatchNorm")
        assert "backend.sync_batch_norm=true" in said


TOKENS = 1e6
"""A weight with which ordinary gradients are far above what float16 has."""


@register_train_step("heavy", whole_model_forward=True)
def heavy(task: Task) -> None:
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), batch.target)
    if task.train:
        task.backward(loss, weight=TOKENS * batch.weight)
        task.update()


def weighted(compression: str = "none", step: str = "heavy") -> dict[str, Tensor]:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    options = {"compression": compression}
    return state(make(network(), train_step=step, backend=options, optimizer=sgd))


def test_large_weights_are_right_or_refused() -> None:
    cases = [{}, {"step": "standard"}, {"compression": "bf16"}, {"compression": "fp16"}]
    exact, unweighted, short, refused = pairs.results([(weighted, case) for case in cases])
    for name, value in exact[0].items():
        torch.testing.assert_close(value, unweighted[0][name], rtol=1e-9, atol=1e-12)
        # Ten updates of 0.1 times gradients of 1 at most, with eight bits each.
        torch.testing.assert_close(short[0][name], value, rtol=0, atol=10 * 0.1 * 2**-8)
        assert torch.equal(short[0][name], short[1][name])
    for said in refused:
        assert isinstance(said, Failed)
        assert said.startswith("ConfigError: backend.compression: is fp16")
        assert "Use bf16" in said


def grown(backwards: int) -> int:
    """Bytes of Python's that so many backwards have left behind."""
    backend = pairs.ddp()
    backend.setup()
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    backend.prepare_model(model)
    backend.wrap(model)

    def run(count: int) -> None:
        for number in range(count):
            backend.sync_gradients(number % 100 == 99)
            model(x).sum().backward()
        gc.collect()

    run(200)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    run(backwards)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    backend.teardown()
    return after - before


def test_memory_stays_flat_over_thousands_of_backwards() -> None:
    """An entry of a dict takes more than eight bytes."""
    backwards = 4000
    ((first, second),) = pairs.results([(grown, {"backwards": backwards})])
    assert max(first, second) < 8 * backwards


class Toggles(Hook):
    """Freezes the last layer or wakes it, at every update, and counts who averages gradients."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step(self, task: Task) -> None:
        self.seen.add(reducers())
        for parameter in task.bare_model[2].parameters():
            parameter.requires_grad_(not parameter.requires_grad)


def reducers() -> int:
    return sum(isinstance(one, Reducer) for one in gc.get_objects())


def toggled() -> tuple[set[int], int]:
    hook = Toggles()
    gc.disable()  # each has to go by itself
    pairs.train(make(network()), toggles=hook)
    return hook.seen, reducers()


def test_nobody_averages_gradients_that_has_been_replaced() -> None:
    ((first, second),) = pairs.results([(toggled, {})])
    assert first == second == ({1}, 0)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"compression": "int8"}, "backend.compression"),
        ({"fusion_mb": -1.0}, "backend.fusion_mb"),
        ({"timeout": 0.0}, "backend.timeout"),
    ],
)
def test_what_is_wrong_with_options_is_said_by_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Horovod("cpu", **options)
    assert caught.value.key == key
