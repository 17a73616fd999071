"""Public fault reports, by their rows, on a device: through automatic choice and every backend by name.

A vendor's on_device/test_fault_cases.py is a subclass whose name pytest collects, with its `Device`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

import polyattn as pa
from platforms.tests.on_device.device import Device, Name, assert_near, assert_rows, exact
from tests.unit.fault_values import batch, values
from tests.unit.test_fault_cases import EMPTY, MASKS, strided_values

INF, NAN = float("inf"), float("nan")
T, F = True, False


class FaultCases:
    """`backend` is each of the device's, `package` each that is its maker's own."""

    on: ClassVar[Device]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """For every backend that the device names."""
        for argument, names in (("backend", self.on.backends), ("package", self.on.packages)):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, names, ids=[name or "auto" for name in names])

    def check_width(self, backend: Name, width: int, route: str) -> None:
        """What else a vendor knows of the route of a head dim."""

    def pages_of_16(self) -> torch.Tensor:
        """4 pages of 16 rows: page p holds 10p+5 in its even rows and 10p+6 in the odd ones; page 3 holds NaN."""
        rows = torch.tensor([[10.0 * page + 5 + row % 2 for row in range(16)] for page in range(4)])
        rows[3], rows[0, 1:] = NAN, NAN
        return self.on.here(rows[..., None, None].expand(4, 16, 2, 64).contiguous())

    @pytest.mark.parametrize("known", ["host", "device"])
    def test_1_packed_documents_stay_apart(self, backend: Name, known: str) -> None:
        v = self.on.here(values(1, 3, 5, 7, 8, 9))
        ends: Any = (
            [0, 2, 3, 6] if known == "host" else torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=self.on.device)
        )
        structure = pa.Packed.from_cu_seqlens(ends, max_q=3)
        assert_rows(self.on.attend(backend, torch.zeros_like(v), v, v, structure=structure), [2, 2, 5, 8, 8, 8])
        q, k, v = (self.on.drawn(6, 2, 64, seed=seed) for seed in range(3))
        loop = torch.cat([exact(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 6))])
        assert_near(self.on.attend(backend, q, k, v, structure=structure), loop)

    def test_1_real_and_pad_is_one_document_without_a_mask(self, backend: Name) -> None:
        v = self.on.here(values(1, 3, NAN, NAN))
        out = self.on.attend(backend, torch.zeros_like(v), v, v, structure=pa.Packed.real_and_pad(2, 4))
        assert_rows(out, [2, 2, 0, 0])

    def test_4_a_key_mask_is_not_applied_to_the_query(self, backend: Name) -> None:
        v = self.on.here(batch((1, 3, 9), (5, 7, 9)))
        for queries in (4, 3):
            q = self.on.here(torch.zeros(2, queries, 2, 64))
            keep = pa.KeyPadding.from_mask([[T, T, F], [T, F, F]], queries="all")
            assert_rows(self.on.attend(backend, q, v, v, structure=keep), [[2.0] * queries, [5.0] * queries])
            layer = pa.Attention(2, 64, role="cross", backend=self.on.full(backend))
            assert_rows(
                layer(q, v, v, pa.KeyPadding.from_mask([[T, T, F], [T, F, F]])), [[2.0] * queries, [5.0] * queries]
            )

    def test_5_int64_boundaries_give_the_bits_of_int32_and_impossible_ones_are_refused(self, backend: Name) -> None:
        v = self.on.here(values(1, 2, 3, 10, 20, 30))
        wide, narrow = (
            self.on.attend(
                backend, torch.zeros_like(v), v, v,
                structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype)),
            )
            for dtype in (torch.int64, torch.int32)
        )  # fmt: skip
        assert_rows(wide, [2, 2, 2, 20, 20, 20])
        assert torch.equal(wide.cpu(), narrow.cpu())
        for boundaries, error, words in (
            (torch.tensor([0, 3, 2**31 + 5]), ValueError, ("int32", "2147483653")),
            (torch.tensor([0, 4, 8, 12]), ValueError, ("12", "4")),
            (torch.tensor([0, 4, 3, 6]), ValueError, ("non-decreasing", "4 then 3")),
            (torch.tensor([0.0, 3.0, 6.0]), TypeError, ("float32",)),
        ):
            given = v[:4] if "12" in words else v
            with pytest.raises(error) as refusal:
                pa.attention(
                    given, given, given, structure=pa.Packed.from_cu_seqlens(boundaries), backend=self.on.full(backend)
                )
            assert all(word in str(refusal.value) for word in ("cu_seqlens", *words))

    @pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
    def test_7_a_row_that_a_mask_hides_is_zero_without_nan(self, backend: Name, plane: torch.Tensor) -> None:
        v, q = self.on.here(batch((2, 4, 8))), self.on.here(torch.zeros(1, 2, 2, 64))
        out = self.on.attend(backend, q, torch.zeros_like(v), v, structure=pa.Mask.pairs(plane.to(self.on.device)))
        assert_rows(out, [[3.0, 0.0]])

    @pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
    def test_7_the_lse_of_a_row_that_a_mask_hides_is_minus_infinity(self, backend: Name, plane: torch.Tensor) -> None:
        v, q = self.on.here(batch((2, 4, 8))), self.on.here(torch.zeros(1, 2, 2, 64))
        hidden = pa.Mask.pairs(plane.to(self.on.device))
        _, lse = self.on.attend(backend, q, torch.zeros_like(v), v, structure=hidden, return_lse=True)
        assert lse[0, :, 0].tolist() == pytest.approx([math.log(2)] * 2, rel=1e-3)
        assert lse[0, :, 1].tolist() == [-INF] * 2

    @pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
    def test_7_gradients_through_a_row_that_a_mask_hides_are_finite(self, backend: Name, plane: torch.Tensor) -> None:
        q, k, v = (self.on.here(torch.zeros(1, rows, 2, 64)).requires_grad_() for rows in (2, 3, 3))
        self.on.attend(backend, q, k, v, structure=pa.Mask.pairs(plane.to(self.on.device))).sum().backward()
        assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))
        assert v.grad is not None
        assert v.grad[0, :, 0, 0].tolist() == pytest.approx([0.5, 0.5, 0.0], rel=2e-2)

    def test_7_gradients_through_documents_and_samples_without_keys_are_finite(self, backend: Name) -> None:
        documents = pa.Packed.from_lengths([2, 1, 0, 2], [2, 0, 2, 1])
        q, k, v = (self.on.drawn(5, 2, 64, seed=seed).requires_grad_() for seed in range(3))
        self.on.attend(backend, q, k, v, structure=documents).sum().backward()
        assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))
        assert k.grad is not None
        assert bool((k.grad[2:4] == 0).all()), "of the document without queries"
        q, k, v = (self.on.drawn(2, 3, 2, 64, seed=seed).requires_grad_() for seed in range(3))
        hidden = pa.KeyPadding.from_lengths([3, 0], 3)
        self.on.attend(backend, q, k, v, structure=hidden).sum().backward()
        assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))
        assert all(bool((tensor.grad[1] == 0).all()) for tensor in (q, k, v) if tensor.grad is not None)

    def test_7_documents_and_samples_without_keys_are_zero_with_an_lse_of_minus_infinity(self, backend: Name) -> None:
        v = self.on.here(values(2, 4, 8, dim=128))
        documents = pa.Packed.from_lengths([2, 1], [0, 3])
        assert_rows(self.on.attend(backend, torch.zeros_like(v), v, v, structure=documents), [0, 0, 14 / 3])
        samples = self.on.here(batch((2, 4, 8), (2, 4, 8), dim=128))
        for queries in ("same", "all"):
            hidden = pa.KeyPadding.from_lengths([3, 0], 3, queries=queries)
            out = self.on.attend(backend, torch.zeros_like(samples), samples, samples, structure=hidden)
            assert_rows(out, [[14 / 3] * 3, [0.0] * 3])
        _, lse = self.on.attend(backend, torch.zeros_like(v), v, v, structure=documents, return_lse=True)
        assert lse[:, :2].cpu().tolist() == [[-INF] * 2] * 2
        assert lse[0, 2].item() == pytest.approx(math.log(3), rel=1e-3)

    def test_7_a_nan_of_the_callers_own_is_not_taken_for_a_row_without_keys(self, package: Name) -> None:
        q, v = self.on.here(torch.zeros(1, 2, 2, 64)), self.on.here(batch((1, 3, 5)))
        q[0, 0, 0, 0] = NAN
        out = self.on.attend(package, q, v, v)
        assert bool(out[0, 0, 0].isnan().all())
        assert_rows(out[:, 1:], [[3.0]])

    def test_10_causal_ends_on_the_last_key(self, backend: Name) -> None:
        for queries, keys, expected in ((2, (1, 2, 3, 4, 5), [2.5, 3.0]), (5, (4, 8), [0, 0, 0, 4, 6])):
            v, q = self.on.here(batch(keys)), self.on.here(torch.zeros(1, queries, 2, 64))
            assert_rows(self.on.attend(backend, q, v, v, causal=True), [expected])
        v, q = self.on.here(values(1, 2, 3, 4, 5, 4, 8)), self.on.here(torch.zeros(4, 2, 64))
        documents = pa.Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
        assert_rows(self.on.attend(backend, q, v, v, structure=documents, causal=True), [2.5, 3, 4, 6])

    @pytest.mark.parametrize("layout", ["transposed", "packed", "step"])
    def test_12_a_strided_v_gives_the_contiguous_bits(self, backend: Name, layout: str) -> None:
        contiguous = self.on.here(strided_values()[0])
        given = strided_values()[1][layout]
        v = torch.empty_strided(given.shape, given.stride(), dtype=contiguous.dtype, device=self.on.device).copy_(
            contiguous
        )
        q = self.on.here(torch.zeros(1, 6, 2, 4))
        out = self.on.attend(backend, q, q, v)
        want = torch.tensor([[25.0, 26, 27, 28], [125, 126, 127, 128]])
        torch.testing.assert_close(out[0, 0].cpu().float(), want, rtol=2e-2, atol=0)
        assert torch.equal(out.cpu(), self.on.attend(backend, q, q, contiguous).cpu())
        assert torch.equal(v.cpu(), contiguous.cpu())

    def test_12_expanded_keys_and_values(self, backend: Name) -> None:
        q = self.on.drawn(1, 5, 4, 64)
        k, v = (self.on.drawn(1, 33, 1, 64, seed=seed).expand(1, 33, 4, 64) for seed in (1, 2))
        assert_near(self.on.attend(backend, q, k, v), exact(q, k.contiguous(), v.contiguous()))

    @pytest.mark.parametrize("case", EMPTY)
    def test_16_empty_calls_answer_with_zeros_of_the_right_shape(self, backend: Name, case: str) -> None:
        q_shape, k_shape, structure = EMPTY[case]
        q, k = self.on.here(torch.ones(q_shape)), self.on.here(torch.ones(k_shape))
        out = self.on.attend(backend, q, k, k, structure=structure and structure())
        assert torch.equal(out.cpu(), torch.zeros(q_shape, dtype=self.on.half))
        assert (out.dtype, out.device) == (q.dtype, q.device)

    @pytest.mark.parametrize("case", EMPTY)
    def test_16_the_lse_of_empty_calls_is_minus_infinity(self, backend: Name, case: str) -> None:
        q_shape, k_shape, structure = EMPTY[case]
        q, k = self.on.here(torch.ones(q_shape)), self.on.here(torch.ones(k_shape))
        _, lse = self.on.attend(backend, q, k, k, structure=structure and structure(), return_lse=True)
        assert torch.equal(lse.cpu(), torch.full((*q_shape[:-3], 2, q_shape[-3]), -INF))

    @pytest.mark.parametrize("case", EMPTY)
    def test_16_compiled_calls_answer_like_eager_ones(self, backend: Name, case: str) -> None:
        q_shape, k_shape, structure = EMPTY[case]
        q, k = self.on.here(torch.ones(q_shape)), self.on.here(torch.ones(k_shape))
        given = structure and structure()
        self.on.attend(backend, q, k, k, structure=given)  # skips what is refused, with its reasons
        torch.compiler.reset()
        compiled = torch.compile(
            lambda q, k: pa.attention(q, k, k, structure=given, backend=self.on.full(backend)), backend="eager",
            fullgraph=True,
        )  # fmt: skip
        out = compiled(q, k)
        assert torch.equal(out.cpu(), torch.zeros(q_shape, dtype=self.on.half))
        assert (out.dtype, out.device) == (q.dtype, q.device)

    def test_16_empty_documents_among_others(self, backend: Name) -> None:
        v = self.on.here(values(1, 3, 5))
        documents = pa.Packed.from_lengths([0, 2, 1, 0], [2, 1, 0, 0])
        assert_rows(self.on.attend(backend, torch.zeros_like(v), v, v, structure=documents), [5, 5, 0])

    def test_35_quantisation_that_the_backend_has_not_is_refused_at_construction(self, backend: Name) -> None:
        with pytest.raises(NotImplementedError) as refusal:
            pa.Attention(2, 64, backend=self.on.full(backend), quant="fp8")
        assert all(word in str(refusal.value) for word in (self.on.full(backend) or "", self.on.platform, "'fp8'"))
        with pytest.raises(ValueError, match=r"'fp9'.*fp8.*int8"):
            pa.Attention(2, 64, backend=self.on.full(backend), quant="fp9")
        q = self.on.here(torch.zeros(1, 4, 2, 64))
        skipping = pa.Attention(
            2, 64, backend=self.on.full(backend), quant=pa.Quant("fp8", skip_layers=(3,)), prefix="blocks.3.attn"
        )
        skipping(q, q, q, pa.Packed.from_lengths([4]))  # which each of them has
        assert any("fp8 skipped" in note and "layer 3" in note for note in skipping.last_route.notes)

    @pytest.mark.parametrize("table", [
        [[2, 0, -1]], [[2, 0, 3]], [[2, 0, 99]], torch.tensor([[2, 0, -1]]),
        torch.tensor([[2, 0, -1]], dtype=torch.int32),
    ], ids=["missing", "nan page", "past the pool", "int64", "int32"])  # fmt: skip
    def test_36_only_the_rows_within_the_length_are_read(self, backend: Name, table: Any) -> None:
        v, q = self.pages_of_16(), self.on.here(torch.zeros(1, 1, 2, 64))
        out = self.on.attend(backend, q, v, v, structure=pa.Paged(table, [17]))
        assert_rows(out, [[(16 * 25.5 + 5) / 17]])

    def test_36_a_row_of_length_0_is_zero_and_tables_that_cannot_be_are_refused_by_name(self, backend: Name) -> None:
        v = self.pages_of_16()
        q = self.on.here(torch.zeros(2, 1, 2, 64))
        assert_rows(self.on.attend(backend, q, v, v, structure=pa.Paged([[3, 0], [2, 0]], [0, 16])), [[0.0], [25.5]])
        for table, error, words in (
            ([[2, 7, -1]], ValueError, ("7", "4")),
            ([[2, -1, -1]], ValueError, ("row 0", "slot 1")),
            (torch.tensor([[2.0, 0.0]]), TypeError, ("float32",)),
            (torch.tensor([2, 0]), ValueError, ("[batch, max_pages]", "[2]")),
        ):
            with pytest.raises(error) as refusal:
                pa.attention(v[:1, :1], v, v, structure=pa.Paged(table, [17]), backend=self.on.full(backend))
            assert all(word in str(refusal.value) for word in ("block_table", *words))

    @pytest.mark.parametrize("width", [40, 72, 80, 160, 256, 512])
    def test_40_any_head_size_is_served_or_refused_with_those_there_are(self, backend: Name, width: int) -> None:
        v = self.on.here(batch((1, 2, 3, 6), dim=width))
        with pa.record_routes() as log:
            out = self.on.attend(backend, torch.zeros_like(v), v, v)
        assert out.shape == v.shape
        assert_rows(out, [[3.0] * 4])
        self.check_width(backend, width, log.entries[0].route)
        short = self.on.here(batch(range(1, 15)))
        assert_rows(self.on.attend(backend, torch.zeros_like(short), short, short), [[7.5] * 14])

    def test_20_the_device_is_nobody_elses(self) -> None:
        if self.on.emulated:
            pytest.skip("the process is the CPU's; tests/emulators/test_info.py asks this of one that is the vendor's")
        platform, on = pa.current_platform, self.on
        found = (platform.name, platform.device_type, platform.collective_backend)
        assert found == (on.vendor, on.device, on.collective)
        assert getattr(platform, f"is_{on.vendor}")()
        assert not platform.is_cuda()
