"""Recipe char_lm: its texts are what it says, every character is told once, and it learns."""

from __future__ import annotations

import math
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phaseloop.engine.config.compose import compose
from phaseloop.recipes.char_lm import (
    BitsPerCharacter,
    CharCrossEntropy,
    CharGRU,
    CharLanes,
    CharTransformer,
    CharWindows,
    ngram,
    sample,
)
from phaseloop.recipes.char_lm import text as texts
from phaseloop.recipes.char_lm.data import IGNORED
from tests.recipes import rig

TINY = {
    "char_gru": ["data.train.batch_size=8", "data.test.batch_size=8", "train_step.length=32",
                 "model.hidden=16"],
    "char_transformer": ["data.train.batch_size=8", "model.window=32", "model.width=16",
                         "model.feedforward=32", "data.test.dataset.stride=32"],
}  # fmt: skip
"""Enough for what is exact, whatever it learns."""

CHARACTERS = 20_000
"""Of the text for that: a tenth of it is tested."""

BITS = "test/bits_per_character"
CLOSE = 1e-3  # in bits: sums in another order, over two processes and 12 updates


@pytest.fixture(scope="module")
def reference() -> texts.Text:
    return texts.load(texts.PYTHON)


@pytest.fixture(scope="module")
def few(reference: texts.Text, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A word for a text that is soon tested."""
    path = tmp_path_factory.mktemp("text") / "few.txt"
    path.write_text(texts.decode(reference.codes[:CHARACTERS].tolist()), encoding="utf-8")
    return f"data.train.dataset.text={path}"


# --- learning ---

SHORT = {
    # name: updates, and bits per character after so many over seeds 0 to 4: mean and spread
    "char_gru": (60, 3.123, 0.024),
    "char_transformer": (60, 3.174, 0.026),
}


@pytest.mark.parametrize("name", SHORT)
def test_it_learns(tmp_path: Path, reference: texts.Text, name: str) -> None:
    """Better than pairs of characters, by what the short form reached: its mean and 3 spreads."""
    updates, mean, spread = SHORT[name]
    found = rig.final(tmp_path, f"config={name}", f"phases.updates={updates}")[BITS]
    singles, pairs = ngram.bits(reference, longest=2)
    chance = math.log2(texts.SYMBOLS)
    assert found < mean + 3 * spread < pairs < singles < chance
    if name == "char_gru":
        assert found == pytest.approx(bits_in_one_go(tmp_path / "run"), rel=1e-5)


@torch.no_grad()
def bits_in_one_go(run: Path, lanes: int = 32) -> float:
    """Of a GRU that reads each lane of the test part from its first character to its last."""
    data = CharLanes("test", lanes, 10**9)
    x, y = data.fetch(torch.arange(lanes))
    logits, _ = sample.load_model(run).eval()(x)
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / math.log(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "gate"),
    [
        ("char_gru", ["phases.updates=650"], 2.35),
        ("char_gru", [], 2.1),
        ("char_transformer", [], 2.35),
    ],
)
def test_the_figures_of_the_page(tmp_path: Path, name: str, words: list[str], gate: float) -> None:
    assert rig.final(tmp_path, f"config={name}", *words)[BITS] <= gate


# --- as every recipe ---


@pytest.mark.parametrize("name", TINY)
def test_it_resumes_exactly(tmp_path: Path, few: str, name: str) -> None:
    rig.resumes_exactly(
        tmp_path, f"config={name}", *TINY[name], few, "phases.updates=12",
        "hooks.checkpoint.every_updates=5", at=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["char_gru", pytest.param("char_transformer", marks=pytest.mark.slow)]
)
def test_two_processes_tell_as_many_characters_as_well(tmp_path: Path, few: str, name: str) -> None:
    words = [f"config={name}", *TINY[name], few, "phases.updates=12"]
    alone = rig.final(tmp_path / "one", *words)[BITS]
    assert rig.two_processes(tmp_path / "two", *words)[BITS] == pytest.approx(alone, abs=CLOSE)


# --- the texts ---


def test_the_reference_is_cut_at_nine_tenths(reference: texts.Text) -> None:
    assert len(reference.codes) * 9 // 10 == reference.cut
    assert int(reference.codes.min()) >= 0 and int(reference.codes.max()) < texts.SYMBOLS
    # Some quotation marks and dashes; the rest is ASCII.
    assert int((reference.codes == texts.OTHER).sum()) < len(reference.codes) / 500


def test_another_text_is_told_with_both_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydoc_data.topics as module

    monkeypatch.setattr(module, "topics", {"b": "no", "a": "yes"})
    with pytest.warns(UserWarning, match=texts.SHA256[texts.PYTHON]) as told:
        found = texts.load(texts.PYTHON)
    assert found.sha256 in str(told[0].message)
    assert texts.decode(found.codes.tolist()) == "yes\nno"  # in the order of the names


def test_characters_and_numbers() -> None:
    codes = texts.encode(" ~\né")
    assert codes.tolist() == [0, 94, texts.LINE_END, texts.OTHER]
    assert texts.decode(codes.tolist()) == " ~\n\N{REPLACEMENT CHARACTER}"


def test_a_text_that_is_not_there_says_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path / "cache"))
    wanted = r"no folder .*/cache/data/kjv: `make data` fetches it.* package sword-text-kjv"
    with pytest.raises(ValueError, match=wanted):
        texts.load(texts.KJV)
    with pytest.raises(ValueError, match=r"must be python, kjv, or the path .*poems\.txt"):
        CharLanes("train", 2, 4, text="poems.txt")


def packed_bible(folder: Path) -> Path:
    """A Bible of two verses, in a format that has been described to us, not by our own code."""
    verses = [
        '<title type="main">Genesis <w>One</w></title>',
        'In the <w lemma="a">beginning</w><note n="1">or: <i>start</i></note> &amp; end.',
        "¶ And <w>God</w>\n said \\nd Lord",
    ]
    folder.mkdir(parents=True)
    for testament, words in (("ot", verses[:2]), ("nt", verses[2:])):
        block = "".join(words).encode()
        packed = zlib.compress(block)
        sizes = [len(word.encode()) for word in words]
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        entries = [(0, 0, 0), *((0, *place) for place in zip(starts, sizes, strict=True))]
        files = {
            "bzz": b"??" + packed,
            "bzs": struct.pack("<III", 2, len(packed), len(block)),
            "bzv": b"".join(struct.pack("<IIH", *entry) for entry in entries),
        }
        for ending, content in files.items():
            (folder / f"{testament}.{ending}").write_bytes(content)
    return folder


def test_the_bible_is_read_from_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASELOOP_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = packed_bible(tmp_path / "data/kjv")
    with pytest.warns(UserWarning, match=texts.SHA256[texts.KJV]):
        found = texts.load(texts.KJV)
    assert texts.decode(found.codes.tolist()) == "In the beginning & end.\nAnd God said Lord\n"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    block = zlib.decompress(whole["nt.bzz"][2:])
    for name, content in {
        "nt.bzz": b"nothing",
        # One byte more, or less, than the block has; and a verse that reaches past its end.
        "nt.bzs": struct.pack("<III", 2, len(whole["nt.bzz"]) - 2, len(block) + 1),
        "ot.bzs": whole["ot.bzs"][:8] + struct.pack("<I", 5),
        "nt.bzv": struct.pack("<IIH", 0, 1, len(block)),
    }.items():
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"the files {name[:2]}\.\* are damaged"):
            texts.load(texts.KJV)
        (folder / name).write_bytes(whole[name])
    (folder / "ot.bzs").unlink()
    with pytest.raises(ValueError, match=r"lacks a file of the package"):
        texts.load(texts.KJV)


@pytest.mark.parametrize("name", TINY)
def test_another_text_is_the_one_that_is_tested_too(name: str) -> None:
    data = compose([f"config={name}", "data.train.dataset.text=kjv"]).config["data"]
    assert data["train"]["dataset"]["text"] == data["test"]["dataset"]["text"] == texts.KJV


# --- reading them ---


@pytest.mark.parametrize("split", texts.SPLITS)
def test_lanes_go_on_where_they_ended(reference: texts.Text, split: str) -> None:
    lanes, length = 7, 1000
    data = CharLanes(split, lanes, length)
    batches = [data.fetch(torch.arange(k, k + lanes)) for k in range(0, len(data), lanes)]
    x, y = (torch.cat(parts, dim=1) for parts in zip(*batches, strict=True))
    start, end = (1, reference.cut) if split == "train" else (reference.cut, len(reference.codes))
    told = (end - start) // lanes * lanes
    assert torch.equal(y.flatten(), reference.codes[start : start + told])
    assert torch.equal(x.flatten(), reference.codes[start - 1 : start - 1 + told])


def test_lanes_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="set batch_size to 4 and shuffle to false"):
        CharLanes("test", 4, 16).fetch(torch.tensor([3, 4]))


@pytest.mark.parametrize("stride", [16, 64])
def test_every_test_character_counts_once(reference: texts.Text, stride: int) -> None:
    data = CharWindows("test", 64, stride)
    x, y = data.fetch(torch.arange(len(data)))
    counts = y != IGNORED
    assert torch.equal(y[counts], reference.codes[reference.cut :])
    # In each window the target at a place is the input at the next, where it counts.
    following = counts[:, :-1]
    assert torch.equal(x[:, 1:][following], y[:, :-1][following])
    # And a full window tells no character from fewer than length - stride + 1 others.
    assert not counts[:, : 64 - stride].any()


def test_training_windows_stay_in_their_part(reference: texts.Text) -> None:
    data = CharWindows("train", 64, stride=1)
    x, y = data[len(data) - 1]
    assert torch.equal(y, reference.codes[reference.cut - 64 : reference.cut])
    assert torch.equal(x[1:], y[:-1])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: CharLanes("dev", 2, 4), "dev"),
        (lambda: CharLanes("test", 0, 4), "lanes is 0"),
        (lambda: CharWindows("test", 0), "length is 0"),
        (lambda: CharWindows("test", 8, 9), "stride is 9"),
        (lambda: CharWindows("train", 10**7), "length is 10000000"),
        (lambda: CharWindows("test", 10**7), "length is 10000000"),
        (lambda: CharTransformer(width=10, heads=4), "multiple of heads"),
        (lambda: CharGRU(hidden=0), "hidden is 0"),
    ],
)
def test_wrong_arguments_are_named(make, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


# --- measuring ---


def test_bits_per_character_leave_out_what_does_not_count() -> None:
    """Two characters count, told with shares 1/2 and 1/8: (1 + 3) / 2 bits."""
    logits = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], [[0.75, 0.125, 0.125]] * 2]).log()
    target = torch.tensor([[0, IGNORED], [1, IGNORED]])
    meter = BitsPerCharacter()
    for row in range(2):
        meter.update(logits[row : row + 1], target[row : row + 1])
    assert float(meter.compute()) == pytest.approx(2.0)
    assert float(CharCrossEntropy()(logits, target)) == pytest.approx(2.0 * math.log(2))
    assert float(CharCrossEntropy()(logits, torch.full_like(target, IGNORED))) == 0


def test_pairs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``abac`` counted and ``ab`` told, with two symbols more than there are: 97 in all.

    Single: N = 4, T = 3; a has (2 + 3/97) / 7, b has (1 + 3/97) / 7. After c nothing was seen, so a
    stands as it is; after a came b and c once each: N = 2, T = 2, and b has (1 + 2 b) / 4.
    """
    text = texts.Text(texts.encode("abacab"), 4, "")
    a, b = (2 + 3 / 97) / 7, (1 + 3 / 97) / 7
    expected = [-math.log2(a * b) / 2, -math.log2(a * (1 + 2 * b) / 4) / 2]
    assert list(ngram.bits(text, longest=2)) == pytest.approx(expected)


def test_triples_of_the_reference(reference: texts.Text) -> None:
    if reference.sha256 != texts.SHA256[texts.PYTHON]:
        pytest.skip("another text has another figure")
    *_, triples = ngram.bits(reference, longest=3)
    assert triples == pytest.approx(2.47, abs=0.005)


# --- writing on ---


@pytest.mark.parametrize("model", [CharGRU(8), CharTransformer(window=16, width=8, heads=2)])
def test_reading_on_is_reading_at_once(model: CharGRU | CharTransformer) -> None:
    """Also behind a window's end, where the transformer has forgotten what came first."""
    codes = texts.encode("some words to be read on")[None]
    state: Tensor | None = None
    for place in range(codes.shape[1]):
        logits, state = model.read(codes[:, place : place + 1], state)
    seen = codes[:, -getattr(model, "window", 99) :]
    whole = model(seen)
    whole = whole[0] if isinstance(whole, tuple) else whole
    torch.testing.assert_close(logits, whole[:, -1])


def test_the_future_is_not_seen() -> None:
    model = CharTransformer(window=8, width=8, heads=2)
    first, other = torch.arange(8)[None], torch.arange(8)[None].clone()
    other[0, 5:] += 1
    assert torch.equal(model(first)[:, :5], model(other)[:, :5])


def test_a_run_writes_on(tmp_path: Path, few: str, capsys: pytest.CaptureFixture[str]) -> None:
    rig.final(tmp_path, "config=char_gru", *TINY["char_gru"], few, "phases.updates=2")
    words = [str(tmp_path / "run"), "The ", "length=20"]
    assert sample.main([*words, "seed=1"]) == sample.main([*words, "seed=1"]) == 0
    printed = capsys.readouterr().out
    assert printed[:25] == printed[25:] and printed.startswith("The ")  # 4, 20 and a line's end
    model = sample.load_model(tmp_path / "run")
    assert model.gru.hidden_size == 16
    assert sample.write_on(model, "The ", 20, 0.8, seed=1) != sample.write_on(model, "The ", 20)
    assert sample.write_on(model, "a", 9, 0.0, seed=1) == sample.write_on(model, "a", 9, 0.0)
    assert sample.main([*words[:1], "start=seed=1", "length=5"]) == 0
    assert capsys.readouterr().out.startswith("seed=1")
    assert sample.main([str(tmp_path)]) == 2
    assert "is no run's folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "temprature=0.1"], r"temprature: there is no such option.*length, temperature"),
        (["run", "length=2.5"], r"length: '2\.5' is not int"),
        (["run", "temperature=hot"], r"temperature: 'hot' is not float"),
        (["run", "a", "b"], "give a run's folder"),
        (["seed=1"], "give a run's folder"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str, capsys) -> None:
    assert sample.main(words) == 2
    assert re.search(said, capsys.readouterr().err)


def test_wrong_words_of_ngram_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["kvj"], "text is 'kvj', but must be python"), (["a", "b"], "one text")):
        assert ngram.main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [{"length": -1}, {"temperature": -0.5}, {"temperature": math.nan}]
)
def test_what_cannot_be_written_is_named(given: dict[str, float]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"^{name} is {given[name]}"):
        sample.write_on(CharGRU(4), "a", **given)


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for main, said in ((sample.main, "temperature=0.8 "), (ngram.main, "ngram kjv")):
        assert main(["--help"]) == 0
        assert said in capsys.readouterr().out
