"""Integers arrive as lists, tuples, numpy arrays or CPU tensors of any integer dtype; all else is refused by name."""

from __future__ import annotations

import numpy
import pytest
import torch

import polyattn as pa

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def forms(values):
    """The same integers in every accepted form."""
    yield list(values)
    yield tuple(values)
    yield [numpy.int32(value) for value in values]
    yield [torch.tensor(value) for value in values]
    yield iter(values)
    yield from (torch.tensor(values, dtype=dtype) for dtype in INTEGER_DTYPES)
    yield from (numpy.array(values, dtype=kind) for kind in ("u1", "i2", "i4", "i8", "u8", "O"))
    yield numpy.array(values)[::-1][::-1]  # a negative stride on the way


BUILDS = {
    "KeyPadding.from_lengths": (lambda data: pa.KeyPadding.from_lengths(data, 9).keep, [3, 0, 6]),
    "Packed.from_lengths": (lambda data: pa.Packed.from_lengths(data).cu_q, [3, 0, 6]),
    "Packed.from_cu_seqlens": (lambda data: pa.Packed.from_cu_seqlens(data).cu_q, [0, 3, 3, 9]),
    "Packed.from_position_ids": (lambda data: pa.Packed.from_position_ids(data).cu_q, [0, 1, 2, 0, 0, 1]),
    "Paged.kv_lengths": (lambda data: pa.Paged([[0], [1], [2]], data).kv_lengths, [3, 0, 6]),
    "Paged.q_lengths": (lambda data: pa.Paged([[0], [1], [2]], [9, 9, 9], data).q_lengths, [3, 0, 6]),
}


@pytest.mark.parametrize("build", BUILDS)
def test_every_form_of_the_same_integers_means_the_same(build):
    make, values = BUILDS[build]
    first, *others = [make(data) for data in forms(values)]
    assert first.dtype in (torch.bool, torch.int32)
    for other in others:
        assert torch.equal(first, other)
        assert first.dtype == other.dtype


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("bad", [
    [1.0, 2.0], [True, False], torch.tensor([1.0, 2.0]), torch.tensor([True, False]), numpy.array([1.0]),
    numpy.array([True]), "12", b"12", {1: 2}, {1, 2}, 7, None.__class__, [None], ["1"],
    [torch.tensor(1.0)], [torch.tensor(True)], torch.zeros(1, dtype=torch.complex64),
], ids=str)  # fmt: skip
def test_what_is_not_integers_is_a_type_error(build, bad):
    with pytest.raises(TypeError, match=r"lengths|q|cu_seqlens|position_ids"):
        BUILDS[build][0](bad)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "bad", [[[1, 2]], torch.ones(2, 2, 2, dtype=torch.int64), numpy.ones((2, 2), dtype="i8")], ids=repr
)
def test_another_rank_is_a_value_error_that_says_the_shape(build, bad):
    with pytest.raises(ValueError, match=r"shape \["):
        BUILDS[build][0](bad)


@pytest.mark.parametrize(("make", "name"), [
    (lambda data: pa.KeyPadding.from_lengths(data, 9), "lengths"),
    (pa.Packed.from_lengths, "q"),
    (lambda data: pa.Packed.from_lengths([1, 1], data), "k"),
    (lambda data: pa.Paged([[0], [1]], data), "kv_lengths"),
    (lambda data: pa.Paged([[0], [1]], [1, 1], data), "q_lengths"),
])  # fmt: skip
def test_lengths_are_not_negative_and_their_sum_fits_int32(make, name):
    with pytest.raises(ValueError, match=rf"^{name}: .*negative.*-2 at 1"):
        make([1, -2])
    with pytest.raises(ValueError, match=rf"^{name}: .*2147483648.*int32 limit 2147483647"):
        make([2**31 - 1, 1])


def test_lengths_scattered_on_a_device_are_never_read():
    with pytest.raises(TypeError, match="q: integers on the host are needed, got a tensor on meta"):
        pa.Packed.from_lengths([torch.tensor(1, device="meta")])


@pytest.mark.parametrize("change", ["list", "tensor", "numpy"])
def test_later_changes_to_what_was_given_change_nothing(change):
    as_given = {"list": list, "tensor": torch.tensor, "numpy": numpy.array}[change]
    lengths, table, kv = as_given([2, 1]), as_given([[0, 1], [1, 0]]), as_given([2, 1])
    if change == "tensor":
        table, kv = table.int(), kv.int()  # what needs no cast is copied too
    packed, paged = pa.Packed.from_lengths(lengths), pa.Paged(table, kv, kv)
    padding, mask_source = pa.KeyPadding.from_lengths(lengths, 2), torch.tensor([[1, 1], [1, 0]])
    masked = pa.KeyPadding.from_mask(mask_source.bool())
    for data in (lengths, kv):
        data[0] = 0
    table[0][0] = 9
    mask_source.zero_()
    assert packed.cu_q.tolist() == [0, 2, 3]
    assert (paged.block_table.tolist(), paged.kv_lengths.tolist()) == ([[0, 1], [1, 0]], [2, 1])
    assert paged.q_lengths.tolist() == [2, 1]
    assert padding.keep.tolist() == masked.keep.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (2, 1, 3, 4)])
def test_a_host_mask_is_copied(dtype, shape):
    given = torch.ones(shape, dtype=dtype)
    mask = pa.Mask(given)
    given.zero_()
    assert mask.tensor.bool().all()


def test_copying_a_broadcast_mask_copies_its_content_once():
    given = torch.ones(1, 1, 3, 4).expand(64, 8, 3, 4)
    mask = pa.Mask(given)
    assert mask.tensor.shape == given.shape
    assert mask.tensor.untyped_storage().nbytes() == given.untyped_storage().nbytes()
    assert mask.tensor.data_ptr() != given.data_ptr()


def test_a_bool_padding_mask_is_copied():
    given = torch.ones(2, 4, dtype=torch.bool)
    padding = pa.KeyPadding.from_mask(given)
    given.zero_()
    assert padding.keep.all()
