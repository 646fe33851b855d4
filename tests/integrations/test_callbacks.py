"""`regard.monitor` in the trainers of others."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from heads import hf_models
from torch import nn

import regard
from regard.integrations import callbacks


class Writer:
    """What a SummaryWriter and a run have."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[dict[str, float]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def log(self, numbers: dict[str, float]) -> None:
        self.logged.append(numbers)


def test_tensorboard_and_weights_and_biases() -> None:
    layer, writer = regard.MultiHeadAttention(12, 3), Writer()
    with regard.monitor(layer, every=1, log=callbacks.tensorboard(writer)) as watching:
        layer(torch.randn(2, 5, 12))
    assert watching.last is not None
    assert writer.scalars == [(name, x, 0) for name, x in watching.last.scalars.items()]
    with regard.monitor(layer, every=1, log=callbacks.wandb(writer)) as watching:
        layer(torch.randn(2, 5, 12))
    assert writer.logged == [{**watching.last.scalars, "attention/step": 0}]  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"writer: expected a SummaryWriter, with a method add_scalar, received int"):
        callbacks.tensorboard(3)
    with pytest.raises(TypeError, match=r"run: expected a run, wandb.init\(\), with a method log, received int"):
        callbacks.wandb(3)


def dataset(size: int) -> list[dict[str, Any]]:
    ids = hf_models.some_ids()[0]
    return [{"input_ids": ids, "labels": ids} for _ in range(size)]


def test_trainer_of_transformers(tmp_path: Any) -> None:
    model = hf_models.model("llama", "sdpa").float()
    writer = Writer()
    callback = callbacks.trainer_callback(every=2, log=callbacks.tensorboard(writer), per="layer")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset(15), callbacks=[callback])
    trainer.train()
    assert [sample.step for sample in callback.monitor.samples] == [0, 2, 4]
    assert sorted({step for *_, step in writer.scalars}) == [0, 2, 4]
    kept = [entry for entry in trainer.state.log_history if "attention/1/entropy" in entry]
    assert [entry["step"] for entry in kept] == [0, 2, 4]
    assert not model._forward_hooks


def test_trainer_with_a_model_without_attention(tmp_path: Any) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 7)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.embed(input_ids).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    callback = callbacks.trainer_callback(every=1)
    trainer = transformers.Trainer(model=Plain(), args=arguments, train_dataset=dataset(8), callbacks=[callback])
    words = (
        "monitor: expected attention in a training step of Plain, received none: the model ran, and .*; remedy: moni"
    )
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert not trainer.model._forward_hooks  # (it was removed)


def test_lightning_with_a_module_without_attention(recwarn: Any) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.linear(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callback = callbacks.lightning_callback(every=1)
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", callbacks=[callback], **quiet)
    words = "monitor: expected attention in a training step of Plain, received none: no module in it that could compute"
    with pytest.raises(ValueError, match=words):
        trainer.fit(Plain(), torch.utils.data.DataLoader(torch.randn(2, 3)))


def test_lightning(tmp_path: Any, recwarn: Any) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.attention = regard.MultiHeadAttention(12, 3)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.attention(batch).square().mean()  # (forward is not called)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = callbacks.lightning_callback(every=2)
    logger = lightning.loggers.CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=2,
        callbacks=[callback],
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([torch.randn(5, 12) for _ in range(12)], batch_size=2))
    assert [sample.step for sample in callback.monitor.samples] == [0, 2]
    assert "attention/0/2/entropy" in logger.experiment.metrics_keys


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="trainer_callback: expected transformers; remedy: pip install transformers"):
        callbacks.trainer_callback()
    with pytest.raises(ImportError, match=r"expected lightning.pytorch or pytorch_lightning; remedy: pip install"):
        callbacks.lightning_callback()
