"""Hook ``gradient_norm``: records the norm of the gradients, of all together and one by one."""

from torch import Tensor

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.shards import norms as norms_of
from phaseloop.engine.task import Task


@register_hook("gradient_norm")
class GradientNorm(Hook):
    """At log points, of the update whose row it is: ``gradient_norm``, as it was before clipping;
    of several optimizers after their names: ``generator/gradient_norm``.

    Between log points it costs a comparison. Where clipping measures the same norm, that is taken.

    Args:
        norm_type: the p of the norm: ``(sum of |g|^p)^(1/p)``; ``.inf``: the largest ``|g|``.
        per_parameter: also ``gradient_norm/NAME`` for each parameter.

    Raises:
        ConfigError: p is not greater than 0.
    """

    only_watches = True

    def __init__(self, norm_type: float = 2.0, per_parameter: bool = False) -> None:
        if not norm_type > 0:
            raise ConfigError("hooks.gradient_norm.norm_type", f"{norm_type} is not greater than 0")
        self.norm_type = norm_type
        self.per_parameter = per_parameter
        self._norms: dict[str, Tensor] = {}

    def on_gradients(self, task: Task) -> None:
        self._norms = {}
        if self._due(task) and task.skip_reason is None and not self._is_measured(task):
            self._norms = self._measure(task)

    def on_update(self, task: Task) -> None:
        # Not before: an update that a later hook skips has no row.
        if self._due(task):
            if self._is_measured(task) and task.gradient_norm is not None:
                self._norms = {"gradient_norm": task.gradient_norm}
            # Optimizers that take turns have gradients, and norms, of their own.
            own = f"{', '.join(task.stepping)}/" if len(task.optimizers) > 1 else ""
            for name, norm in self._norms.items():
                task.record(own + name, norm)
            self._norms = {}

    @staticmethod
    def _due(task: Task) -> bool:
        return (task.progress.updates + 1) % task.recorder.every == 0

    def _is_measured(self, task: Task) -> bool:
        """Clipping by norm measures it anyway, unless values are clipped before that."""
        if len(task.stepping) != 1:
            return False
        settings = task.clipping[task.stepping[0]]
        return (
            settings.clip_norm is not None
            and settings.clip_value is None
            and settings.norm_type == self.norm_type
            and not self.per_parameter
        )

    def _measure(self, task: Task) -> dict[str, Tensor]:
        trained = [p for p in task.trainable if p.grad is not None and p.grad.numel()]
        if not trained:
            return {}
        gradients = [p.grad for p in trained if p.grad is not None]
        each = norms_of(gradients, self.norm_type)
        norms = {"gradient_norm": norms_of([each], self.norm_type)[0]}
        if self.per_parameter:
            names = task.parameter_names()
            norms.update(
                {f"gradient_norm/{names[id(p)]}": n for p, n in zip(trained, each, strict=True)}
            )
        return norms
