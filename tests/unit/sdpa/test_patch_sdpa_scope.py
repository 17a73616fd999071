"""Where a `patch_sdpa` scope begins and ends: errors, threads, other libraries' patches, checkpoints, graphs."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import polyattn as pa
from polyattn.integrations import patching

TORCHS = torch._C._nn.scaled_dot_product_attention
Q = torch.randn(2, 4, 5, 8)


FIRST = """
import torch
import polyattn as pa
from torch.nn.functional import scaled_dot_product_attention

def attend(q):
    return scaled_dot_product_attention(q, q, q) * 2

q = torch.randn(2, 4, 5, 8)
compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
for scope in (pa.patch_sdpa, torch.no_grad):
    with pa.record_routes() as log, scope():
        compiled(q)
    print(sum(entry.count for entry in log.entries))
print(scaled_dot_product_attention in torch.overrides.get_overridable_functions()[torch.nn.functional])
"""


def both(q):
    return TORCHS(q, q, q) + F.scaled_dot_product_attention(q, q, q)


def broken(q):
    first = TORCHS(q, q, q)
    torch._dynamo.graph_break()
    return first + TORCHS(q, q, q)


def masked(q):
    return TORCHS(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(), scale=0.3)


def autocast(q):
    with torch.autocast("cpu", torch.bfloat16):
        return TORCHS(q, q, q).float()


class Holds(torch.nn.Module):
    """Keeps the function as diffusers' and others' modules do."""

    def __init__(self):
        super().__init__()
        self.attend = TORCHS

    def forward(self, q):
        return self.attend(q, q, q)


#: Compiled code with the function by value, and how many calls it makes.
BY_VALUE = {
    "alone": (lambda q: TORCHS(q, q, q) * 2, 1),
    "beside by name": (both, 2),
    "after a break": (broken, 2),
    "masked": (masked, 1),
    "autocast": (autocast, 1),
    "held by a module": (Holds(), 1),
}


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

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_scope_inside_a_checkpoint_is_there_again_for_a_function_by_value(self, reentrant):
        def scoped(q):
            with pa.patch_sdpa():
                return TORCHS(q, q, q) * 2

        q = Q.clone().requires_grad_()
        with pa.record_routes() as log:
            checkpoint(scoped, q, use_reentrant=reentrant).square().sum().backward()
        assert count(log) == 2


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

    @pytest.mark.parametrize("name", BY_VALUE)
    def test_a_function_imported_by_value_is_caught_in_the_graph(self, name):
        """As by name, beside it, after a break, and under other modes; and no longer than the scope lasts."""
        function, calls = BY_VALUE[name]
        compiled = torch.compile(function, backend="aot_eager")
        theirs = function(Q)
        for _ in range(2):
            with pa.record_routes() as log:
                with pa.patch_sdpa():
                    ours = compiled(Q)
                assert count(log) == calls
                torch.testing.assert_close(ours, theirs, atol=1e-2 if name == "autocast" else 1e-5, rtol=0)
                compiled(Q)
            assert count(log) == calls

    def test_it_is_so_where_dynamo_is_first_asked_within_a_scope(self):
        """Dynamo remembers for the whole process which functions may be overridden: torch's own must be there."""
        told = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
        assert (told.returncode, told.stdout.split()) == (0, ["1", "0", "True"]), told.stderr

    def test_a_scope_inside_breaks_the_graph_and_a_full_graph_says_where_to_put_it(self):
        def inside(q):
            with pa.patch_sdpa():
                return attend(q)

        with pa.record_routes() as log:
            ours = torch.compile(inside, backend="aot_eager")(Q)
        assert count(log) == 1
        torch.testing.assert_close(ours, attend(Q), atol=1e-5, rtol=0)
        torch.compiler.reset()
        assert patching._BREAK or torch.__version__ < "2.8"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=patching._BREAK.get("msg")):
            torch.compile(inside, backend="aot_eager", fullgraph=True)(Q)
