"""PagedKVCache.write: only the rows given, in place, without ever reading slots back from a device."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn as pa
from polyattn.structures import paged_cache


def rows(count, start=1.0, dim=3):
    return (torch.arange(count, dtype=torch.float32) + start).reshape(-1, 1, 1).expand(count, 1, dim).contiguous()


def new_cache():
    return pa.PagedKVCache(3, 2, 1, 3, torch.float32, "cpu", v_head_dim=2)


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """On the host slots are checked; "device" takes the path of slots that must not be read."""
    if request.param == "device":
        monkeypatch.setattr(paged_cache, "on_host", lambda data: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_land_in_their_slots_and_negative_ones_nowhere(where, dtype):
    cache = new_cache()
    cache.k.fill_(-1)
    cache.v.fill_(-1)
    k, v = rows(4), rows(4, 11.0, 2)
    k[2], v[2] = float("nan"), float("nan")
    pool, memory = cache.k, cache.k.data_ptr()
    cache.write(k, v, torch.tensor([4, 1, -1, 0], dtype=dtype))
    assert cache.k[..., 0, 0].tolist() == [[4.0, 2.0], [-1.0, -1.0], [1.0, -1.0]]
    assert cache.v[..., 0, 1].tolist() == [[14.0, 12.0], [-1.0, -1.0], [11.0, -1.0]]
    assert cache.k is pool
    assert cache.k.data_ptr() == memory


def test_all_skipped_and_none_at_all(where):
    cache = new_cache()
    cache.write(rows(3) * float("nan"), rows(3, dim=2) * float("nan"), torch.tensor([-1, -5, -1]))
    cache.write(rows(0), rows(0, dim=2), torch.empty(0, dtype=torch.int64))
    assert cache.k.eq(0).all()
    assert cache.v.eq(0).all()


def test_strided_rows_and_lists_of_slots():
    cache = new_cache()
    k = rows(4).repeat(1, 1, 2)[..., ::2]
    v = rows(8, dim=2)[::2]
    assert not k.is_contiguous()
    cache.write(k, v, [0, 1, 2, -1])
    assert cache.k[..., 0, 2].flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]
    assert cache.v[..., 0, 1].flatten().tolist() == [1.0, 3.0, 5.0, 0.0, 0.0, 0.0]


def test_slots_past_the_pool_are_refused_on_the_host():
    with pytest.raises(ValueError, match=r"slots: 6 is past the pool's 6 rows \(3 pages of 2\)"):
        new_cache().write(rows(2), rows(2, dim=2), [0, 6])


def test_slots_past_the_pool_are_skipped_on_a_device(monkeypatch):
    monkeypatch.setattr(paged_cache, "on_host", lambda data: False)
    cache = new_cache()
    cache.write(rows(3), rows(3, dim=2), torch.tensor([6, 5, 2**40]))
    assert cache.k[..., 0, 0].flatten().tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 2.0]


def test_writing_on_a_device_reads_nothing_back():
    with FakeTensorMode():
        cache = pa.PagedKVCache(3, 2, 1, 3, torch.float32, "cuda")
        cache.write(
            *(torch.empty(4, 1, 3, device="cuda") for _ in "kv"), torch.empty(4, dtype=torch.int64, device="cuda")
        )


def test_writing_costs_the_rows_given_not_the_pool():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and "index_copy_" not in str(func):
                seen.append(result.numel())
            return result

    cache = pa.PagedKVCache(1000, 16, 1, 3, torch.float32, "cpu")
    with Watch():
        cache.write(rows(4), rows(4), torch.tensor([4, 1, -1, 0]))
    assert max(seen) <= rows(4).numel()


def test_gradients_stay_out_of_the_pool():
    cache = new_cache()
    cache.write(rows(1).requires_grad_(), rows(1, dim=2), [0])
    assert not cache.k.requires_grad
    assert cache.k[0, 0, 0, 0] == 1.0


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_written_on_its_own(twin_of):
    cache = new_cache()
    cache.write(rows(1), rows(1, dim=2), [0])
    twin = twin_of(cache)
    twin.write(rows(1, 7.0), rows(1, 7.0, 2), [1])
    assert twin.k[..., 0, 0].flatten().tolist() == [1.0, 7.0, 0.0, 0.0, 0.0, 0.0]
    assert cache.k[..., 0, 0].flatten().tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_the_pools_are_contiguous():
    cache = pa.PagedKVCache(3, 2, 4, 8, torch.bfloat16, "cpu", v_head_dim=5)
    assert (cache.k.shape, cache.v.shape) == ((3, 2, 4, 8), (3, 2, 4, 5))
    assert cache.k.is_contiguous()
    assert cache.v.is_contiguous()
    assert (cache.num_pages, cache.page_size) == (3, 2)


@pytest.mark.parametrize(("k", "v", "slots", "error", "words"), [
    (rows(2), rows(1, dim=2), [0, 1], ValueError, "slots: .*2 for 2 rows of k and 1 of v"),
    (rows(2), rows(2, dim=2), [0], ValueError, "slots: .*1 for 2"),
    (rows(2)[:, 0], rows(2, dim=2), [0, 1], ValueError, r"k: rows \[T, 1, 3\]"),
    (rows(2), rows(2), [0, 1], ValueError, r"v: rows \[T, 1, 2\].*got \[2, 1, 3\]"),
    (rows(2).double(), rows(2, dim=2), [0, 1], ValueError, "k: .*float32.*float64"),
    (rows(2).to("meta"), rows(2, dim=2), [0, 1], ValueError, "k: .*cpu.*meta"),
    ([[1.0]], rows(2, dim=2), [0, 1], TypeError, "k: a tensor"),
    (rows(2), rows(2, dim=2), torch.tensor([0.0, 1.0]), TypeError, "slots: .*float32"),
    (rows(2), rows(2, dim=2), torch.tensor([[0, 1]]), ValueError, r"slots: shape \[T\]"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(k, v, slots, error, words):
    cache = new_cache()
    with pytest.raises(error, match=words):
        cache.write(k, v, slots)
    assert cache.k.eq(0).all()


@pytest.mark.parametrize(("arguments", "error", "name"), [
    ((0, 2, 1, 8, torch.float32, "cpu"), ValueError, "num_pages"),
    ((1, 0, 1, 8, torch.float32, "cpu"), ValueError, "page_size"),
    ((1, 2, 1, 0, torch.float32, "cpu"), ValueError, "head_dim"),
    ((1, 2.0, 1, 8, torch.float32, "cpu"), TypeError, "page_size"),
    ((1, 2, True, 8, torch.float32, "cpu"), TypeError, "num_kv_heads"),
    ((1, 2, 1, 8, "float32", "cpu"), TypeError, "dtype"),
    ((1, 2, 1, 8, torch.float32, "cpu", 0), ValueError, "v_head_dim"),
])  # fmt: skip
def test_sizes_of_a_pool_are_checked(arguments, error, name):
    with pytest.raises(error, match=f"^{name}: "):
        pa.PagedKVCache(*arguments)


def test_slots_that_no_int64_holds() -> None:
    cache = pa.PagedKVCache(2, 2, 1, 8, torch.float32, "cpu")
    row = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=rf"slots: {2**63} is past the pool's 4 rows"):
        cache.write(row, row, [2**63])
    cache.write(row, row, [-(2**63) - 1])
    assert not cache.k.any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_a_pool_holds_floats(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype: a floating dtype is needed, got {dtype}"):
        pa.PagedKVCache(2, 2, 1, 8, dtype, "cpu")
