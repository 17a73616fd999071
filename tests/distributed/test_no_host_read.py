"""Calls over ranks never read a device's tensor on the host: proved on fake CUDA tensors, which have nothing to read.

What ranks exchange goes through torch's "fake" process group, which accepts every collective and moves nothing; the
agreement is real.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import polyattn as pa
from polyattn.distributed import SequenceParallel
from polyattn.distributed.signature import digest_of
from tests.distributed.glued_cases import call_of
from tests.distributed.pool import Pool
from tests.distributed.test_head_groups import grouped
from tests.unit.test_no_host_read import Trap

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0
ROWS = 12


class WithoutDevice(TorchFunctionMode):
    """Slices by `narrow`, and copies within the device by shapes: torch's own ask for a device that is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"
        if func is torch.Tensor.__getitem__ and not on_host:
            return self._part(*args)
        if func is torch.Tensor.__setitem__ and not on_host:
            return self._copied(self._part(*args[:2]), args[2])
        if func is torch.Tensor.copy_ and not on_host:
            return self._copied(*args)
        return func(*args, **(kwargs or {}))

    def _copied(self, into: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
        assert into.device.type == what.device.type == "cuda"
        assert torch.broadcast_shapes(into.shape, what.shape) == into.shape
        return into

    def _part(self, tensor: torch.Tensor, index: Any) -> torch.Tensor:
        axis = 0
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, int):
                tensor = tensor.select(axis, each)
                continue
            if each is None:
                tensor = tensor.unsqueeze(axis)
            else:
                start, end, _ = each.indices(tensor.shape[axis])
                tensor = tensor.narrow(axis, start, max(end - start, 0))
            axis += 1
        return tensor


def on_a_fake_device(group: dist.ProcessGroup, degrees: dict[str, int], name: str) -> tuple[list[str], set[str]]:
    """What is read on the host, and copied between devices, by a call and the same call again."""
    import torch.testing._internal.distributed.fake_pg  # makes the backend known

    fake = dist.new_group(backend="fake")
    call = call_of(name, ROWS, ROWS)
    structure = call.structure or pa.Dense()
    digest_of(structure)  # of host data, which are fake to a fake mode
    parallel = SequenceParallel(**degrees, mesh=fake).holding(ROWS)
    with FakeTensorMode(allow_non_fake_inputs=True), grouped((1, 1)), Trap() as trap, WithoutDevice(), torch.no_grad():
        q, k, v = (torch.empty(call.batch, ROWS // 2, heads, 64, device="cuda") for heads in (12, 6, 6))
        for _ in range(2):
            out, _ = pa.attention(q, k, v, structure=structure, parallel=parallel, return_lse=True, **call.arguments)
    assert (out.shape, out.device.type) == (q.shape, "cuda")
    return trap.reads, set(trap.copies)


@pytest.mark.parametrize("name", ["dense", "causal", "tail padding", "documents"])
@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}, {"gather": 2}], ids=str)
def test_nothing_is_read_back(pool: Pool, degrees: dict[str, int], name: str) -> None:
    for reads, copies in pool.run(2, f"{HERE}:on_a_fake_device", degrees, name, limit=LIMIT):
        assert reads == []
        assert copies <= {"cpu to cuda"}
