"""`regard.monitor` in training loops that others wrote, and in trackers of experiments.

    trainer = Trainer(..., callbacks=[trainer_callback(every=100)])                      # transformers
    trainer = Trainer(..., callbacks=[lightning_callback(every=100)])                    # Lightning
    regard.monitor(model, every=100, log=tensorboard(writer))                            # a loop of your own
    regard.monitor(model, every=100, log=wandb(run))
    regard.monitor(model, every=100, log=lambda step, scalars: print(step, scalars))

Each is a few lines around `monitor`: copy one where you need another.
"""

from __future__ import annotations

import importlib
from typing import Any

from regard.errors import bad_type
from regard.heads.training.monitor import Log, monitor

__all__ = ["lightning_callback", "tensorboard", "trainer_callback", "wandb"]


def tensorboard(writer: Any) -> Log:
    """Log to a `torch.utils.tensorboard.SummaryWriter`."""
    _check("writer", writer, "add_scalar", "a SummaryWriter")

    def log(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run: Any) -> Log:
    """Log to a run of Weights & Biases, as `wandb.init()` returns it (or the module `wandb` itself)."""
    _check("run", run, "log", "a run, wandb.init()")
    return lambda step, scalars: run.log({**scalars, "attention/step": step})


def trainer_callback(every: int = 100, log: Log | None = None, **options: Any) -> Any:
    """A callback for `transformers.Trainer`. A step is a step of the optimizer, however many batches it accumulates.

    Args:
        every: steps between samples.
        log: called with step and numbers, such as `tensorboard(writer)`. They are in `trainer.state.log_history`, too.
        options: of `regard.monitor`.

    The callback's `monitor` has the samples.
    """
    transformers = _import("transformers", "trainer_callback", "transformers accelerate")

    class AttentionCallback(transformers.TrainerCallback):
        monitor: monitor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **more: Any) -> None:
            def keep(step: int, scalars: dict[str, float]) -> None:
                state.log_history.append({**scalars, "step": state.global_step})
                if log is not None:
                    log(state.global_step, scalars)

            self.monitor = monitor(model, every, keep, count="steps", **options)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if self.monitor is not None:
                self.monitor.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if self.monitor is not None:
                self.monitor.close()

    return AttentionCallback()


def lightning_callback(every: int = 100, **options: Any) -> Any:
    """A callback for `Trainer` of Lightning (`lightning` or `pytorch_lightning`); numbers go to the trainer's loggers.
    A step is a step of the optimizer.

    The callback's `monitor` has the samples.
    """
    pytorch = _import("lightning.pytorch", "lightning_callback", "lightning", other="pytorch_lightning")

    class AttentionCallback(pytorch.Callback):
        monitor: monitor | None = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            def keep(step: int, scalars: dict[str, float]) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(scalars, step=trainer.global_step)

            self.monitor = monitor(module, every, keep, count="steps", **options)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            assert self.monitor is not None
            self.steps_before = trainer.global_step
            self.monitor.begin()  # (a training step may call parts of the module, and not its forward)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            assert self.monitor is not None
            self.monitor.end()
            if trainer.global_step > self.steps_before:
                self.monitor.step()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            assert self.monitor is not None
            self.monitor.close()

    return AttentionCallback()


def _import(name: str, what: str, packages: str, other: str = "") -> Any:
    for module in filter(None, (name, other)):
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise ImportError(f"{what}: expected {name}{f' or {other}' if other else ''}; remedy: pip install {packages}")


def _check(name: str, x: Any, method: str, expected: str) -> None:
    if not callable(getattr(x, method, None)):
        raise bad_type(name, expected=f"{expected}, with a method {method}", received=type(x).__name__)
