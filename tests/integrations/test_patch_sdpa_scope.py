"""Where a `patch_sdpa` scope begins and ends: errors, threads, other libraries' patches, checkpoints, graphs."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import polyattn as pa

TORCHS = torch._C._nn.scaled_dot_product_attention
Q = torch.randn(2, 4, 5, 8)


def count(log):
    return sum(entry.count for entry in log.entries)


def attend(q):
    return F.scaled_dot_product_attention(q, q, q) * 2


class TestRestored:
    def test_after_an_error(self):
        with pytest.raises(KeyError), pa.patch_sdpa():
            raise KeyError
        with pa.record_routes() as log:
            attend(Q)
        assert F.scaled_dot_product_attention is TORCHS
        assert log.entries == []

    def test_what_another_library_had_put_there_serves_other_threads_and_is_there_again(self, monkeypatch):
        seen = []

        def theirs(*args, **kwargs):
            seen.append(threading.get_ident())
            return TORCHS(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        with pa.patch_sdpa():
            attend(Q)
            other = threading.Thread(target=attend, args=(Q,))
            other.start()
            other.join()
        assert seen == [other.ident]
        assert F.scaled_dot_product_attention is theirs

    def test_what_another_library_puts_there_meanwhile_stays(self, monkeypatch):
        monkeypatch.setattr(F, "scaled_dot_product_attention", TORCHS)  # puts it back after this test

        def theirs(*args, **kwargs):
            return TORCHS(*args, **kwargs)

        with pa.patch_sdpa():
            F.scaled_dot_product_attention = theirs
        assert F.scaled_dot_product_attention is theirs

    def test_the_end_of_another_threads_scope_does_not_end_ours(self):
        entered, left = threading.Event(), threading.Event()

        def scope():
            with pa.patch_sdpa():
                entered.set()
            left.set()

        with pa.record_routes() as log:
            with pa.patch_sdpa():
                threading.Thread(target=scope).start()
                assert entered.wait(10)
                assert left.wait(10)
                attend(Q)
            attend(Q)
        assert count(log) == 1
        assert F.scaled_dot_product_attention is TORCHS


class TestStockModules:
    def test_torchs_fused_path_of_an_encoder_layer_does_not_go_round_it(self):
        layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        tokens = torch.randn(2, 5, 16)
        padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        with torch.no_grad():
            theirs = layer(tokens, src_key_padding_mask=padded)
            with pa.patch_sdpa(), pa.record_routes() as log:
                ours = layer(tokens, src_key_padding_mask=padded)
        assert count(log) == 1
        torch.testing.assert_close(ours[~padded], theirs[~padded], atol=1e-5, rtol=0)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpoint_computes_again_what_it_computed(self, reentrant):
        gradients = []
        for scope, calls in ((pa.patch_sdpa(), 2), (nullcontext(), 0)):
            q = Q.clone().requires_grad_()
            with scope, pa.record_routes() as log:
                checkpoint(attend, q, use_reentrant=reentrant).square().sum().backward()
            assert count(log) == calls
            gradients.append(q.grad)
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


class TestCompiled:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    def test_a_scope_around_a_compiled_function_holds_in_its_one_graph_and_no_longer(self):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        with pa.record_routes() as log:
            for _ in range(2):
                with pa.patch_sdpa():
                    ours = compiled(Q)
            assert count(log) == 2
            theirs = compiled(Q)
        assert count(log) == 2
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)

    def test_a_scope_inside_breaks_the_graph_and_a_full_graph_says_where_to_put_it(self):
        def inside(q):
            with pa.patch_sdpa():
                return attend(q)

        with pa.record_routes() as log:
            ours = torch.compile(inside, backend="aot_eager")(Q)
        assert count(log) == 1
        torch.testing.assert_close(ours, attend(Q), atol=1e-5, rtol=0)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="enter it around the compiled function"):
            torch.compile(inside, backend="aot_eager", fullgraph=True)(Q)
