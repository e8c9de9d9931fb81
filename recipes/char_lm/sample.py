"""Write on: print text that a trained model makes up.

python -m phaseloop.recipes.char_lm.sample runs/char_gru "The " temperature=0.8 seed=1

First a run's folder, then the text to begin with, or none. Options:

    length=400         characters to write
    temperature=0.8    logits are divided by it; 0: always the likeliest character
    seed=0             of the draws
    start=TEXT         the text to begin with, where it looks like an option itself: start="a=1"
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from phaseloop import ConfigError, load_weights

from . import text as texts
from .model import CharGRU, CharTransformer

MODELS: dict[str, type[CharGRU] | type[CharTransformer]] = {
    "char_gru": CharGRU,
    "char_transformer": CharTransformer,
}

_OPTIONS: dict[str, type] = {"length": int, "temperature": float, "seed": int, "start": str}
_OPTION = re.compile(r"(\w+)=(.*)", re.DOTALL)


@torch.no_grad()
def write_on(
    model: CharGRU | CharTransformer,
    start: str,
    length: int = 400,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """``length`` characters that the model goes on with.

    Args:
        model: as it is; it is put in evaluation mode.
        start: what it reads first; nothing stands for the end of a line.
        temperature: logits are divided by it; 0: always the likeliest character.
        seed: of the draws.

    Raises:
        ValueError: length or temperature is below 0, or temperature is not finite.
    """
    if length < 0:
        raise ValueError(f"length is {length}, but must not be below 0")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}, but must be finite and not below 0")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    codes, state, written = texts.encode(start or "\n")[None], None, []
    for _ in range(length):
        logits, state = model.read(codes, state)
        if temperature == 0:
            codes = logits.argmax(dim=1, keepdim=True)
        else:
            shares = torch.softmax(logits / temperature, dim=1)
            codes = torch.multinomial(shares, 1, generator=generator)
        written.append(int(codes))
    return texts.decode(written)


def load_model(run: Path) -> CharGRU | CharTransformer:
    """The model of a run with its newest weights, made as the run's ``resolved.yaml`` says.

    Raises:
        ConfigError: it is no folder of a run of this recipe.
    """
    try:
        options: dict[str, Any] = yaml.safe_load((run / "resolved.yaml").read_text())["model"]
    except OSError as error:
        raise ConfigError("", f"{run} is no run's folder: {error}") from None
    name = options.get("name")
    if name not in MODELS:
        raise ConfigError("model.name", f"{run} is of {name!r}, and not of {', '.join(MODELS)}")
    known = inspect.signature(MODELS[name]).parameters
    model = MODELS[name](**{key: value for key, value in options.items() if key in known})
    load_weights(model, str(run))
    return model


def main(words: list[str]) -> int:
    """Print what a run's model writes; the exit code."""
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        run, options = _read(words)
        start = options.pop("start", "")
        print(start + write_on(load_model(run), start, **options))
    except (ConfigError, ValueError) as error:
        print(f"wrong arguments: {error}", file=sys.stderr)
        return 2
    return 0


def _read(words: list[str]) -> tuple[Path, dict[str, Any]]:
    """A run's folder, and options by their names.

    Raises:
        ConfigError: there is no such option, it has not such a value, or words are left.
    """
    options: dict[str, Any] = {}
    plain: list[str] = []
    for word in words:
        match = _OPTION.fullmatch(word)
        if match is None or (not plain and Path(word).exists()):
            plain.append(word)
        else:
            options[match[1]] = _value(*match.groups())
    if len(plain) == 2 and "start" not in options:
        options["start"] = plain.pop()
    if len(plain) != 1:
        raise ConfigError("", f"give a run's folder, and the text to begin with; got {plain}")
    return Path(plain[0]), options


def _value(name: str, text: str) -> Any:
    if name not in _OPTIONS:
        there = ", ".join(_OPTIONS)
        raise ConfigError(
            name, f'there is no such option. There are: {there}; a text: start="{name}={text}"'
        )
    try:
        return _OPTIONS[name](text)
    except ValueError:
        raise ConfigError(name, f"{text!r} is not {_OPTIONS[name].__name__}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
