"""One process of the pool: a gloo rank that calls the functions it is told to, one after the other."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

#: Seconds that a collective waits: less than a case has, so that a rank that waits in vain says where.
WAIT = 60.0


def serve(pipe: Connection, port: int, rank: int, world: int) -> None:
    """Join the default group, then answer calls until the pool is gone."""
    torch.set_num_threads(1)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # without it gloo looks this machine's own name up
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT))
    while True:
        try:
            case, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool's process has ended
            return
        pipe.send_bytes(_answer(case, args))


def _answer(case: str, args: tuple[Any, ...]) -> bytes:
    try:
        torch.manual_seed(0)
        module, _, name = case.partition(":")
        function = getattr(importlib.import_module(module), name)
        return pickle.dumps((True, function(dist.group.WORLD, *args)))
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))
