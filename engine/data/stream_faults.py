"""What may be wrong with a stream: it gives nothing, or not what its length says."""

from __future__ import annotations

from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream_plan import StreamPlan
from phaseloop.engine.data.stream_state import Standing, not_plain
from phaseloop.engine.errors import DataError


class Wrong:
    """Faults of one stream, in sentences.

    Args:
        data: the stream and how it is cut.
        key: where it stands in the configuration.
        drop_last: a last batch that is smaller is left out.
    """

    def __init__(self, data: Data, key: str, drop_last: bool) -> None:
        self._kind = type(data.first).__name__
        self._samples = data.stream_length()
        self._batch_size = max(data.sizes.values())
        self._key = key
        self._drop_last = drop_last

    def why_empty(self, gave: bool) -> str:
        """Why there is nothing to train or test on.

        Args:
            gave: an earlier pass gave something.
        """
        if gave:
            return f"{self._key}: the stream gave nothing when it was gone through again"
        if self._drop_last:
            return (
                f"{self._key}: the stream ended before it filled one batch of {self._batch_size}, "
                f"and {self._key}.drop_last leaves out the rest: there is nothing to train on"
            )
        return f"{self._key}: the stream is empty: it gave no sample in its first pass"

    def why_no_stand_in(self, rank: int) -> str:
        """Why a process that has nothing cannot go through the model with the others."""
        return (
            f"{self._key}: rank {rank} has no sample of the stream, and with this backend every "
            f"process has to go through the model as often as the others: give each at least one"
        )

    def check_state(self, standing: Standing) -> None:
        """Refuse at the first window what could not be saved later.

        Raises:
            DataError: the stream's own state holds something else than tensors and plain Python.
        """
        for reader in standing.readers:
            for name, state in reader["stream"].items():
                for found in not_plain(state, f"state_dict() of its {name}: the state"):
                    raise DataError(
                        f"{self._key}.dataset: {self._kind}, {found}, and a checkpoint holds "
                        f"tensors, numbers, strings, and lists and dicts of them"
                    )

    def check_length(self, standing: Standing, plan: StreamPlan, ended: bool) -> None:
        """Compare what a pass gave this process with what the stream's length says, if it has one.

        Args:
            standing: behind the window that is given next.
            plan: how the pass is cut.
            ended: nothing comes after it.

        Raises:
            DataError: it gave more or less.
        """
        if self._samples is None or (standing.windows < plan.own_windows and not ended):
            return
        part = plan.part(self._samples)
        whole = standing.samples == part or plan.drop_last
        if ended and standing.windows == plan.own_windows and whole:
            return
        gave = f"{standing.samples} samples in {standing.windows} batches"
        readers = f" by {plan.readers} workers" if plan.readers > 1 else ""
        rank, of = "", ""
        if plan.world_size > 1:
            rank = f" on rank {plan.rank}"
            of = f", of {self._samples} for all {plan.world_size} processes"
        raise DataError(
            f"{self._key}.dataset: {self._kind} has a length, for {part} samples in "
            f"{plan.own_windows} batches of a pass{readers}{rank}{of}; it gave "
            f"{'' if ended else 'more than '}{gave}. A stream without __len__ may give any number"
        )
