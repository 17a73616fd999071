"""Public fault reports about choosing a backend, as small inputs with the right outcome.

The numbers are rows of knowledge/fault_cases.md.
"""

import gc
import importlib
import importlib.util
import sys
from functools import partial

import pytest
import torch

import polyattn as pa
from polyattn.operators import define_once
from tests.unit import fault_backends
from tests.unit.fault_values import assert_rows, batch, values


@pytest.fixture(scope="module", autouse=True)
def _limited_backends(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    fault_backends.install(site)
    yield
    fault_backends.remove(site)


# 1: a backend of one document


def test_1_a_backend_of_one_document_is_routed_round_or_refuses():
    v = values(1, 3, 5, 7, 8, 9)
    three, one = pa.Packed.from_lengths([2, 1, 3]), pa.Packed.real_and_pad(2, 6)
    call = partial(pa.attention, torch.zeros_like(v), v, v)
    assert_rows(call(structure=one, backend="one_document"), [2, 2, 0, 0, 0, 0])
    assert_rows(call(structure=three, backend="one_document,auto"), [2, 2, 5, 8, 8, 8])
    with pytest.raises(ValueError, match=r"(?s)one_document.*3 documents"):
        call(structure=three, backend="one_document")


# 14: a dtype that the preferred backend does not take


def test_14_another_dtype_takes_another_route_for_that_call_alone():
    torch.manual_seed(0)
    layer = pa.Attention(2, 64, backend="flash,auto")
    q, k, v = torch.randn(3, 1, 4, 2, 64).unbind()
    out = layer(q, k, v)
    assert layer.last_route.name == "cpu:sdpa"
    assert any("float32" in reason for reason in layer.last_route.reasons["flash"])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), pa.reference_attention(q, k, v), atol=1e-5, rtol=0)
    half = [tensor.bfloat16() for tensor in (q, k, v)]
    layer(*half)
    assert layer.last_route.name == "cpu:flash"
    with pytest.raises(TypeError, match=r"float32.*float32.*bfloat16"):
        layer(q, k, half[2])
    with pytest.raises(pa.UnsupportedRequest, match=r"(?s)flash.*float32"):
        pa.attention(q, k, v, backend="flash")


# 17: the backend variable


@pytest.fixture
def chosen(monkeypatch):
    """chosen(text) sets POLYATTN_BACKEND and returns the route that a call then takes."""

    def choose(text):
        monkeypatch.setenv("POLYATTN_BACKEND", text)
        pa.reload_environment()
        with pa.record_routes() as log:
            pa.attention(*torch.zeros(3, 1, 4, 2, 64).unbind())
        return log.entries[0].route

    yield choose
    monkeypatch.undo()
    pa.reload_environment()


def test_17_a_misspelt_backend_is_an_error_that_lists_the_names(chosen):
    with pytest.raises(ValueError) as refusal:
        chosen("FLASH_ATTNN")
    assert all(word in str(refusal.value) for word in ("POLYATTN_BACKEND", "FLASH_ATTNN", "sdpa", "blocked"))


def test_17_blanks_and_capitals_do_not_matter_and_a_later_change_is_obeyed_after_the_reset(chosen, monkeypatch):
    assert chosen(" BLOCKED ") == "cpu:blocked"
    assert chosen("Sdpa") == "cpu:sdpa"
    monkeypatch.setenv("POLYATTN_BACKEND", "blocked")
    q = torch.zeros(1, 4, 2, 64)
    assert pa.explain(q, q, q).chosen.name == "cpu:sdpa"
    pa.reload_environment()
    assert pa.explain(q, q, q).chosen.name == "cpu:blocked"


def test_17_empty_is_unset(chosen):
    assert chosen("") == chosen("  ") == "cpu:sdpa"


def test_17_a_backend_whose_package_is_absent_is_an_import_error_naming_it(chosen):
    with pytest.raises(ImportError, match="sage-kernels-of-nobody"):
        chosen("absent")


def test_17_only_the_default_falls_back_and_says_why():
    q = torch.zeros(1, 4, 2, 64)
    route = pa.explain(q, q, q).chosen
    assert any("sage-kernels-of-nobody" in reason for reason in route.reasons["absent"])
    with pytest.raises(ImportError, match="sage-kernels-of-nobody"):
        pa.attention(q, q, q, backend="absent")


# 28: operators defined twice


def test_28_reloading_and_a_second_name_define_nothing_twice():
    import polyattn.traced as traced

    q = torch.randn(1, 4, 2, 8)
    compiled = torch.compile(lambda q: pa.attention(q, q, q), backend="eager", fullgraph=True)
    before = compiled(q)
    importlib.reload(traced)
    spec = importlib.util.spec_from_file_location("traced_again", traced.__file__)
    again = importlib.util.module_from_spec(spec)
    sys.modules["traced_again"] = again
    spec.loader.exec_module(again)
    del sys.modules["traced_again"]
    gc.collect()
    torch._dynamo.reset()
    assert torch.equal(compiled(q), before)


def test_28_equal_schemas_are_shared_and_unequal_ones_refused():
    schema = "(Tensor q, float scale) -> Tensor"

    def run(q, scale):
        return q * scale

    def define(schema, run=run):
        return define_once("fault_28::attn", schema, run, lambda q, scale: torch.empty_like(q))

    first = define(schema)
    assert define(schema, run=lambda q, scale: q) is first
    with pytest.raises(RuntimeError) as refusal:
        define("(Tensor q, int scale) -> Tensor")
    assert all(word in str(refusal.value) for word in ("fault_28::attn", "float scale", "int scale"))
    del first, run
    gc.collect()
    assert torch.ops.fault_28.attn(torch.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert torch.ops.fault_28.attn(torch.ones(2, device="meta"), 3.0).shape == (2,)


# 35: quantisation that a backend lacks


@pytest.mark.parametrize(
    ("backend", "words"), [(None, ("int8",)), ("int8_only", ("int8_only", "int8")), ("sdpa", ("sdpa",))]
)
def test_35_quantisation_that_no_backend_has_is_refused_at_construction(backend, words):
    with pytest.raises(NotImplementedError) as refusal:
        pa.Attention(2, 64, backend=backend, quant="fp8")
    assert all(word in str(refusal.value) for word in ("cpu", "'fp8'", *words))


def test_35_an_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match=r"'fp9'.*fp8.*int8"):
        pa.Attention(2, 64, quant="fp9")


def test_35_auto_is_unquantised_and_an_opt_out_is_on_record():
    q = torch.zeros(1, 4, 2, 64)
    pa.Attention(2, 64, quant="auto")(q, q, q)
    skipping = pa.Attention(2, 64, quant=pa.Quant("int8", skip_layers=(3,)), prefix="blocks.3.attn")
    skipping(q, q, q)
    assert skipping.last_route.request.quant is None
    assert any("int8 skipped" in note and "layer 3" in note for note in skipping.last_route.notes)


# 40: head sizes outside a backend's list


@pytest.mark.parametrize("dim", [40, 72, 80, 160, 256, 512])
def test_40_every_head_size_is_served(dim):
    v = batch((1, 2, 3, 6), dim=dim)
    for choice in (None, "listed,auto"):
        layer = pa.Attention(2, dim, backend=choice)
        assert_rows(layer(torch.zeros_like(v), v, v), [[3.0] * 4])
    if dim <= 128:
        assert layer.last_route.name == "pad(cpu:listed)"
    else:
        assert layer.last_route.name == "cpu:sdpa"
        assert any(f"head_dim {dim} not in (64, 96, 128)" in why for why in layer.last_route.reasons["listed"])


def test_40_a_forced_backend_refuses_with_the_same_facts():
    q = torch.zeros(1, 4, 2, 160)
    with pytest.raises(ValueError, match=r"(?s)listed.*head_dim 160 not in \(64, 96, 128\)"):
        pa.attention(q, q, q, backend="listed")


def test_40_a_sequence_shorter_than_the_block_takes_the_dense_route():
    q = torch.randn(1, 14, 2, 64)
    layer = pa.Attention(2, 64, backend="listed,auto")
    assert layer(q, q, q).isfinite().all()
    assert layer.last_route.name == "cpu:sdpa"
    assert any("14 query rows" in why for why in layer.last_route.reasons["listed"])
