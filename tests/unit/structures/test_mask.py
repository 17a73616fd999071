"""Mask: one meaning per rank; size 1 broadcasts on every axis but Sk."""

import numpy
import pytest
import torch

import polyattn as pa

CPU = torch.device("cpu")
B, H, Sq, Sk = 2, 4, 3, 5
Q, K = (B, Sq, H, 8), (B, Sk, 2, 8)


@pytest.mark.parametrize(("shape", "as_rank_4"), [
    ((Sk,), (1, 1, 1, Sk)),
    ((B, Sk), (B, 1, 1, Sk)),
    ((1, Sk), (1, 1, 1, Sk)),
    ((B, Sq, Sk), (B, 1, Sq, Sk)),
    ((1, 1, Sk), (1, 1, 1, Sk)),
    ((B, H, Sq, Sk), (B, H, Sq, Sk)),
    ((1, H, 1, Sk), (1, H, 1, Sk)),
])  # fmt: skip
def test_each_rank_has_one_meaning(shape, as_rank_4):
    mask = pa.Mask(torch.ones(shape, dtype=torch.bool))
    assert mask.tensor.shape == as_rank_4
    assert mask.facts.mask_shape == as_rank_4
    mask.check(Q, K)


def test_keys_and_pairs_say_which_is_meant():
    assert pa.Mask.keys(torch.ones(Sk)).tensor.shape == (1, 1, 1, Sk)
    assert pa.Mask.keys(torch.ones(B, Sk)).tensor.shape == (B, 1, 1, Sk)
    assert pa.Mask.pairs(torch.ones(Sq, Sk)).tensor.shape == (1, 1, Sq, Sk)
    for make, bad, words in (
        (pa.Mask.keys, torch.ones(1, Sq, Sk), r"\[Sk\] or \[B, Sk\]"),
        (pa.Mask.pairs, torch.ones(Sk), r"\[Sq, Sk\]"),
        (pa.Mask.pairs, torch.ones(B, Sq, Sk), r"\[Sq, Sk\]"),
    ):
        with pytest.raises(ValueError, match=words):
            make(bad)


def test_a_rank_2_of_query_rows_is_refused_with_the_hint():
    with pytest.raises(ValueError, match=r"rank 2 means \[B=2, Sk=5\], got \[3, 5\].*Mask\.pairs"):
        pa.Mask(torch.ones(Sq, Sk)).check(Q, K)
    with pytest.raises(ValueError, match=r"rank 2 means \[B=2, Sk=5\], got \[7, 5\]$"):
        pa.Mask(torch.ones(7, Sk)).check(Q, K)


@pytest.mark.parametrize(("shape", "words"), [
    ((1,), "Sk=5"), ((B, 1), "Sk=5"), ((B, Sq, 1), "Sk=5"), ((Sk + 1,), "Sk=5"),
    ((H, Sq, Sk), "axis B"), ((B, Sk, Sk), "axis Sq"), ((B, 2, Sq, Sk), "axis H"), ((B, H, Sq, Sq), "Sk=5"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        pa.Mask(torch.ones(shape)).check(Q, K)


@pytest.mark.parametrize("bad", [torch.ones(()), torch.ones(1, 1, 1, 1, 1)])
def test_other_ranks_are_refused(bad):
    with pytest.raises(ValueError, match="rank 1 to 4"):
        pa.Mask(bad)


@pytest.mark.parametrize(
    "bad", ["mask", None, 1, torch.ones(4, dtype=torch.complex64), torch.ones(4).to(torch.float8_e5m2)], ids=str
)
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match="mask"):
        pa.Mask(bad)


@pytest.mark.parametrize(
    "given", [[[1, 0, 1]], numpy.array([[1, 0, 1]]), [[True, False, True]], torch.tensor([[7, 0, -1]])], ids=repr
)
def test_nonzero_may_attend(given):
    mask = pa.Mask(given)
    assert not mask.additive
    assert mask.facts.mask_dtype == "bool"
    assert mask.tensor.tolist() == [[[[True, False, True]]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_additive_entry_at_or_below_the_finite_minimum_of_its_dtype_hides(dtype):
    lowest = torch.finfo(dtype).min
    mask = pa.Mask(torch.tensor([lowest, float("-inf"), lowest / 2, 0.0], dtype=dtype))
    assert mask.additive
    meta = mask.bind(CPU, (1, 2, 1, 8), (1, 4, 1, 8))
    assert meta.keep is None
    assert meta.bias.flatten().isneginf().tolist() == [True, True, False, False]
    assert meta.visible_keys.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_in_a_host_mask_are_refused(bad):
    with pytest.raises(ValueError, match="NaN or \\+inf"):
        pa.Mask([0.0, bad])
    with pytest.raises(ValueError, match="NaN or \\+inf"):
        pa.Mask.pairs([[0.0, bad]])


@pytest.mark.parametrize(("mask", "visible"), [
    (pa.Mask([True, True, False]), [[True, True, False]]),
    (pa.Mask([[True, True, False], [True, True, True]]), [[True, True, False], [True, True, True]]),
    (pa.Mask.pairs([[True, False, False], [False, False, True]]), [[True, False, True]]),
    (pa.Mask.pairs([[0.0, float("-inf"), 0.0], [0.0, float("-inf"), 1.0]]), [[True, False, True]]),
    (pa.Mask.pairs([[True, False, True], [False, True, True]]), None),
    (pa.Mask([0.0, -5.0, 1.0]), None),
], ids=["keys", "rows", "pairs", "additive", "pairs that hide none", "nothing hidden"])  # fmt: skip
def test_keys_that_no_query_may_see_are_known(mask, visible):
    batch, _, queries, _ = mask.tensor.shape
    queries = queries if queries > 1 else 2
    meta = mask.bind(CPU, (batch, queries, 1, 8), (batch, 3, 1, 8))
    assert (None if meta.visible_keys is None else meta.visible_keys.tolist()) == visible


def test_keys_hidden_by_a_device_mask_are_found_without_reading_it():
    for shape in ((1, 3), (1, 2, 3)):
        meta = pa.Mask(torch.ones(shape, device="meta")).bind(torch.device("meta"), (1, 2, 1, 8), (1, 3, 1, 8))
        assert meta.visible_keys.shape == (1, 3)


def test_a_host_mask_that_hides_nothing_says_so_on_every_device():
    meta = pa.Mask(torch.zeros(1, 3)).bind(torch.device("meta"), (1, 2, 1, 8), (1, 3, 1, 8))
    assert meta.visible_keys is None


def test_a_mask_that_wants_a_gradient_is_derived_anew_and_stays_the_callers():
    bias = torch.zeros(1, 1, 2, 3, requires_grad=True)
    mask = pa.Mask(bias)
    assert mask.facts.mask_grad
    shapes = (1, 2, 1, 8), (1, 3, 1, 8)
    for _ in range(2):  # a cached graph would be freed by the first backward
        mask.bind(CPU, *shapes).bias.sum().backward()
    assert bias.grad.tolist() == [[[[2.0] * 3] * 2]]
    with torch.no_grad():
        bias.fill_(3.0)
    assert mask.bind(CPU, *shapes).bias.unique().tolist() == [3.0]
