"""KeyPadding: which keys are kept, and what the host knows of it."""

import pickle

import numpy
import pytest
import torch

import polyattn as pa

CPU, META = torch.device("cpu"), torch.device("meta")
T, F = True, False


def meta_of(padding, queries=None):
    batch, keys = padding.keep.shape
    return padding.bind(CPU, (batch, queries or keys, 1, 8), (batch, keys, 1, 8))


@pytest.mark.parametrize("padding", [
    pa.KeyPadding.from_lengths([2, 0, 3], 3),
    pa.KeyPadding.from_mask([[T, T, F], [F, F, F], [T, T, T]]),
    pa.KeyPadding.from_mask([[5, -1, 0], [0, 0, 0], [1, 1, 1]]),
    pa.KeyPadding.from_mask(numpy.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]])),
    pa.KeyPadding.from_mask(torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.uint8)),
    pa.KeyPadding.from_ranges([[(0, 2)], [], [(0, 1), (1, 3)]], 3),
], ids=["lengths", "bools", "integers", "numpy", "bytes", "ranges"])  # fmt: skip
def test_all_constructors_say_the_same_padding(padding):
    assert padding.keep.tolist() == [[T, T, F], [F, F, F], [T, T, T]]
    assert padding.ranges == (((0, 2),), (), ((0, 3),))
    assert (padding.facts.prefix, padding.facts.common_prefix) == (True, None)
    assert padding.facts.host
    meta = meta_of(padding)
    assert meta.lengths == (2, 0, 3)
    assert meta.seqused.tolist() == [2, 0, 3]
    assert meta.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert meta.indices.tolist() == [0, 1, 6, 7, 8]
    assert (meta.cu_seqlens.dtype, meta.indices.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("padding", [
    pa.KeyPadding.from_mask([[F, T, T, F, T], [T, F, T, F, T]]),
    pa.KeyPadding.from_ranges([[(1, 2), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)]], 5),
], ids=["mask", "ranges"])  # fmt: skip
def test_padding_with_holes(padding):
    assert padding.ranges == (((1, 3), (4, 5)), ((0, 1), (2, 3), (4, 5)))
    assert (padding.facts.prefix, padding.facts.common_prefix) == (False, None)
    assert meta_of(padding).indices.tolist() == [1, 2, 4, 5, 7, 9]


@pytest.mark.parametrize(("lengths", "common"), [([3, 3], 3), ([4, 4], 4), ([0, 0], 0), ([3, 2], None), ([], None)])
def test_one_prefix_that_all_rows_keep_is_a_fact(lengths, common):
    padding = pa.KeyPadding.from_lengths(lengths, 4)
    assert padding.facts.common_prefix == common
    assert padding.facts.prefix
    assert meta_of(padding).common_prefix == common


def test_a_common_number_of_keys_that_is_no_prefix_is_no_common_prefix():
    assert pa.KeyPadding.from_mask([[T, F, T], [T, T, F]]).facts.common_prefix is None


@pytest.mark.parametrize(("make", "words"), [
    (lambda: pa.KeyPadding.from_lengths([4, 5], 4), ("lengths", "row 1", "5", "max_len 4")),
    (lambda: pa.KeyPadding.from_lengths([1], -1), ("max_len", "-1")),
    (lambda: pa.KeyPadding.from_mask([T, F]), ("mask", "[B, Sk]", "[2]", "Mask")),
    (lambda: pa.KeyPadding.from_mask(torch.ones(2, 1, 1, 4)), ("mask", "[B, Sk]", "[2, 1, 1, 4]")),
    (lambda: pa.KeyPadding.from_ranges([[(0, 5)]], 4), ("ranges[0]", "(0, 5)", "max_len 4")),
    (lambda: pa.KeyPadding.from_ranges([[(2, 4), (0, 1)]], 4), ("ranges[0]", "sorted", "(2, 4)", "(0, 1)")),
    (lambda: pa.KeyPadding.from_ranges([[(0, 2), (1, 4)]], 4), ("ranges[0]", "disjoint")),
    (lambda: pa.KeyPadding.from_ranges([[(3, 1)]], 4), ("ranges[0]", "start < end", "[3, 1)")),
    (lambda: pa.KeyPadding.from_lengths([1], 4, queries="some"), ("queries", "'same'", "'all'", "'some'")),
])  # fmt: skip
def test_what_cannot_be_is_a_value_error_that_names_it(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(("make", "words"), [
    (lambda: pa.KeyPadding.from_mask(torch.zeros(2, 4)), ("mask", "bool or integer", "float32", "Mask")),
    (lambda: pa.KeyPadding.from_mask([[0.0, 1.0]]), ("mask", "bool or integer", "float32")),
    (lambda: pa.KeyPadding.from_mask([[T, F], [T]]), ("mask", "rectangular")),
    (lambda: pa.KeyPadding.from_mask("TF"), ("mask", "str")),
    (lambda: pa.KeyPadding.from_lengths([1], 4.0), ("max_len", "float")),
    (lambda: pa.KeyPadding.from_ranges([(0, 2)], 4), ("ranges[0]", "one list of pairs per row")),
])  # fmt: skip
def test_what_is_of_another_type_is_a_type_error_that_names_it(make, words):
    with pytest.raises(TypeError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_shapes_are_checked_on_use():
    padding = pa.KeyPadding.from_lengths([2, 3], 3)
    for q_shape, k_shape, words in (
        ((2, 3, 1, 8), (2, 4, 1, 8), "Sk=3"),
        ((3, 3, 1, 8), (3, 3, 1, 8), "B=2"),
        ((2, 4, 1, 8), (2, 3, 1, 8), "Sq=4 and Sk=3"),
    ):
        with pytest.raises(ValueError, match=words):
            padding.check(q_shape, k_shape)
    padding.with_queries("all").check((2, 4, 1, 8), (2, 3, 1, 8))


def test_the_query_rule_is_stated_once_for_all_layers():
    padding = pa.KeyPadding.from_lengths([2, 3], 3)
    assert (padding.queries, meta_of(padding).queries) == (None, "same")
    everyone = padding.with_queries("all")
    assert padding.with_queries("all") is everyone
    assert everyone.with_queries("all") is everyone
    assert meta_of(everyone, queries=7).queries == "all"
    assert everyone.ranges == padding.ranges


def test_a_device_mask_is_never_read_back():
    padding = pa.KeyPadding.from_mask(torch.ones(2, 4, dtype=torch.int64, device="meta"))
    assert (padding.facts.host, padding.facts.prefix, padding.ranges) == (False, None, None)
    lengths = pa.KeyPadding.from_lengths(torch.ones(2, dtype=torch.int64, device="meta"), 4)
    assert (lengths.facts.host, lengths.facts.prefix, lengths.facts.common_prefix) == (False, True, None)
    meta = lengths.bind(META, (2, 4, 1, 8), (2, 4, 1, 8))
    assert meta.seqused.device == META
    with pytest.raises(ValueError, match="on the host"):
        _ = meta.indices


def test_a_cross_layer_compiles_with_a_padding_of_no_stated_rule() -> None:
    layer = pa.Attention(2, 8, role="cross")
    q, k = torch.randn(2, 3, 2, 8), torch.randn(2, 4, 2, 8)
    padding = pa.KeyPadding.from_mask([[1, 0, 1, 1], [1, 1, 0, 0]])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, k, padding), layer(q, k, k, padding))
    assert padding.with_queries("all").builds == 1  # the graph used the same twin, and what it had derived
    rebuilt = pickle.loads(pickle.dumps(padding))
    torch.testing.assert_close(compiled(q, k, k, rebuilt), layer(q, k, k, padding))


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9),
    reason="an older Dynamo cannot trace object.__new__: there, structures are built outside of graphs",
)
def test_the_other_rule_may_be_stated_inside_a_graph() -> None:
    k = torch.randn(2, 4, 2, 8)
    padding = pa.KeyPadding.from_mask([[1, 0, 1, 1], [1, 1, 0, 0]])
    same = torch.compile(lambda q: pa.attention(q, q, q, structure=padding.with_queries("same")), backend="eager")
    torch.testing.assert_close(same(k), pa.attention(k, k, k, structure=padding))
