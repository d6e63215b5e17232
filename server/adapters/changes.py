"""From an adapter's tensors to what it changes of the layers of one rank.

A layer whose outputs are divided takes its rows of the second matrix (B), one whose inputs are divided its columns of
the first (A); nothing more is exchanged between ranks. What is added to a sum over the ranks is added by one of them.
DoRA (Liu et al. 2024, arXiv 2402.09353) scales each row of the changed weight to a length; that of row B A + W is found
once here, over all inputs, in float32, and is a gain afterwards, which rows of B are multiplied by too.

A weight that was trained whole takes the base's place: the gain is 0, and the new rows are a part whose first matrix is
x itself; of few rows, they are the first matrix, and the second puts each product in its place. Rows that are the
base's, number for number, change nothing, and PEFT stores whole tables of them.

Shapes: r rank, D inputs, F outputs, n outputs of this rank, V tokens, Vl tokens of this rank, E features of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from server.adapters.config import MERGE_BY_PEFT, AdapterError, OnlyMerged
from server.adapters.files import BAD_FILE, AdapterFiles, Module, runs
from server.adapters.names import experts_of, plain_name
from server.backends.device import HOST
from server.backends.protocol import EmbeddingChange, LinearChange, LowRank, NormChange
from server.checkpoint.formats.protocol import Ranges
from server.checkpoint.weights import Piece

CHUNK = 4096  # rows of a table that are looked at together
SHARED = "shared"  # the table of an encoder-decoder: transformers' stacks read it past whatever is put around it
HALVES = {"expert_gate": 0, "expert_up": 1}  # of the rows of a parameter of both, by role
# What transformers calls the parameter of all experts, by role, the one first that a module has last. Experts that have
# no gate have only the first and last of these.
PARAMETERS = {"expert_down": "down_proj", "expert_gate_up": "gate_up_proj", "expert_up": "up_proj"}

Read = Callable[[Ranges], Tensor]  # rows of a whole layer, with all inputs


@dataclass(frozen=True)
class LowRankUpdate:
    """scale * up @ down, added to a whole layer's weight."""

    down: Tensor  # [r, D]
    up: Tensor  # [F, r]
    scale: float
    magnitude: Tensor | None = None  # [F], of DoRA
    up_bias: Tensor | None = None  # [F]


@dataclass
class Linear:
    """What has been found so far for one layer."""

    num_outputs: int
    parts: list[LowRank] = field(default_factory=list)
    gain: Tensor | None = None
    bias: Tensor | None = None

    def multiply(self, first: int, by: Tensor) -> None:
        """Outputs from `first` on, by numbers [n], with what has been put in place of some."""
        if self.gain is None:
            self.gain = torch.ones(self.num_outputs)
        self.gain[first : first + len(by)] *= by
        for place, part in enumerate(self.parts):
            if first <= part.first < first + len(by):
                own = by[part.first - first :][: len(part.up)].unsqueeze(1)
                self.parts[place] = replace(part, up=(part.up.float() * own).to(part.up.dtype))

    def add(self, first: int, what: Tensor) -> None:
        """To outputs from `first` on, numbers [n]."""
        if self.bias is None:
            self.bias = torch.zeros(self.num_outputs)
        self.bias[first : first + len(what)] += what

    @property
    def change(self) -> LinearChange | None:
        """None: there is none."""
        if not self.parts and self.gain is None and self.bias is None:
            return None
        return LinearChange(tuple(self.parts), self.bias, self.gain)


class Changes:
    """One adapter's changes of a rank's layers. Raises AdapterError for what fits no layer.

    dtype: the model's; budget: bytes that its changes may take. After all layers were asked for, `refuse_leftovers`
    tells of tensors that none has taken.
    """

    def __init__(self, files: AdapterFiles, dtype: torch.dtype, budget: float = math.inf) -> None:
        self._files = files
        self._config = files.config
        self._dtype = dtype
        self._budget, self._left = budget, budget
        self._taken: set[str] = set()
        self._asked: dict[str, None] = {}  # plain names of layers
        self._levels_of: dict[str, dict[str, dict[str, str]]] = {}  # by module of experts

    def spend(self, nbytes: int) -> None:
        """Take them from the budget. Raises AdapterError where it has less."""
        self._require(nbytes)
        self._left -= nbytes

    def _require(self, nbytes: int) -> None:
        """Raise AdapterError where the budget has less, before that is computed which takes so much."""
        if nbytes > self._left:
            raise AdapterError(
                f"it takes more than {self._budget / 1e9:.3g} GB of a device, which is --adapter-memory: raise "
                "--adapter-memory, or give it a lower rank"
            )

    def linear(
        self,
        pieces: Sequence[Piece],
        num_outputs: int | None = None,
        *,
        is_vocabulary: bool = False,
        tied_to: Piece | None = None,
    ) -> LinearChange | None:
        """Of a layer stored as these pieces, one below the other; None: it stays as it is.

        num_outputs: of the stored weight, where there are more than the pieces have. is_vocabulary: whether outputs are
        tokens, of which the adapter may know fewer. tied_to: the table whose rows a head takes.
        """
        found = Linear(num_outputs or max(piece.first + piece.num_outputs for piece in pieces))
        table = None if tied_to is None else self._module(tied_to)
        for piece in pieces:
            module = self._module(piece)
            adds = module is not None and "down" in module.parts  # to rows that follow the table's too
            if table is not None and adds:
                self._change_tied(found, piece, table, module)
            if module is not None:
                self._change(found, piece, module, is_vocabulary=is_vocabulary)
            elif piece.expert is not None:
                self._change_expert(found, piece)
            if table is not None and not adds:
                self._change_tied(found, piece, table, module)
        return found.change

    def _module(self, piece: Piece) -> Module | None:
        return self._named(piece.names)

    def _named(self, names: Sequence[str]) -> Module | None:
        found = dict.fromkeys(map(plain_name, names))
        self._asked.update(found)
        return next((module for name in found if (module := self._files.modules.get(name)) is not None), None)

    def _change(self, found: Linear, piece: Piece, module: Module, *, is_vocabulary: bool) -> None:
        parts = module.parts
        self._refuse_other_parts(module, {"down", "up", "up_bias", "magnitude", "weight", "bias", "tokens"})
        if not piece.takes_bias and (bias := parts.get("bias") or parts.get("up_bias")):
            raise AdapterError(
                f"{self._files.told(bias)} is of a layer whose inputs or outputs the model multiplies, where no bias "
                "is served: train the adapter without biases"
            )
        read: Read = piece.read
        if "weight" in parts:
            read = self._replaced(found, piece, parts["weight"], is_vocabulary=is_vocabulary)
        if "tokens" in parts:
            self._replace_tokens(found, piece, module, parts["tokens"])
        if "bias" in parts:
            self._rebias(found, piece, parts["bias"], is_vocabulary=is_vocabulary)
        if "down" in parts:
            down = self._take(parts["down"], (None, piece.size[1]))
            rank = self._rank(parts["down"], module.name, len(down))
            up = self._take(parts["up"], (self._rows_of(parts["up"], piece, is_vocabulary), rank))
            magnitude = self._take(parts["magnitude"], (len(up),)) if "magnitude" in parts else None
            up_bias = self._take(parts["up_bias"], (len(up),)) if "up_bias" in parts else None
            scale = self._config.scale_of(module.name)
            self._low_rank(found, piece, LowRankUpdate(down, up, scale, magnitude, up_bias), read)

    def _change_expert(self, found: Linear, piece: Piece) -> None:
        """From tensors of all experts, of which each is of a parameter of their module."""
        experts = dict.fromkeys(experts_of(name) for name in piece.names)
        module = next((module for name in experts if (module := self._files.modules.get(name)) is not None), None)
        if module is None:
            return
        levels, half = self._levels(module), HALVES.get(piece.role)
        if half is not None and "expert_gate_up" in levels:
            outputs, inputs = piece.size
            rows = [(half * outputs + start, half * outputs + stop) for start, stop in piece.rows]
            piece = replace(piece, role="expert_gate_up", size=(2 * outputs, inputs), rows=rows)
        if piece.role in levels:
            self._add_expert(found, piece, f"{module.name}.{PARAMETERS[piece.role]}", levels[piece.role])

    def _levels(self, module: Module) -> dict[str, dict[str, str]]:
        """The tensors of a module's parameters, by role: PEFT wraps them in the order in which the module has them.

        Sizes do not tell them apart, which may be the same.
        """
        if module.name not in self._levels_of:
            levels = [parts for _, parts in sorted({0: module.parts, **module.layers}.items()) if "down" in parts]
            named = [role for role, key in PARAMETERS.items() if self._config.names_parameter(f"{module.name}.{key}")]
            if levels and len(named) != len(levels):
                raise AdapterError(
                    f"{self._files.told(levels[0]['down'])} is of one of {len(levels)} parameters of experts, and "
                    f"`target_parameters` of {self._config.path} names {len(named)} that are served: correct it, or "
                    f"{MERGE_BY_PEFT}"
                )
            self._levels_of[module.name] = dict(zip(named, levels, strict=False))
        return self._levels_of[module.name]

    def _add_expert(self, found: Linear, piece: Piece, key: str, parts: dict[str, str]) -> None:
        """key: what PEFT calls the parameter."""
        assert piece.expert is not None
        stored = self._files.shape_of(parts["up"])[0], self._files.shape_of(parts["down"])[-1]
        is_turned = stored == piece.size[::-1] and (stored != piece.size or piece.is_turned)
        outputs, inputs = piece.size[::-1] if is_turned else piece.size
        down, rank = self._take(parts["down"], (None, inputs)), self._config.rank_of(key)
        count = piece.num_experts
        if len(down) != rank * count:
            raise AdapterError(
                f"{self._files.told(parts['down'])} has {len(down)} rows, and by {self._config.path} each of {count} "
                f"experts has {rank}: they do not belong together"
            )
        up = self._take(parts["up"], (outputs, len(down)))[:, piece.expert :: count]
        down = down[piece.expert * rank : (piece.expert + 1) * rank]
        down, up = (up.t(), down.t()) if is_turned else (down, up)
        self._low_rank(found, piece, LowRankUpdate(down, up, self._config.scale_of(key)), piece.read)

    def _change_tied(self, found: Linear, piece: Piece, table: Module, own: Module | None) -> None:
        """What changes a table and the head that is tied to it, unless the head has its own."""
        if "tokens" in table.parts and (own is None or "tokens" not in own.parts):
            self._replace_tokens(found, piece, table, table.parts["tokens"])
        if self._config.is_tied and own is None and "table_down" in table.parts:
            down = self._take(table.parts["table_down"], (None, piece.size[0]))
            rank = self._rank(table.parts["table_down"], table.name, len(down))
            up = self._take(table.parts["table_up"], (piece.size[1], rank))
            update = LowRankUpdate(up.t(), down.t(), self._config.scale_of(table.name))
            self._low_rank(found, piece, update, piece.read)

    def _low_rank(self, found: Linear, piece: Piece, own: LowRankUpdate, read: Read) -> None:
        """Add a product of two matrices, as this rank has it."""
        rows, columns = _ranges(len(own.up), piece), slice(*piece.columns)
        up = _rows(own.up, rows)
        if own.magnitude is not None and len(up):
            weight = read(rows).float()
            length = torch.linalg.vector_norm(weight.addmm(up.float(), own.down.float(), alpha=own.scale), dim=1)
            gain = _rows(own.magnitude, rows).float() / length
            if not gain.isfinite().all():
                raise OnlyMerged(f"a row of {piece.names[0]} is zeros, to which DoRA gives no length")
            found.multiply(piece.first, gain)
            up = up.float() * gain.unsqueeze(1)
        if len(up):
            down = _rounded(own.down[:, columns], self._dtype)
            found.parts.append(LowRank(piece.first, down, _rounded(up, self._dtype), own.scale))
        if own.up_bias is not None and piece.columns[0] == 0:
            found.add(piece.first, own.scale * _rows(own.up_bias, rows).float())

    def _replaced(self, found: Linear, piece: Piece, name: str, *, is_vocabulary: bool) -> Read:
        """Put rows of a weight that was trained whole in place of the base's. Returns what reads them."""
        self._taken.add(name)  # of which this rank may have none
        size = (self._rows_of(name, piece, is_vocabulary), piece.size[1])
        is_turned = piece.is_transposed and self._files.shape_of(name) == (size[1], size[0])
        read = (
            partial(_rows, self._take(name, (size[1], size[0])).t()) if is_turned else partial(self._saved, name, size)
        )
        ranges = _ranges(size[0], piece)
        num_known = sum(stop - start for start, stop in ranges)
        if num_known < piece.num_outputs:  # tokens that the adapter does not know
            found.add(piece.first + num_known, torch.full((piece.num_outputs - num_known,), float("-inf")))
        chunks = _chunks(ranges)
        differing = [(read([part]).to(self._dtype) != piece.read([part]).to(self._dtype)).any(dim=1) for part in chunks]
        if differing:
            places = _filled(torch.cat(differing).nonzero().flatten(), piece.columns[1] - piece.columns[0])
            self._put_rows(found, piece, places, read(ranges)[places])
        return read

    def _put_rows(self, found: Linear, piece: Piece, places: Tensor, rows: Tensor) -> None:
        """Rows [n, D] in place of some of the base's. places: [n], ascending, among the piece's."""
        if not len(places):
            return
        gain = torch.ones(piece.num_outputs)
        gain[places] = 0
        found.multiply(piece.first, gain)
        first, stop = int(places[0]), int(places[-1]) + 1
        rows = rows[:, slice(*piece.columns)].to(self._dtype).contiguous()
        if stop - first == len(places):
            found.parts.append(LowRank(piece.first + first, None, rows, 1.0))
            return
        self._require((stop - first) * len(places) * self._dtype.itemsize)
        up = torch.zeros(stop - first, len(places), dtype=self._dtype)
        up[places - first, torch.arange(len(places))] = 1
        found.parts.append(LowRank(piece.first + first, rows, up, 1.0))

    def _replace_tokens(self, found: Linear, piece: Piece, module: Module, name: str) -> None:
        ids, rows = self._tokens(module, name, piece.size)
        places = _places(ids, piece)
        self._put_rows(found, piece, places[0], rows[places[1]])

    def _tokens(self, module: Module, name: str, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Tokens that were trained alone, ascending, and their rows."""
        named = self._config.tokens_of(module.name)
        if named is None or max(named, default=0) >= size[0]:
            raise AdapterError(
                f"`trainable_token_indices` of {self._config.path} must name tokens of {module.name} below {size[0]}: "
                "they do not belong together"
            )
        ids, order = torch.tensor(named, dtype=torch.int64).sort()
        return ids, self._take(name, (len(named), size[1]))[order]

    def _rebias(self, found: Linear, piece: Piece, name: str, *, is_vocabulary: bool) -> None:
        bias = self._take(name, (self._rows_of(name, piece, is_vocabulary),))
        ranges = _ranges(len(bias), piece)
        if piece.columns[0] != 0 or not ranges:
            return
        own, base = _rows(bias, ranges).float(), piece.read_bias(ranges)
        difference = own if base is None else own - base
        if difference.any():
            found.add(piece.first, difference)

    def _rows_of(self, name: str, piece: Piece, is_vocabulary: bool) -> int:
        """How many outputs a tensor must have: of a vocabulary, as many as it has, if these are not too many."""
        outputs = self._files.shape_of(name)[0]
        if not is_vocabulary or outputs <= piece.size[0]:
            return outputs if is_vocabulary else piece.size[0]
        raise OnlyMerged(
            f"{self._files.told(name)} is of {outputs} tokens, and the model is served with {piece.size[0]}"
        )

    def embedding(self, piece: Piece, *, is_resized: bool = False) -> EmbeddingChange | None:
        """Of a table of which this rank has some rows; None: it stays as it is.

        is_resized: whether the adapter has another vocabulary than the model that it was made for.
        """
        if (module := self._module(piece)) is None:
            return None
        self._refuse_other_parts(module, {"table_down", "table_up", "magnitude", "weight", "tokens"})
        parts, replaced = module.parts, EmbeddingChange()
        read: Read = piece.read
        if "weight" in parts:
            replaced = self._other_table(piece, parts["weight"])
            read = partial(self._saved, parts["weight"], self._files.shape_of(parts["weight"]))
        if "tokens" in parts:
            replaced = _over(replaced, self._other_tokens(piece, module))
        if "table_down" in parts:
            replaced = self._with_low_rank(replaced, piece, module, read)
        if module.name == SHARED and "tokens" not in parts and not is_resized:
            self._refuse_effect(module, replaced)
            return None
        return replaced if replaced.nbytes else None

    def _refuse_effect(self, module: Module, change: EmbeddingChange) -> None:
        """Raise AdapterError unless the change changes nothing."""
        is_zero = change.up is None or change.down is None or not (change.up.any() and change.down.any())
        if change.ids is not None or change.gain is not None or not is_zero:
            one = next(iter(module.parts.values()))
            raise AdapterError(
                f"{self._files.told(one)} is of the table that encoder and decoder share, with which peft computes "
                "nothing: train layers, or `trainable_token_indices`"
            )

    def _with_low_rank(self, replaced: EmbeddingChange, piece: Piece, module: Module, read: Read) -> EmbeddingChange:
        parts, (start, stop) = module.parts, _one(piece)
        num_tokens = self._files.shape_of(parts["table_down"])[1]
        if num_tokens > piece.size[0]:
            self._refuse_more_tokens(parts["table_down"], num_tokens, piece)
        down = self._take(parts["table_down"], (None, num_tokens))
        rank = self._rank(parts["table_down"], module.name, len(down))
        up = self._take(parts["table_up"], (piece.size[1], rank)).t().float()
        scale, gain = self._config.scale_of(module.name), None
        if "magnitude" in parts:
            square = torch.zeros(piece.size[1])
            for first, last in _chunks([(0, num_tokens)]):
                rows = read([(first, last)]).float()
                square += rows.addmm_(down[:, first:last].t().float(), up, alpha=scale).square_().sum(dim=0)
            gain = self._take(parts["magnitude"], (piece.size[1],)).float() / square.sqrt()
            if not gain.isfinite().all():
                raise OnlyMerged(f"a feature of {module.name} is 0 everywhere, to which DoRA gives no length")
            up = up * gain
            if replaced.rows is not None:
                replaced = replace(replaced, rows=(replaced.rows.float() * gain).to(self._dtype))
        self._require((stop - start) * rank * self._dtype.itemsize)
        own = torch.zeros(stop - start, rank, dtype=self._dtype)
        own[: max(0, min(stop, num_tokens) - start)] = down[:, start:stop].t()
        return replace(replaced, down=own, up=up.to(self._dtype).contiguous(), scale=scale, gain=gain)

    def _other_table(self, piece: Piece, name: str) -> EmbeddingChange:
        """The rows of a table that was trained whole which are not the base's."""
        (start, stop), num_tokens = _one(piece), self._files.shape_of(name)[0]
        if num_tokens > piece.size[0]:
            self._refuse_more_tokens(name, num_tokens, piece)
        self._taken.add(name)
        ids, rows = [], []
        for first, last in _chunks([(start, min(stop, num_tokens))]):
            own = self._files.read(name, (num_tokens, piece.size[1]), (first, last)).to(self._dtype)
            differing = (own != piece.read([(first, last)]).to(self._dtype)).any(dim=1).nonzero().flatten()
            ids.append(differing + (first - start))
            rows.append(own[differing])
        return _replacing(ids, rows)

    def _saved(self, name: str, shape: Sequence[int], ranges: Ranges) -> Tensor:
        """Rows of a weight that was trained whole."""
        self._taken.add(name)
        return torch.cat([self._files.read(name, shape, part) for part in ranges])

    def _other_tokens(self, piece: Piece, module: Module) -> EmbeddingChange:
        ids, rows = self._tokens(module, module.parts["tokens"], piece.size)
        places, order = _places(ids, piece)
        return _replacing([places], [rows[order].to(self._dtype)])

    def norm(self, names: Sequence[str], weight: Tensor, bias: Tensor | None, offset: float = 0.0) -> NormChange | None:
        """Of a norm that multiplies by this weight [D], and adds this bias; None: it stays as it is.

        What an adapter has in place of a weight must be 0 where that is 0. offset: what is added to stored weights.
        """
        if (module := self._named(names)) is None:
            return None
        self._refuse_other_parts(module, {"weight", "bias"})
        size, gain, weight = len(weight), torch.ones(len(weight)), weight.to(HOST)
        if "weight" in module.parts:
            own, base = self._take(module.parts["weight"], (size,)).float() + offset, weight.float()
            if ((base == 0) & (own != 0)).any():
                raise OnlyMerged(f"{self._files.told(module.parts['weight'])} is not 0 where the model's is")
            gain = torch.where(base == own, 1, own / base)
        before = torch.zeros(size) if bias is None else bias.to(HOST).float()
        after = self._take(module.parts["bias"], (size,)).float() if "bias" in module.parts else before
        shift, has_gain = after - before * gain, bool((gain != 1).any())
        if not has_gain and not shift.any():
            return None
        return NormChange(gain if has_gain else None, shift if shift.any() else None)

    def saved(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor that is in place of one of the base's."""
        return self._take(name, shape)

    def refuse_leftovers(self, elsewhere: Sequence[str] = ()) -> None:
        """Raise AdapterError if no layer has taken some tensors, or one that was trained whole has found none.

        elsewhere: modules, by their plain names, that other ranks have asked for.
        """
        self._refuse_missing()
        of_others = tuple(f"{name}." for name in elsewhere)
        left = [
            part
            for name, module in sorted(self._files.modules.items())
            for parts in (module.parts, *module.layers.values())
            for part in parts.values()
            if part not in self._taken and not f"{name}.".startswith(of_others)
        ]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            others = f", nor {'are' if left[2:] else 'is'} {', '.join(left[1:3])}{more}" if left[1:] else ""
            raise OnlyMerged(
                f"{self._files.told(left[0])} is of no layer that adapters can change in this model{others}",
                unless="if it is an adapter of this model",
            )

    def _refuse_missing(self) -> None:
        """PEFT passes over names in `modules_to_save` that are of no layer of the model."""
        config, found = self._config, self._files.modules.values()
        whole = [module.name for module in found if module.parts.keys() & {"weight", "bias"}]
        for name in config.saved:
            if not config.is_tied and _is_of(name, self._asked) and not _is_of(name, whole):
                raise AdapterError(
                    f"{config.path} has {name} in `modules_to_save`, and there is no tensor of it: {BAD_FILE}"
                )

    def _take(self, name: str, shape: Sequence[int | None]) -> Tensor:
        self._taken.add(name)
        return self._files.read(name, shape)

    def _rank(self, tensor: str, name: str, found: int) -> int:
        """The rank that a layer's config and tensor agree on."""
        if (said := self._config.rank_of(name)) != found:
            raise AdapterError(
                f"{self._files.told(tensor)} is of rank {found}, and {self._config.path} says {said}: they do not "
                "belong together"
            )
        return said

    def _refuse_other_parts(self, module: Module, known: set[str]) -> None:
        if other := next((name for part, name in module.parts.items() if part not in known), None):
            raise AdapterError(f"{self._files.told(other)} is for another kind of layer than {module.name} is here")
        if "tokens" in module.parts and module.parts.keys() & {"down", "table_down"}:
            raise OnlyMerged(
                f"{self._files.told(module.parts['tokens'])} is of a layer that is changed in another way too, which "
                "peft does not do"
            )

    def _refuse_more_tokens(self, name: str, num_tokens: int, piece: Piece) -> None:
        raise OnlyMerged(
            f"{self._files.told(name)} is of {num_tokens} tokens, and the model is served with {piece.size[0]}"
        )


def _is_of(name: str, modules: Iterable[str]) -> bool:
    """Whether PEFT takes a name for one of these modules, or for one around it."""
    return any(module.endswith(name) or f".{name}." in f".{module}." for module in modules)


def _one(piece: Piece) -> tuple[int, int]:
    """The half-open rows of a table that a rank has."""
    (part,) = piece.rows
    return part


def _ranges(outputs: int, piece: Piece) -> Ranges:
    """The piece's rows, as far as an adapter has so many."""
    clipped = [(min(start, outputs), min(stop, outputs)) for start, stop in piece.rows]
    return [(start, stop) for start, stop in clipped if start < stop]


def _rows(whole: Tensor, ranges: Ranges) -> Tensor:
    found = [whole[start:stop] for start, stop in ranges]
    return torch.cat(found) if len(found) > 1 else found[0] if found else whole[:0]


def _rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in another dtype, contiguous."""
    numbers = numbers.contiguous()
    if numbers.dtype == dtype:
        return numbers
    found = torch.empty(numbers.shape, dtype=dtype)
    for into, run in zip(runs(found), runs(numbers), strict=True):
        into.copy_(run)
    return found


def _chunks(ranges: Ranges) -> Ranges:
    """The same rows, some at a time."""
    return [(at, min(at + CHUNK, stop)) for start, stop in ranges for at in range(start, stop, CHUNK)]


def _places(ids: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Of ids, ascending, that the piece has: the places among its rows, and among the ids."""
    befores = accumulate((stop - start for start, stop in piece.rows), initial=0)
    found = [
        (ids[own] - start + before, own)
        for (start, stop), before in zip(piece.rows, befores, strict=False)
        for own in [((ids >= start) & (ids < stop)).nonzero().flatten()]
    ]
    return torch.cat([places for places, _ in found]), torch.cat([own for _, own in found])


def _filled(places: Tensor, width: int) -> Tensor:
    """Ascending places of rows of so many numbers; those between them too, where all rows take less than these do.

    These need a matrix beside them that puts each in its place.
    """
    if not len(places):
        return places
    first, span = int(places[0]), int(places[-1] - places[0]) + 1
    return torch.arange(first, first + span) if len(places) * (width + span) > span * width else places


def _over(before: EmbeddingChange, after: EmbeddingChange) -> EmbeddingChange:
    """Both, each with rows in place of some; of those that both have, the second's."""
    if before.ids is None or before.rows is None or after.ids is None or after.rows is None:
        return after if after.nbytes else before
    left = ~torch.isin(before.ids, after.ids)
    ids, order = torch.cat([before.ids[left], after.ids]).sort()
    return EmbeddingChange(ids=ids, rows=torch.cat([before.rows[left], after.rows])[order])


def _replacing(ids: Sequence[Tensor], rows: Sequence[Tensor]) -> EmbeddingChange:
    """Rows of a table in place of others; no change where there are none."""
    if not sum(map(len, ids)):
        return EmbeddingChange()
    return EmbeddingChange(ids=torch.cat(list(ids)), rows=torch.cat(list(rows)))
