"""What `watch` returns: a record of every layer, from one forward or from many.

Letters: B batch, N queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Literal

from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.record.filing import Filing
from regard.heads.record.layer_record import LayerRecord
from regard.heads.record.scalars import flat_scalars
from regard.heads.record.signed_weights import refuse_signed
from regard.heads.record.table import Table, table
from regard.measures import rollout

__all__ = ["LayerRecord", "Record"]

DENSE = 2048  # tokens up to which rollout builds dense maps


def _no_model() -> None:
    """In the place of a reference to a model."""


class Record:
    """What `watch` saw. `seen.layers` are the names in call order; `seen[name]`, or by number, is one `LayerRecord`.
    `seen.unseen` names the layers whose attention the watch could not read, each with the reason. `seen.tokens` may be
    set to the tokens as text: pictures are labelled with them.

    In a notebook a record shows itself as a page."""

    shown_by: ClassVar[Callable[[Record], str] | None] = None  # set by `regard.draw`, which imports this file

    def __init__(self, filing: Filing | None = None) -> None:
        self._filing = filing  # while a watch may see more, or what it has seen waits to be filed
        self._by_name: dict[str, LayerRecord] = {} if filing is None else filing.by_name
        self.unseen: dict[str, str] = {}  # layers whose attention could not be read, with the reason
        self.tokens: Any = None  # a list; a list for each item of a batch ("" for padding); or a pair (source, target)
        self.model: Callable[[], Any] = _no_model  # a weak reference; `roles` asks for its tokenizer
        # Layers that read the first of a pair of tokens, where no cross attention tells: those of an image encoder.
        self.source_layers: tuple[str, ...] = ()
        self.image: Any = None  # the picture that `look` showed the model, and where its patches are (`draw.images`)
        self.treebank: Any = None  # a CoNLL-U file, or sentences of one: where it has the text, stories know its syntax
        self.rerun: Any = None  # what `draw.effects` needs to run the model again, if `look` ran it
        self.generated: Any = None  # text that the model generated for `look`, or a list of texts for a batch

    def __getstate__(self) -> dict[str, Any]:
        _ = self.by_name
        # (copies and files know no model, and no watch)
        return self.__dict__ | {"model": _no_model, "rerun": None, "_filing": None}

    @property
    def by_name(self) -> dict[str, LayerRecord]:
        """The layers by their names."""
        filing = self._filing
        if filing is not None:
            filing.file_waiting()
            if filing.over:
                self._filing = None
        return self._by_name

    @by_name.setter
    def by_name(self, layers: dict[str, LayerRecord]) -> None:
        self._by_name = layers

    def _repr_html_(self) -> str | None:
        if Record.shown_by is None or not self.by_name or any(layer.signed for layer in self):
            return None
        return Record.shown_by(self)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order in which they were first called."""
        return list(self.by_name)

    def __getitem__(self, layer: str | int) -> LayerRecord:
        if isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(self.by_name) <= layer < len(self.by_name):
                raise IndexError(f"layer {layer}: there are {len(self.by_name)}")
            return list(self.by_name.values())[layer]
        if isinstance(layer, str):
            if layer.endswith("#0"):
                layer = layer[:-2]
            if layer in self.by_name:
                return self.by_name[layer]
            raise KeyError(f"no layer {layer!r}; there are {', '.join(self.by_name) or 'none'}")
        raise bad_type("layer", expected="a name or a number", received=type(layer).__name__)

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter(self.by_name.values())

    def __contains__(self, layer: object) -> bool:
        """Whether `seen[layer]` is there."""
        if isinstance(layer, LayerRecord):
            return any(layer is other for other in self)
        try:
            return isinstance(self[layer], LayerRecord)  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return False

    def __repr__(self) -> str:
        kinds = [layer.kind for layer in self]
        cross = f", {kinds.count('cross')} of them cross" if "cross" in kinds else ""
        unseen = f"; not seen: {self.unseen_names()}" if self.unseen else ""
        differ = self.texts_differ()
        return f"Record of {len(kinds)} layers{cross}{unseen}" + (f"; {differ}" if differ else "")

    def texts_differ(self) -> str:
        """How layers differ in their number of texts, in words; "" if they do not. Some models fold parts of a text
        into the batch (windows of an image), some run a layer more often than another (an encoder once)."""
        numbers = {
            "texts in a batch": {layer.batch_size for layer in self if layer.text is not None},
            "batches": {layer.texts for layer in self},
        }
        ranges = [f"from {min(n)} to {max(n)} {what}" for what, n in numbers.items() if len(n) > 1]
        return f"layers had {' and '.join(ranges)}" if ranges else ""

    def unseen_names(self, most: int = 5) -> str:
        """The names of at most `most` layers that could not be read, and how many more there are."""
        names = list(self.unseen)
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    def rollout(self) -> Tensor:
        """Attention rollout (Abnar & Zuidema 2020) through the layers of self attention, (B, N, N): how much of each
        input token is in each output token. Needs keep="qk" and a text short enough for dense maps."""
        layers = [layer for layer in self if layer.kind == "self"]
        for layer in layers:
            refuse_signed("rollout", layer.name, layer.signed)
        sizes = {(layer.num_queries, layer.num_keys) for layer in layers if layer.text is not None}
        if len(sizes) != 1 or not all(n == m for n, m in sizes):
            raise bad_value("rollout", expected="self attention of one text in all layers", received=f"sizes {sizes}")
        if len({layer.batch_size for layer in layers if layer.text is not None}) > 1:
            raise bad_value("rollout", expected="the same texts in all layers", received=self.texts_differ())
        n = next(iter(sizes))[0]
        if n > DENSE:
            raise bad_value("rollout", expected=f"at most {DENSE} tokens, for it builds dense maps", received=f"{n}")
        return rollout([layer.weights() for layer in layers])

    def subset(self, layers: Iterable[str]) -> Record:
        """A record of some of the layers, which are shared with this one."""
        part = Record()
        part.by_name = {name: self.by_name[name] for name in layers}
        part.tokens, part.model = self.tokens, self.model
        part.source_layers, part.image = self.source_layers, self.image
        return part

    def drop_values(self) -> None:
        """Free what `weights` and `measure` of the layers do not need: values, outputs, inputs, output projections."""
        for layer in self:
            layer.drop_values()

    # Functions of other files. (Those that import this one are imported when they are called.)

    def table(self) -> Table:
        """A row for each layer and head: every scalar measure, as a mean over queries."""
        return table(self)

    def scalars(self, prefix: str = "attention", per: Literal["head", "layer"] = "head") -> dict[str, float]:
        """Every number of every head by a flat name, such as "attention/3/7/entropy" for layer 3, head 7: means over
        queries; the largest score, if `max_logit` was measured; `sink`, the share of the key that receives most, if
        `received` was. With per="layer" of every layer, "attention/3/entropy"."""
        return flat_scalars(self, prefix, per)

    def roles(self, **options: Any) -> Any:
        """The role of each head, or none. See `heads.analysis.roles`."""
        from regard.heads.analysis.roles import roles

        return roles(self, **options)

    def difference(self, other: Record, **options: Any) -> Any:
        """The heads ranked by how much they change in another record. See `heads.analysis.difference`."""
        from regard.heads.analysis.difference import difference

        return difference(self, other, **options)

    def save(self, path: Any) -> None:
        """Write it to a file. See `heads.record.record_io`."""
        from regard.heads.record.record_io import save

        save(self, path)

    @staticmethod
    def load(path: Any) -> Record:
        """Read a record that was saved."""
        from regard.heads.record.record_io import load

        return load(path)
