"""Copies made inside a watch, watches that end out of order, and other threads."""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle import Oracle, agree, close, wanted
from heads.oracle_hands import B, Hand, N, W, by_operator, dense, drawn, made, noise
from torch import Tensor, nn

import regard
from regard.heads.capture import huggingface


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"regard.heads" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
}
LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "watch": regard.watch,
    "ablate": lambda model: regard.ablate(model, {0: [0]}),
    "both": lambda model: _Both(model),
}


class _Both:
    """A watch around another one."""

    def __init__(self, model: nn.Module) -> None:
        self.looks = regard.watch(model), regard.watch(model)

    def __enter__(self) -> None:
        for look in self.looks:
            look.__enter__()

    def __exit__(self, *error: Any) -> None:
        for look in reversed(self.looks):
            look.__exit__(*error)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_runs_plainly(how: str, look: str) -> None:
    model, x = hf_models.model("bert"), hf_models.inputs("bert")
    mine: list[int] = []
    model.encoder.register_forward_hook(_Count(mine))
    with torch.no_grad():
        right = model(**x)[0]
        with LOOKS[look](model):
            model(**x)
            twin = COPIES[how](model)
            before = len(mine)
            if how != "copy":  # (the parts of a shallow copy are those of the model)
                close(twin(**x)[0], right, "inside")
        close(twin(**x)[0], right, "after")
        close(model(**x)[0], right, "the model")
    assert len(mine) > before
    assert not any(hook for m in twin.modules() for hook in m._forward_pre_hooks.values())
    assert sum(len(m._forward_hooks) for m in twin.modules()) == 1  # the user's own travels
    for module in (*model.modules(), *twin.modules()):
        assert "__getstate__" not in vars(module)
        assert not module._forward_hooks_with_kwargs
        assert not module._forward_pre_hooks_with_kwargs
        assert not module._forward_hooks_always_called


class _Count:
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def __call__(self, *_: Any) -> None:
        self.calls.append(1)

    def __deepcopy__(self, memo: Any) -> _Count:
        return self


def test_a_copy_of_a_module_with_a_state_of_its_own() -> None:
    model, x = Stateful(), noise(B, N, W)
    with torch.no_grad(), regard.watch(model):
        right = model(x)
        twin = copy.deepcopy(model)
    assert twin.scratch is None
    assert model.scratch == "mine"
    with torch.no_grad():
        close(twin(x), right, "twin")
    assert "__getstate__" not in vars(twin)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scratch = drawn(Hand(by_operator)), "mine"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "scratch": None}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_copy_of_a_module_that_copies_itself() -> None:
    """torch.fx's modules copy their whole dictionary, hooks and all."""
    model, x = torch.fx.symbolic_trace(Summed()), noise(B, N, W)
    with torch.no_grad(), regard.watch(model):
        right = model(x)
        twin = copy.deepcopy(model)
        close(twin(x), right, "inside")
    with torch.no_grad():
        close(twin(x), right, "after")


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(W, W).double()

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        return (q @ q.mT).softmax(-1) @ q


# Ends out of order


def test_two_watches_that_end_out_of_order() -> None:
    model, x, y = made(Hand(by_operator)), noise(B, N, W), noise(B, N, W, seed=8)
    first, second = regard.watch(model, measures=wanted()), regard.watch(model, measures=wanted())
    with torch.no_grad():
        one = first.__enter__()
        two = second.__enter__()
        model(x)
        first.__exit__(None, None, None)
        model(y)
        second.__exit__(None, None, None)
        model(x)
    agree(one["layer"], Oracle(dense(model, x)))
    assert two["layer"].texts == 2
    assert not torch.overrides._get_current_function_mode_stack()


def test_two_watches_in_two_tasks() -> None:
    models = made(Hand(by_operator)), made(Hand(by_operator))
    x, y = noise(B, N, W), noise(B, N, W, seed=8)

    async def look(model: nn.Module, inputs: list[Tensor]) -> Any:
        with regard.watch(model, measures=wanted()) as seen:
            for given in inputs:
                await asyncio.sleep(0)
                model(given)
        return seen

    async def main() -> list[Any]:
        return await asyncio.gather(look(models[0], [x]), look(models[1], [x, y, y]))

    def in_a_thread() -> list[Any]:  # (this one may have an event loop of somebody else's)
        with torch.no_grad():
            found = asyncio.run(main())
        assert not torch.overrides._get_current_function_mode_stack()
        return found

    with ThreadPoolExecutor(1) as pool:
        short, long = pool.submit(in_a_thread).result()
    assert (short["layer"].texts, long["layer"].texts) == (1, 3)


def test_other_modes_stay_when_a_watch_ends_before_them() -> None:
    model, device = made(Hand(by_operator)), torch.device("meta")
    watching = regard.watch(model)
    with torch.no_grad():
        watching.__enter__()
        model(noise(B, N, W))
        with device:
            watching.__exit__(None, None, None)
            assert torch.empty(3).device.type == "meta"
    assert torch.empty(3).device.type == "cpu"


def test_a_watch_that_ends_in_another_thread_ends() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    watching = regard.watch(model)
    try:
        with torch.no_grad():
            seen = watching.__enter__()
            model(x)
            thread = threading.Thread(target=watching.__exit__, args=(None, None, None))
            thread.start()
            thread.join()
            model(x)
        assert seen["layer"].texts == 1
    finally:
        for mode in torch.overrides._get_current_function_mode_stack():
            mode.__exit__(None, None, None)


# Other threads


class Threaded(nn.Module):
    """Runs its second layer in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.plain = drawn(Hand(by_operator)), drawn(Hand(by_operator)), nn.Linear(W, W).double()

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []

        def run() -> None:
            with torch.no_grad():
                found.append(self.plain(self.two(x)))

        thread = threading.Thread(target=run)
        y = self.one(x)
        thread.start()
        thread.join()
        return y + found[0]


def test_a_part_that_ran_in_another_thread_is_named() -> None:
    model, x = Threaded(), noise(B, N, W)
    with torch.no_grad():
        right = model(x)
        with regard.watch(model, measures=wanted()) as seen:
            close(model(x), right, "output")
    assert seen.layers == ["one"]
    assert seen.unseen == {"two": "it ran in another thread, and a watch sees the thread that began it"}


def test_a_forward_of_somebody_else_is_not_named() -> None:
    """Each thread watches its own call of one model."""
    model, x, records = made(Hand(by_operator)), noise(B, N, W), []

    def look() -> None:
        with torch.no_grad(), regard.watch(model) as seen:
            model(x)
        records.append(seen)

    with torch.no_grad(), regard.watch(model) as seen:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        model(x)
    for record in (seen, *records):
        assert record.layers == ["layer"]
        assert record.unseen == {}
        assert record["layer"].texts == 1


def test_observers_of_transformers_may_start_and_stop_in_many_threads(monkeypatch: Any) -> None:
    """The interface is replaced by the first, and put back by the last one, whatever the order."""

    class Slow(list[Any]):
        def __len__(self) -> int:  # time for other threads between the question and what follows from it
            length = super().__len__()
            time.sleep(0.001)
            return length

    hf_models.model("llama")  # so that transformers is imported
    interface = huggingface._interface()
    original = interface.get_interface
    monkeypatch.setattr(huggingface, "_ORIGINAL", Slow())
    barrier = threading.Barrier(8)

    def start_and_stop() -> None:
        barrier.wait()
        for _ in range(10):
            observer: Any = object()
            huggingface.start(observer)
            assert interface.get_interface is not original
            huggingface.stop(observer)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(start_and_stop) for _ in range(8)]:
            future.result()
    assert interface.get_interface is original
    assert huggingface.observers() == []
    assert huggingface._ORIGINAL == []


def test_observers_are_called_from_a_copy_of_their_list() -> None:
    """One ends while another is asked: nobody is left out."""

    class Ends:
        changes = False

        def owns(self, module: nn.Module) -> bool:
            huggingface.stop(self)
            return False

    asked: list[str] = []

    class Stays(Ends):
        def owns(self, module: nn.Module) -> bool:
            asked.append("stays")
            return False

    model, x = hf_models.model("llama"), noise(1, N, 42)
    turned = model.model.rotary_emb(x, torch.arange(N)[None])
    first, second = Ends(), Stays()
    for observer in (first, second):
        huggingface.start(observer)  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            model.model.layers[0](x, position_embeddings=turned)
    finally:
        huggingface.stop(second)  # type: ignore[arg-type]
    assert asked == ["stays"]
