"""Linear layers on an NVIDIA GPU: products of few rows by a kernel of our own, of many by cuBLAS.

A decode's product reads its weight and does little else, so what follows it should cost no launch: the kernel for few
rows (`kernels/linear.py`) does all of it. cuBLAS (Lt) adds a bias, and computes ReLU and the GELU with tanh, in the
product's launch, from two rows on (with one, its bias is a copy); the exact GELU, gates and sums are launches of their
own. Up to some number of rows, which one computes is measured (`choice.py`).

A format's `finest` follows a rule instead: a mixture's router is the same on every rank, and its choices must be.
Quantised weights are `quantised.py`'s business.

Importing this module imports Triton. Not yet run on a GPU.

Shapes: T rows, D input features, F output features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from server.arch.spec import Activation
from server.backends.cuda.choice import Alternatives, Chooser, Shares
from server.backends.cuda.kernels.linear import Epilogue, Tiling, Workspace, multiply_rows, tilings
from server.backends.reference.linear import DenseFormat, Gate, GroupedDense

# Rows up to which the kernel is the usual way, and up to which it is worth a try: between them, one of both is faster.
USUAL_ROWS, MOST_ROWS = 8, 64
# Rows of each expert, on average, up to which the kernel computes rather than the operator for all experts.
ROWS_PER_EXPERT = 16
NOTHING_MEASURED = Shares()
# Which of cuBLASLt's epilogues an activation is: on GPUs (alone) its GELU is the one with tanh.
HAS_GELU_EPILOGUE = {Activation.GELU_TANH: True, Activation.RELU: False}

# x [T, D], what follows the product → [T, F].
Way = Callable[[Tensor, Epilogue], Tensor]


class Products:
    """What all matrix products of a backend share: where their programs meet, and what has been measured.

    has_grouped_mm: whether torch's product of all experts asks the host nothing; shares: what torch's operators for 8
    bits were measured to reach; workspace: one of its own.
    """

    def __init__(
        self,
        chooser: Chooser,
        *,
        has_grouped_mm: bool = True,
        shares: Shares = NOTHING_MEASURED,
        workspace: Workspace | None = None,
    ):
        self.chooser = chooser
        self.shares = shares
        self.has_grouped_mm = has_grouped_mm
        self._workspace = workspace  # otherwise made when the first tensors tell the device

    def workspace(self, device: torch.device) -> Workspace:
        """The workspace on `device`."""
        if self._workspace is None or self._workspace.parts.device != device:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            self._workspace = Workspace(device, processors)
        return self._workspace


def named(shape: Sequence[int], weight: object, rows: int, has: Sequence[object]) -> str:
    """A product for people. shape: of the weight [F, D]; has: what follows, as far as it is there."""
    following = [name for name, value in zip(("bias", "activation", "residual"), has, strict=False) if value]
    size = " x ".join(map(str, (rows, *reversed(shape))))
    return f"{size} {str(weight).removeprefix('torch.')}" + "".join(f" + {name}" for name in following)


def names_of(ways: Iterable[Callable[..., Tensor]], stock: str) -> list[str]:
    """Of ways to multiply, for people: a kernel's is that of its tiling."""
    return [str(getattr(way, "keywords", {}).get("tiling", stock)) for way in ways]


class Product:
    """The product with one weight [F, D], in whichever way takes the least time.

    stock: the product in stock operators; usual_rows: rows up to which the kernel is the usual way; most_rows: rows up
    to which both are ways.
    """

    def __init__(
        self, products: Products, weight: Tensor, *, is_gated: bool, stock: Way, usual_rows: int, most_rows: int
    ):
        self._products = products
        self._weight = weight
        self._is_gated = is_gated
        self._stock = stock
        self._usual_rows = usual_rows
        self._most_rows = most_rows

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """x [T, D] → its product and what follows, [T, F] in x's dtype."""
        if len(x) > self._most_rows:
            return self._stock(x, epilogue)
        rows = 1 << max(len(x) - 1, 0).bit_length()  # the next power of two
        ways = self._ways(rows)
        has = epilogue.bias is not None, epilogue.activation, epilogue.residual is not None
        key = (*self._weight.shape, self._weight.dtype, x.dtype, self._is_gated, rows, has)
        trials, asked = partial(self._trials, ways, rows, x, epilogue), partial(self._asked, rows, has)
        return ways[self._products.chooser.choose(key, trials, asked)](x, epilogue)

    def by_rule(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, D] → x @ weightᵀ + bias, in a way that depends on nothing but shapes; of a gated weight [gate | up].

        In float32 where the sums are not rounded anyhow.
        """
        epilogue = Epilogue(bias)
        if len(x) <= self._usual_rows:
            return self._few_rows(x, epilogue, is_gated=False, dtype=torch.float32)
        return self._stock(x, epilogue)

    def _ways(self, rows: int) -> Sequence[Way]:
        """What computes up to `rows` rows, the usual way first."""
        kinds = tilings(rows, self._weight.dtype, is_gated=self._is_gated)
        kernels: list[Way] = [partial(self._few_rows, tiling=tiling) for tiling in kinds]
        return [*kernels, self._stock] if rows <= self._usual_rows else [self._stock, *kernels]

    def _asked(self, rows: int, has: Sequence[object]) -> Alternatives:
        product = named(self._weight.shape, self._weight.dtype, rows, has)
        return Alternatives(product, names_of(self._ways(rows), "cuBLAS"), self._weight.nbytes)

    def _few_rows(
        self,
        x: Tensor,
        epilogue: Epilogue,
        *,
        tiling: Tiling | None = None,
        dtype: torch.dtype | None = None,
        is_gated: bool | None = None,
    ) -> Tensor:
        return multiply_rows(
            x,
            self._weight,
            epilogue,
            self._products.workspace(x.device),
            is_gated=self._is_gated if is_gated is None else is_gated,
            tiling=tiling,
            dtype=dtype,
        )

    def _trials(self, ways: Sequence[Way], rows: int, x: Tensor, like: Epilogue) -> list[Callable[[], Tensor]]:
        """Each way with `rows` rows of noise: zeros would be faster than what is served."""
        noise = torch.randn(rows, x.shape[1], device=x.device).to(x.dtype)
        residual = None if like.residual is None else noise.new_zeros(rows, like.residual.shape[1])
        epilogue = Epilogue(like.bias, like.activation, residual)
        return [partial(way, noise, epilogue) for way in ways]


class CudaDense(DenseFormat):
    """A `LinearFormat`: the weight as it is in the checkpoint."""

    def __init__(self, weight: Tensor, *, is_gated: bool = False, gate: Gate, products: Products):
        super().__init__(weight.contiguous(), is_gated=is_gated, gate=gate)
        # On a CPU the same operator computes the exact GELU.
        self._has_epilogues = weight.device.type in ("cuda", "meta") and not is_gated
        self._product = Product(
            products, self.weight, is_gated=is_gated, stock=self._stock, usual_rows=USUAL_ROWS, most_rows=MOST_ROWS
        )

    def __call__(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return self._product(x, Epilogue(bias, activation, residual))

    def finest(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._product.by_rule(x, bias)

    def _stock(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        bias, activation, residual = epilogue.bias, epilogue.activation, epilogue.residual
        if not (self._has_epilogues and bias is not None and activation in HAS_GELU_EPILOGUE):
            return super().__call__(x, bias, activation, residual)
        use_gelu = HAS_GELU_EPILOGUE[activation]
        y: Tensor = torch._addmm_activation(bias, x, self.weight.t(), use_gelu=use_gelu)
        return y if residual is None else y + residual


class CudaGrouped(GroupedDense):
    """A `GroupedLinear` of dense weights: the kernel for few rows of each expert, and for all in other dtypes."""

    def __init__(
        self, weights: Iterable[Tensor], count: int, *, is_gated: bool = False, gate: Gate, products: Products
    ):
        super().__init__(weights, count, is_gated=is_gated, gate=gate)
        self._products = products
        # Of other GPUs torch reads on the host where each expert's tokens end.
        self._has_grouped_mm = self._weights.dtype == torch.bfloat16 and products.has_grouped_mm

    def __call__(
        self, x: Tensor, ends: Tensor, activation: Activation | None = None, bias: Tensor | None = None
    ) -> Tensor:
        # No graph has torch's: replays were seen to read what is not theirs (github.com/pytorch/pytorch/issues/169970).
        is_stock = self._has_grouped_mm and not self._products.chooser.is_capturing
        if is_stock and len(x) > ROWS_PER_EXPERT * len(ends):
            return super().__call__(x, ends, activation, bias)
        x = F.pad(x, (0, self._padding)) if self._padding else x
        return multiply_rows(
            x,
            self._weights.transpose(1, 2),
            Epilogue(bias, activation),
            self._products.workspace(x.device),
            is_gated=self._gate is not None and activation is not None,
            ends=ends,
        )
