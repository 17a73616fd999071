"""The graphs of a device type, by the names that torch's device modules share; a clear refusal where there are none."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Protocol

import torch

from polyattn.errors import UnsupportedRequest


class Graph(Protocol):
    """One captured stretch of work; torch's graph classes are such."""

    def capture_begin(self, pool: Any, **how: Any) -> None:
        """Record, from now on, what the current stream is given."""

    def capture_end(self) -> None:
        """The recording is complete."""

    def replay(self) -> None:
        """Do it again, at the same addresses."""


class GraphDevice:
    """What `torch.cuda` and its twins offer: graphs that share a pool, and a stream to capture on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        graph = getattr(self._module, f"{device.type.upper()}Graph", None)
        if graph is None or not hasattr(self._module, "graph_pool_handle"):
            raise UnsupportedRequest.because(
                f"graphs: torch {torch.__version__} has none for {device.type} "
                f"(torch.{device.type}.{device.type.upper()}Graph); call the module itself",
                platform=device.type,
            )
        self._new: type[Graph] = graph
        # so that other threads' work, such as a watchdog's of a process group, does not end it; xpu's have no modes
        modes = "capture_error_mode" in inspect.signature(graph.capture_begin).parameters
        self._how = {"capture_error_mode": "thread_local"} if modes else {}

    def begin(self, pool: Any) -> Graph:
        """A graph that records from now on what the current stream is given."""
        graph = self._new()
        graph.capture_begin(pool=pool, **self._how)
        return graph

    def end(self, graph: Graph) -> None:
        """The recording is complete. It may be empty: two attention calls can follow each other."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Graph is empty")
            graph.capture_end()

    def pool(self) -> Any:
        """Memory that the graphs of one entry share."""
        return self._module.graph_pool_handle()

    def stream(self) -> Any:
        """A context whose current stream is not the default one, which cannot be captured."""
        side = self._module.Stream(self.device)
        side.wait_stream(self._module.current_stream(self.device))
        return self._module.stream(side)

    def settle(self) -> None:
        """Wait for all that was given to the device."""
        self._module.synchronize(self.device)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which belongs to the pool, without keeping it from being used again."""
        storage = tensor.untyped_storage()
        same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())
