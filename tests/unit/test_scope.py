"""Scopes: the backend, the step and the route log of the calls inside them, apart between threads and tasks."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import torch

import polyattn as pa
from polyattn.scope import choices_here

Q = torch.randn(1, 4, 2, 8)


def route() -> str:
    with pa.record_routes() as log:
        pa.attention(Q, Q, Q)
    return log.entries[0].route


def test_a_scope_binds_its_calls_and_nests() -> None:
    automatic = route()
    with pa.use_backend("blocked"):
        assert route() == "cpu:blocked"
        with pa.use_backend("sdpa"):
            assert route() == "cpu:sdpa"
        assert route() == "cpu:blocked"
    assert route() == automatic


def test_a_scope_ends_with_an_error_inside() -> None:
    with pytest.raises(RuntimeError, match="inside"), pa.use_backend("blocked"):
        raise RuntimeError("inside")
    assert choices_here.get() == ()


def test_an_argument_is_stronger_than_a_scope() -> None:
    with pa.use_backend("blocked"), pa.record_routes() as log:
        pa.attention(Q, Q, Q, backend="sdpa")
    assert log.entries[0].route == "cpu:sdpa"


def test_an_unknown_name_in_a_scope_raises_at_the_call() -> None:
    with pa.use_backend("flash_attnn"), pytest.raises(ValueError, match="'flash_attnn'"):
        pa.attention(Q, Q, Q)


def test_threads_keep_their_own_scope() -> None:
    seen: list[str] = []
    with pa.use_backend("blocked"):
        thread = threading.Thread(target=lambda: seen.append(route()))
        thread.start()
        thread.join()
    assert seen == ["cpu:sdpa"]


def test_tasks_keep_their_own_scope() -> None:
    async def one(name: str) -> str:
        with pa.use_backend(name):
            await asyncio.sleep(0)
            return route()

    async def both() -> list[str]:
        return await asyncio.gather(one("blocked"), one("sdpa"))

    assert asyncio.run(both()) == ["cpu:blocked", "cpu:sdpa"]


def test_the_log_counts_calls_and_goes_to_json() -> None:
    with pa.record_routes() as log:
        for _ in range(3):
            pa.attention(Q, Q, Q)
        pa.attention(Q, Q, Q, softcap=5.0)
    assert [entry.count for entry in log.entries] == [3, 1]
    told = json.loads(log.to_json())
    assert told["routes"][0]["count"] == 3
    assert told["routes"][1]["route"] == "cpu:blocked"
    assert "softcap" in str(told["routes"][1]["reasons"]["sdpa"])


@pytest.mark.parametrize(("index", "total"), [(5, 5), (-1, 5), (True, 5), (0.0, 5)])
def test_a_step_lies_within_its_total(index: object, total: int) -> None:
    with pytest.raises(ValueError, match="step"):
        pa.step(index, total)  # type: ignore[arg-type]
