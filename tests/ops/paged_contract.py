"""What every implementation of attention to pages is held to, whatever rows the pages hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.ops.declared import PagedInputs
from torch_hybrid.ops.core.capability import BATCH_INVARIANT, Implementation

Make = Callable[..., Any]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


class PagedContract:
    """The tests; a family's own class names the family and adds what is peculiar to it.

    The module has fixtures ``impl`` and ``make``: an implementation, and a function of a case that
    makes inputs, for each way in which rows are kept.

    Attributes:
        implementations: those of the op.
        cases: by name.
        some: names of those in which sequences are compared with themselves alone.
        small: one whose lengths are changed.
        options: of calls in chunks, by name.
        nothing: what each result has in rows of padding.
        attend: the op, as a function that returns the results in a tuple, and the pool afterwards.
    """

    implementations: ClassVar[Mapping[str, Implementation]]
    cases: ClassVar[Mapping[str, Any]]
    some: ClassVar[tuple[str, ...]]
    small: ClassVar[Any]
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    nothing: ClassVar[tuple[float, ...]] = (0,)
    attend: ClassVar[Callable[..., tuple[tuple[Tensor, ...], Tensor]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        given = {"name": self.cases, "some_name": self.some, "options": self.options}
        for argument, names in given.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, names)

    @pytest.mark.parametrize("chunk", [1, 7, 64])
    def test_chunked_equals_whole(self, impl: str, chunk: int, options: str, make: Make) -> None:
        total, chosen = min(70, 20 * chunk), self.options[options]
        whole = make(replace(self.small, lengths=((total, total),)))
        expected, expected_pool = self.attend(whole, impl, **chosen)
        outs, pool = whole.in_pieces(chunk, lambda piece: self.attend(piece, impl, **chosen))
        is_invariant = BATCH_INVARIANT in self.implementations[impl].capability.features
        for parts, of_whole in zip(zip(*outs, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(parts), of_whole, atol=2e-6, rtol=1e-5)
            assert not is_invariant or torch.equal(torch.cat(parts), of_whole)
        assert torch.equal(bits(pool), bits(expected_pool))

    @pytest.mark.parametrize("case", ["odd", "long_decode"])
    def test_padding_changes_nothing(self, impl: str, case: str, make: Make) -> None:
        plain, padded = (make(self.cases[case], padding=padding) for padding in ((0, 0), (5, 3)))
        num_tokens = int(plain.cu_seqlens[-1])
        for field, rows in plain.rows_at(slice(None)).items():
            if rows.is_floating_point():
                poison = torch.full_like(getattr(padded, field)[num_tokens:], math.nan)
                padded = replace(padded, **{field: torch.cat([rows, poison])})
        results, pool = self.attend(plain, impl)
        padded_results, padded_pool = self.attend(padded, impl)
        for x, like, nothing in zip(padded_results, results, self.nothing, strict=True):
            assert torch.equal(x[:num_tokens], like)
            assert torch.equal(x[num_tokens:], torch.full_like(x[num_tokens:], nothing))
        assert torch.equal(bits(padded_pool), bits(pool))

    def test_sequences_do_not_depend_on_one_another(
        self, impl: str, some_name: str, make: Make
    ) -> None:
        """Each sequence alone gives the bits that it gives within the batch, in either order."""
        inputs = make(self.cases[some_name])
        results, _ = self.attend(inputs, impl)
        num_seqs = len(inputs.seq_lens)
        for order in (*([n] for n in range(num_seqs)), [*reversed(range(num_seqs))]):
            rows, part = inputs.of(order)
            for own, x in zip(self.attend(part, impl)[0], results, strict=True):
                assert torch.equal(own, x[rows])

    def test_page_order_is_irrelevant(self, impl: str, make: Make) -> None:
        inputs: PagedInputs = make(self.cases["odd"])
        moved = torch.arange(inputs.kept.shape[inputs.page_dim])
        moved[1:] = moved[1:].flip(0)
        slots, size = inputs.slot_mapping, inputs.page_size
        other = replace(
            inputs.with_pool(inputs.kept.index_select(inputs.page_dim, moved)),
            page_table=moved[inputs.page_table.long()].int(),
            slot_mapping=(moved[slots.long() // size] * size + slots % size).int(),
        )
        for a, b in zip(self.attend(inputs, impl)[0], self.attend(other, impl)[0], strict=True):
            assert torch.equal(a, b)

    def test_writes_its_rows_and_nothing_else(self, impl: str, name: str, make: Make) -> None:
        inputs = make(self.cases[name], padding=(3, 1), unused=7.0)
        _, pool = self.attend(inputs, impl)
        expected, dim, num_tokens = inputs.kept.clone(), inputs.page_dim, int(inputs.cu_seqlens[-1])
        by_slot = bits(expected).flatten(dim, dim + 1).movedim(dim, 0)
        slots = inputs.slot_mapping[:num_tokens].long()
        by_slot[slots] = bits(inputs.rows_kept()).movedim(dim, 0)[:num_tokens]
        assert torch.equal(bits(pool), bits(expected))
