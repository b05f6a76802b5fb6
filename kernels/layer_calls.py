"""Calls of everything but attention: products, experts, sampling, by PyTorch's own kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kernels.calls import DTYPES, TOLERANCE, Calls, Skip, is_cold, relative_error, rotation
from kernels.grid import VOCAB_SIZE, Case

_FEW = 64
"""Rows and columns of a product that are held to the reference."""


class LayerCalls:
    """Makes calls; keeps the weights that were asked for last."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._weights: tuple[object, list[Any]] | None = None

    def release(self) -> None:
        """Give the weights back."""
        self._weights = None

    def _random(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.randn(shape, device=self._device, generator=self._generator, dtype=dtype)
        return numbers / shape[-1] ** 0.5

    def _kept(self, identity: object, make: Callable[[], list[Any]]) -> list[Any]:
        if self._weights is None or self._weights[0] != identity:
            self._weights = None
            self._weights = identity, make()
        return self._weights[1]

    def make(self, case: Case) -> Calls:
        """Answer the calls of *case*.

        Raises:
            Skip: this PyTorch has no kernel for it.
        """
        makers = {"gemm": self._product, "moe": self._experts, "sampler": self._sampler}
        return makers[case.op](case)

    def _product(self, case: Case) -> Calls:
        """Weights rotate; activations come from the kernel before, and are in the cache."""
        dtype = DTYPES[case.dtype]
        num_bytes = case.n * case.k * dtype.itemsize
        copies = rotation(num_bytes, self._device)
        weights = self._kept(
            (case.n, case.k, dtype),
            lambda: [self._random(case.n, case.k, dtype=dtype) for _ in range(copies)],
        )
        tokens = self._random(case.num_tokens, case.k, dtype=dtype) * case.k**0.5
        out = tokens.new_empty((case.num_tokens, case.n))

        def call(weight: torch.Tensor) -> Callable[[], object]:
            return lambda: torch.mm(tokens, weight.t(), out=out)

        calls = [call(weight) for weight in weights]

        def error() -> float:
            out.fill_(float("nan"))
            calls[0]()
            expected = tokens[-_FEW:].double() @ weights[0][-_FEW:].double().t()
            worst = relative_error(out[-_FEW:, -_FEW:], expected)
            return worst if bool(torch.isfinite(out).all()) else float("inf")

        return Calls(calls, error, TOLERANCE[case.dtype], is_cold(num_bytes, copies, self._device))

    def _experts(self, case: Case) -> Calls:
        """Routing rotates, at random over all experts: so do the weights that are read."""
        grouped = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if grouped is None:
            raise Skip("this PyTorch has no grouped_mm")
        dtype = DTYPES[case.dtype]
        up, down = self._kept(
            ("moe", case.n, case.k, case.num_experts, dtype),
            lambda: [
                self._random(case.num_experts, 2 * case.n, case.k, dtype=dtype),
                self._random(case.num_experts, case.k, case.n, dtype=dtype),
            ],
        )
        tokens = self._random(case.num_tokens, case.k, dtype=dtype) * case.k**0.5
        touched = min(case.num_experts, case.num_tokens * case.top_k)
        num_bytes = touched * (up[0].nbytes + down[0].nbytes)
        copies = min(rotation(num_bytes, self._device), 16)
        routes = [self._route(case) for _ in range(copies)]
        out = torch.empty_like(tokens)

        def call(route: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Callable[[], object]:
            rows, ends, weights = route

            def run() -> object:
                gate, value = grouped(tokens[rows], up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
                answers = grouped(functional.silu(gate) * value, down.transpose(1, 2), offs=ends)
                return out.zero_().index_add_(0, rows, answers * weights[:, None])

            return run

        calls = [call(route) for route in routes]

        def error() -> float:
            out.fill_(float("nan"))
            calls[0]()
            return relative_error(out, _experts(tokens, up, down, routes[0]))

        # Many roundings in 16 bits, of the activation and of the sum over experts.
        tolerance = 3 * TOLERANCE[case.dtype]
        return Calls(calls, error, tolerance, is_cold(num_bytes, copies, self._device))

    def _route(self, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Answer the token of every (token, expert), by expert; where experts end; weights."""
        scores = torch.rand(
            (case.num_tokens, case.num_experts), device=self._device, generator=self._generator
        )
        weights, chosen = scores.topk(case.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=case.num_experts)
        share = (weights / weights.sum(-1, keepdim=True)).flatten()[order]
        return order // case.top_k, counts.cumsum(0).int(), share.to(DTYPES[case.dtype])

    def _sampler(self, case: Case) -> Calls:
        """Softmax in fp32 and a draw by exponential noise, as vLLM's sampler does it."""
        logits = self._random(case.num_tokens, VOCAB_SIZE, dtype=DTYPES[case.dtype])
        noise = torch.empty(logits.shape, dtype=torch.float32, device=self._device)

        def probabilities() -> torch.Tensor:
            return torch.softmax(logits.float(), dim=-1)

        def call() -> object:
            return (probabilities() / noise.exponential_()).argmax(dim=-1)

        def error() -> float:
            call()
            return relative_error(probabilities(), torch.softmax(logits.double(), dim=-1))

        return Calls([call], error, TOLERANCE["float32"], cold=False)


def _experts(
    tokens: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    route: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Answer what experts do, one after the other, in fp32."""
    rows, ends, weights = route
    out = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        mine = rows[start:end]
        gate, value = (tokens[mine].float() @ up[expert].float().t()).chunk(2, dim=-1)
        answers = (functional.silu(gate) * value) @ down[expert].float().t()
        out.index_add_(0, mine, answers * weights[start:end, None].float())
        start = end
    return out
