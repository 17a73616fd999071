"""The generic slots on fake CUDA tensors: any read of a tensor's data raises there."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from polyattn import structures
from polyattn.backends import generic
from tests.unit.backends.running import DEFAULTS, kind_of

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch is built for CUDA and finds no driver, which even fake CUDA tensors ask for",
)
DENSE = (2, 6, 4, 8), (2, 6, 2, 8)
TOKENS = (10, 4, 8), (10, 2, 8)
POOL = (4, 2, 2, 8)


def on_host():
    holes = structures.KeyPadding.from_mask(torch.tensor([[1, 0, 1, 1, 0, 0], [1] * 6]) > 0, queries="all")
    padding = structures.KeyPadding.from_lengths([5, 3], 6, queries="same")
    for known in (holes, padding):
        assert known.host.ranges  # read before the trap is set
    table = [[1, 0], [2, -1]]
    return {
        "dense": (None, *DENSE),
        "padding": (padding, *DENSE),
        "holes": (holes, *DENSE),
        "prefix": (structures.KeyPadding.from_lengths([4, 4], 6, queries="same"), *DENSE),
        "mask": (structures.Mask(torch.ones(2, 6, 6).tril() > 0), *DENSE),
        "bias": (structures.Mask(torch.zeros(2, 1, 1, 6)), *DENSE),
        "spans": (structures.Spans([[(1, 3)], [(2, 5)]]), *DENSE),
        "packed": (structures.Packed.from_lengths([2, 2, 5]), *TOKENS),
        "packed spans": (structures.Packed.from_lengths([2, 2, 5], spans=[[], [], [(1, 3)]]), *TOKENS),
        "paged": (structures.Paged(table, [3, 2]), (2, 2, 4, 8), POOL),
        "paged packed": (structures.Paged(table, [3, 2], [2, 1]), (3, 4, 8), POOL),
        "paged padded": (structures.Paged(table, [3, 2], [2, 1]), (2, 3, 4, 8), POOL),
    }


def on_device():
    def integers(*shape):
        return torch.zeros(*shape, dtype=torch.int32, device="cuda")

    bounds, table = integers(4), integers(2, 2)
    keep = torch.ones(2, 6, dtype=torch.bool, device="cuda")
    return {
        "padding": (structures.KeyPadding.from_mask(keep, queries="same"), *DENSE),
        "lengths": (structures.KeyPadding.from_lengths(integers(2), 6, queries="all"), *DENSE),
        "mask": (structures.Mask(torch.ones(2, 6, 6, device="cuda") > 0), *DENSE),
        "bias": (structures.Mask(torch.zeros(2, 4, 6, 6, device="cuda")), *DENSE),
        "packed": (structures.Packed.from_cu_seqlens(bounds, max_q=5), *TOKENS),
        "packed cross": (structures.Packed.from_cu_seqlens(bounds, integers(4), 5, 5), *TOKENS),
        "paged": (structures.Paged(table, integers(2)), (2, 2, 4, 8), POOL),
        "paged packed": (structures.Paged(table, integers(2), integers(2)), (3, 4, 8), POOL),
        "paged padded": (structures.Paged(table, integers(2), integers(2)), (2, 3, 4, 8), POOL),
    }


def slots_of(backend, structure):
    kind = {"mask": "mask"}.get(kind_of(structure), kind_of(structure))
    unknown = structure is not None and not structure.facts.host and kind in ("packed", "paged")
    return [] if backend == "sdpa" and unknown else [getattr(generic, f"{backend}_{kind}")]


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (1, 1)}])
def test_nothing_is_read(backend, where, call):
    known = on_host()
    ran = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, (structure, q_shape, k_shape) in (known if where == "host" else on_device()).items():
            if "window" in call and structure is not None and structure.facts.spans:
                continue
            q = torch.zeros(q_shape, dtype=torch.float16, device="cuda")
            k = torch.zeros(k_shape, dtype=torch.float16, device="cuda")
            meta = None if structure is None else structure.bind(q.device, q.shape, k.shape)
            extra = {"softcap": 1.0, "need_lse": True} if backend == "blocked" else {}
            for slot in slots_of(backend, structure):
                out, lse = slot(q, k, k, None, meta=meta, **{**DEFAULTS, **call, **extra})
                assert (out.shape, out.device) == (q.shape, q.device), name
                if extra:
                    assert lse.shape == ((2, 4, q_shape[1]) if len(q_shape) == 4 else (4, q_shape[0])), name
                ran += 1
    assert ran >= 4


def test_the_trap_closes_on_a_read():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.zeros(1, device="cuda").any())
