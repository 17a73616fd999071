"""What is derived from a meta is kept, bounded, by any number of threads, and lasts beyond inference mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Barrier, Thread

import pytest
import torch

from polyattn.backends.derived import derived


class Holder:
    pass


class Key:
    """Hashed and compared in Python, so that threads may switch inside of every look-up."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.number == other.number


@pytest.fixture
def eager_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_derivation_is_made_once_and_the_oldest_is_dropped() -> None:
    meta, built = Holder(), []
    for key in (*range(20), 19, 0):
        assert derived(meta, key, lambda key=key: built.append(key) or key) == key
    assert built == [*range(20), 0]


@pytest.mark.usefixtures("eager_switching")
def test_threads_that_drop_each_others_derivations_get_their_own() -> None:
    meta, errors = Holder(), []
    together = Barrier(6)

    def work(start: int) -> None:
        together.wait()
        try:
            for step in range(1000):
                number = (start * 7 + step) % 40
                assert derived(meta, Key(number), lambda number=number: number) == number
        except Exception as error:
            errors.append(error)

    threads = [Thread(target=work, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_derivation_of_inference_mode_serves_gradients() -> None:
    with torch.inference_mode():
        scale = derived(Holder(), "scale", lambda: torch.ones(2))
    (torch.ones(2, requires_grad=True) * scale).sum().backward()
