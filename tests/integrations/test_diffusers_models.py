"""Real diffusers models give the same outputs and gradients through polyattn as with diffusers' own attention."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import polyattn as pa
from polyattn.integrations.diffusers import use_polyattn
from tests.integrations.diffusers_cases import TOLERANCE, Case, both, difference, outcome
from tests.integrations.diffusers_image_models import IMAGE_MODELS
from tests.integrations.diffusers_video_models import VIDEO_MODELS

MODELS = (*IMAGE_MODELS, *VIDEO_MODELS)
MASKED = tuple(case for case in MODELS if case.padded)
RUNS = [pytest.param(case, False, id=str(case)) for case in MODELS] + [
    pytest.param(case, True, id=f"{case}, padded") for case in MASKED
]

pytestmark = [
    # torch's CPU autocast, which Mochi enters with float32, and a name that Chroma still uses
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*FluxPosEmbed.*:FutureWarning"),
]


@pytest.mark.parametrize(("case", "padded"), RUNS)
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_outputs_and_gradients_equal_those_of_the_native_backend(case: Case, padded: bool, backend: str) -> None:
    with pa.use_backend(backend), pa.record_routes() as log:
        theirs, ours = both(case, padded)
    assert log.entries
    assert difference(theirs.outputs, ours.outputs) <= TOLERANCE
    assert difference(theirs.gradients, ours.gradients) <= TOLERANCE


@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_padding_matters(case: Case) -> None:
    model = case.build()
    with torch.no_grad(), use_polyattn(model):
        padded, whole = (model(**case.arguments(hidden))[0] for hidden in (True, False))
    if isinstance(padded, list):  # samples of other sizes
        assert [sample.shape for sample in padded] != [sample.shape for sample in whole]
    else:
        assert (padded - whole).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_attention_of_the_model_is_routed_and_none_after_the_scope(case: Case) -> None:
    model = case.build()
    with torch.no_grad():
        with use_polyattn(model) as routed, pa.record_routes() as log:
            model(**case.arguments(False))
        with pa.record_routes() as later:
            model(**case.arguments(False))
    # Mochi's runs one sample after the other, Cosmos' one modality after the other
    assert sum(entry.count for entry in log.entries) >= len(routed.dispatched) + len(routed.patched)
    assert [name for name in routed.left if "Linear" not in name] == []
    assert later.entries == []


COMPILED = [
    pytest.param(case, case.padded is not None, id=case.cls)
    for case in MODELS
    if case.cls in ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")
]


@pytest.mark.parametrize(("case", "padded"), COMPILED)
def test_a_compiled_model_is_one_graph_and_says_the_same(case: Case, padded: bool) -> None:
    torch.compiler.reset()
    model = case.build()
    theirs = outcome(model, case.arguments(padded), nullcontext())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pa.record_routes() as log:
        ours = outcome(compiled, case.arguments(padded), use_polyattn(model))
    torch.compiler.reset()
    assert log.entries
    assert difference(theirs.outputs, ours.outputs) <= TOLERANCE
    assert difference(theirs.gradients, ours.gradients) <= TOLERANCE
