"""Where the readers of a stream stand, as plain Python, and in the form that torchdata takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_LEAVES = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


@dataclass
class Standing:
    """Where a pass through a stream stood when a window had been read, and nothing after it.

    Args:
        epoch: of the pass.
        windows: that had been read.
        samples: in them, over all readers of this process.
        last: number of the reader that the last window came from; the next one is the next one's.
        readers: what each says of itself: see :meth:`Pass.state_dict`.
    """

    epoch: int
    windows: int
    samples: int
    last: int = 0
    readers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reads_again(self) -> int:
        """Samples that have to be read again to come here, by readers that keep no state."""
        return sum(0 if r["stream"] else r["count"] for r in self.readers if not r["over"])


def not_plain(value: Any, path: str) -> Iterator[str]:
    """What in a stream's own state a checkpoint cannot hold, by its place and type."""
    kind = type(value)  # exactly: see check_plain of the checkpoints
    if kind is dict:
        for key, item in value.items():
            yield from not_plain(key, f"a key of {path}")
            yield from not_plain(item, f"{path}[{key!r}]")
    elif kind in (list, tuple, set):
        for number, item in enumerate(value):
            yield from not_plain(item, f"{path}[{number}]")
    elif kind not in _LEAVES:
        yield f"{path} is a {kind.__module__}.{kind.__qualname__}"


# The keys of torchdata 0.11. What it keeps besides is the same in every state of a stream, or
# depends on how far the workers happen to be ahead, which is of no use in a checkpoint.


def taken(state: dict[str, Any], epoch: int, windows: int, samples: int) -> Standing:
    """What ``StatefulDataLoader.state_dict`` says."""
    if "_snapshot" not in state:
        readers, last = [state["fetcher_state"]["dataset_iter_state"]], 0
    else:
        snapshot = state["_snapshot"]
        workers = snapshot["_worker_snapshots"]
        readers = [
            workers[f"worker_{n}"]["fetcher_state"]["dataset_iter_state"]
            for n in range(len(workers))
        ]
        last = snapshot["_last_yielded_worker_id"]
    return Standing(epoch, windows, samples, last, readers)


def given(standing: Standing, workers: int) -> dict[str, Any]:
    """What ``StatefulDataLoader.load_state_dict`` takes."""
    common = {
        "_index_sampler_state": None,
        "_sampler_iter_state": None,
        "_sampler_iter_yielded": standing.windows,
        "_IterableDataset_len_called": None,
        "_shared_seed": None,
    }
    fetchers = [
        {"dataset_iter_state": reader, "fetcher_ended": False} for reader in standing.readers
    ]
    if not workers:
        return {
            **common,
            "_num_yielded": standing.windows,
            "fetcher_state": fetchers[0],
            "dataset_state": None,
            "_iterator_finished": False,
        }
    snapshot = {
        "_snapshot_step": standing.windows,
        "_last_yielded_worker_id": standing.last,
        "_main_snapshot": {**common, "_num_workers": workers, "_base_seed": 0},
        "_worker_snapshots": {
            f"worker_{n}": {"worker_id": n, "fetcher_state": fetcher, "dataset_state": None}
            for n, fetcher in enumerate(fetchers)
        },
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False}
