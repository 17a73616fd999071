"""The order that `polyattn bench` measured: written, read back, and what it counts for."""

import json

import pytest

from polyattn.bench.order_file import MeasuredOrder, Orders, read_order, size_of, write_order
from polyattn.vendor import Machine, Request, StructureFacts, TensorFacts


def test_the_order_that_was_measured_is_read_back(polyattn, tmp_path):
    path = tmp_path / "order.json"
    facts = polyattn("bench", "--shapes", "tiny", "--seconds", "0.05", "--write-order", str(path), "--json").json
    orders = read_order(path)
    (entry,) = orders.orders
    assert entry.order == tuple(row["backend"] for row in facts["shapes"]["tiny"]["backends"])
    machine = Machine.from_dict(facts["machine"])
    tensor = TensorFacts.contiguous((1, 64, 2, 64), "float32")
    assert orders.names(Request(tensor, tensor, tensor), machine) == entry.order
    half = TensorFacts.contiguous((1, 64, 2, 64), "bfloat16")
    assert orders.names(Request(half, half, half), machine) == (), "that dtype was not measured"
    assert orders.names(Request(tensor, tensor, tensor), Machine("cpu", "cpu", arch="other")) == ()


def entry(size: int, *order: str, structure: str = "dense", head_dim: int = 64, page_size: int | None = None):
    return MeasuredOrder(structure, "bfloat16", head_dim, page_size, size, order)


TOY = Machine("toy", "toy", arch="toy1")
MEASURED = Orders(
    "toy",
    "toy1",
    (
        entry(13, "small"), entry(16, "middle"), entry(30, "large"), entry(30, "large, D 128", head_dim=128),
        entry(20, "pages of 16", structure="paged", page_size=16),
        entry(20, "pages of 256", structure="paged", page_size=256),
    ),
)  # fmt: skip


def dense(rows: int, dim: int = 64, **facts) -> Request:
    """Of 8 heads: 64 rows are of size 15, and twice the rows are 2 more."""
    tensor = TensorFacts.contiguous((1, rows, 8, dim), "bfloat16")
    return Request(tensor, tensor, tensor, **facts)


def over_pages(page: int) -> Request:
    q = TensorFacts.contiguous((2, 16, 4, 64), "bfloat16")
    pool = TensorFacts.contiguous((4096 // page, page, 4, 64), "bfloat16")
    return Request(q, pool, pool, structure_kind="paged", structure_facts=StructureFacts(page_size=page))


@pytest.mark.parametrize(
    ("request_", "names"),
    [
        (dense(8), ()),
        (dense(16), ("small",)),
        (dense(64), ("middle",)),
        (dense(128), ("middle",)),
        (dense(256), ()),
        (dense(4096), ()),
        (dense(8192), ("large",)),
        (dense(16384), ("large",)),
        (dense(32768), ()),
        (dense(8192, 128), ("large, D 128",)),
        (dense(8192, 96), ()),
        (dense(8192, grad=True), ()),
        (dense(8192, structure_kind="key_padding"), ()),
        (over_pages(16), ("pages of 16",)),
        (over_pages(256), ("pages of 256",)),
        (over_pages(128), ()),
    ],
)
def test_an_order_counts_only_for_what_was_measured_near_its_size(request_, names):
    assert MEASURED.names(request_, TOY) == names


@pytest.mark.parametrize(
    ("q", "k", "kind", "documents", "size"),
    [
        ((1, 4096, 32, 128), (1, 4096, 32, 128), "dense", None, 29),
        ((4, 1, 1, 8), (4, 64, 1, 8), "key_padding", 4, 8),
        ((4096, 32, 128), (4096, 32, 128), "packed", 4, 27),
        ((8, 64, 32, 128), (8 * 256, 16, 8, 128), "paged", 8, 26),
        ((512, 32, 128), (8 * 256, 16, 8, 128), "paged", 8, 26),
        ((1, 0, 32, 128), (1, 4096, 32, 128), "dense", None, 0),
    ],
)
def test_the_size_of_a_request(q, k, kind, documents, size):
    tensors = (TensorFacts.contiguous(shape, "bfloat16") for shape in (q, k, k))
    facts = StructureFacts(documents=documents)
    assert size_of(Request(*tensors, structure_kind=kind, structure_facts=facts)) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "got 'list'"),
        ('{"format": "polyattn-order-9"}', "got 'polyattn-order-9'"),
        ('{"format": "polyattn-order-1", "platform": "toy"}', "KeyError: 'arch'"),
        ('{"format": "polyattn-order-1", "platform": "toy", "arch": 1, "orders": []}', "arch: a text is needed, got 1"),
        (
            '{"format": "polyattn-order-1", "platform": "toy", "arch": "a", "orders": [{"order": "fa3"}]}',
            "order: a list of backend names is needed, got 'fa3'",
        ),
    ],
)
def test_a_file_that_is_no_order_says_what_is_wrong(tmp_path, text, said):
    path = tmp_path / "order.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_order(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_an_order_file_says_where_it_is_from(tmp_path):
    path = tmp_path / "order.json"
    orders = Orders("toy", "toy1", (entry(13, "a", "b"),), "Toy 1", {"toy-kernels": "2.1"}, "2026-01-01")
    write_order(path, orders)
    assert read_order(path) == orders
    assert json.loads(path.read_text())["device"] == "Toy 1"
