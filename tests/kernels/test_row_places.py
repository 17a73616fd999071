"""Where a position's row is: the inverse of an index, remembered while the index lives and is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.kernels import row_places
from polyattn.kernels.row_places import places, places_of


def test_places_are_the_inverse_index(device: str) -> None:
    place = places(torch.tensor([4, 9, 2, 6, -3, 0], device=device), 6)
    assert place.dtype == torch.int32
    assert place.tolist() == [5, -1, 2, -1, 0, -1]


def test_places_are_remembered_while_the_index_lives_and_is_unchanged(device: str) -> None:
    index = torch.tensor([0, 1, 5, 73], device=device)
    first = places_of(index, 74)
    assert places_of(index, 74) is first
    assert places_of(index, 40) is not first
    assert places_of(index.clone(), 74) is not first
    index[0] = 2
    assert places_of(index, 74).tolist()[:4] == [-1, 1, 0, -1]


def test_an_index_of_inference_mode_may_be_edited(device: str) -> None:
    """It has no version, so that nothing tells of the edit."""
    with torch.inference_mode():
        index = torch.tensor([0, 3, 7], device=device)
        places_of(index, 9)
        index.copy_(torch.tensor([1, 4, 8]))
        assert places_of(index, 9).tolist() == [-1, 0, -1, -1, 1, -1, -1, -1, 2]


class _Dying(dict[Any, Any]):
    """Remembered places whose indices die while the oldest is looked for."""

    def __iter__(self) -> Any:
        for key in list(self.keys()):
            self.pop(key, None)
            yield key


class _Dead(_Dying):
    def __iter__(self) -> Any:
        self.clear()
        return iter(())


@pytest.mark.parametrize("kind", [_Dying, _Dead])
def test_places_may_be_forgotten_in_the_midst_of_an_eviction(
    kind: type[_Dying], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = kind(dict.fromkeys(range(row_places._LIMIT)))
    monkeypatch.setattr(row_places, "_PLACES", remembered)
    index = torch.tensor([2, 0], device=device)
    place = places_of(index, 3)
    assert place.tolist() == [1, -1, 0]
    assert places_of(index, 3) is place
    assert len(remembered) <= row_places._LIMIT
