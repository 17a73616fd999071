"""One derivation per device serves all layers and threads, and nothing grows without a bound."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import polyattn as pa
from polyattn.structures import base, transfer
from tests.unit.structures.every import KINDS, SHAPES, one_of_each

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_layers_and_shapes_share_one_derivation(kind):
    structure = one_of_each()[kind]
    q_shape, k_shape = SHAPES[kind]
    metas = {id(structure.bind(CPU, q_shape, k_shape)) for _ in range(48)}
    other_heads = (*q_shape[:-2], 4, 8), (*k_shape[:-2], 4, 8)
    metas.add(id(structure.bind(CPU, *other_heads)))
    assert len(metas) == 1
    assert structure.builds == 1


def test_each_device_has_its_own_derivation():
    padding = pa.KeyPadding.from_lengths([4, 2], 4)
    assert padding.bind(CPU, *SHAPES["key_padding"]).keep.device == CPU
    assert padding.bind(META, *SHAPES["key_padding"]).keep.device == META
    assert padding.builds == 2


def test_a_shape_that_does_not_fit_raises_again_on_every_call():
    padding = pa.KeyPadding.from_lengths([4, 2], 4)
    padding.bind(CPU, *SHAPES["key_padding"])
    for _ in range(2):
        with pytest.raises(ValueError, match="Sk=4"):
            padding.bind(CPU, (2, 5, 2, 8), (2, 5, 2, 8))


def test_caches_stay_within_their_limits_and_keep_the_newest():
    mask = pa.Mask(torch.ones(1, 4))
    for batch in range(1, 2 * base._BOUND_LIMIT):
        mask.bind(CPU, (batch, 4, 1, 8), (batch, 4, 1, 8))
    assert len(mask._bound) == base._BOUND_LIMIT
    assert (CPU, (batch, 4, 1, 8), (batch, 4, 1, 8)) in mask._bound
    assert mask.builds == 1
    for index in range(2 * base._PREPARED_LIMIT):
        mask._prepare_once(torch.device("meta", index), (), False)
    assert len(mask._prepared) == base._PREPARED_LIMIT


def test_threads_that_bind_at_once_get_one_derivation():
    padding = pa.KeyPadding.from_lengths([4, 2], 4)
    barrier, metas = threading.Barrier(8), []

    def work():
        barrier.wait()
        for batch in range(200):
            metas.append(padding.bind(CPU, (2, 4, batch, 8), (2, 4, batch, 8)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(metas) == 1600
    assert len({id(meta) for meta in metas}) == 1
    assert padding.builds == 1
    assert len(padding._bound) == base._BOUND_LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_to_derives_ahead_of_use(kind):
    structure = one_of_each()[kind]
    assert structure.to("meta") is structure
    assert structure.builds == 1
    structure.bind(META, *SHAPES[kind])
    assert structure.builds == 1


def test_to_derives_even_what_only_some_slots_need():
    padding, paged = pa.KeyPadding.from_lengths([4, 2], 4).to("cpu"), pa.Paged([[0]], [1], [1]).to("cpu")
    meta = padding.bind(CPU, *SHAPES["key_padding"])
    assert {"indices", "cu_seqlens", "seqused"} <= set(vars(meta))
    assert "cu_q" in vars(paged.bind(CPU, (1, 1, 1, 8), (2, 2, 1, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_first_use_inside_a_capture_raises_and_names_the_way_out(kind):
    structure = one_of_each()[kind]
    with pytest.raises(RuntimeError, match=r"structure\.to\('meta'\)"):
        structure.bind(META, *SHAPES[kind], capturing=True)
    assert structure.builds == 0
    structure.to("meta")
    structure.bind(META, *SHAPES[kind], capturing=True)


class _CapturingDevice:
    """Stands for torch.cuda, torch.npu, ... while a graph is captured."""

    capturing = True

    @staticmethod
    def is_initialized():
        return True

    @classmethod
    def is_current_stream_capturing(cls):
        return cls.capturing


def test_a_capture_is_noticed_without_being_told(monkeypatch):
    monkeypatch.setattr(torch, "hpu", _CapturingDevice, raising=False)
    monkeypatch.setattr(_CapturingDevice, "capturing", True)
    with pytest.raises(RuntimeError, match=r"structure\.to\('hpu:0'\)"):
        pa.KeyPadding.from_lengths([4, 2], 4).bind(torch.device("hpu", 0), *SHAPES["key_padding"])
    with pytest.raises(RuntimeError, match=r"structure\.to\('hpu:0'\)"):
        transfer.send(torch.ones(2), torch.device("hpu", 0))
    monkeypatch.setattr(_CapturingDevice, "capturing", False)
    assert not transfer.is_capturing(torch.device("hpu", 0))


def test_the_cpu_never_captures_and_an_unused_device_neither(monkeypatch):
    assert not transfer.is_capturing(CPU)
    monkeypatch.setattr(_CapturingDevice, "is_initialized", staticmethod(lambda: False))
    monkeypatch.setattr(torch, "hpu", _CapturingDevice, raising=False)
    assert not transfer.is_capturing(torch.device("hpu", 0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_another_thread_derives_leaves_no_lock_behind():
    program = """
import os, threading, time, torch, polyattn as pa
from polyattn.structures.base import deriving
held = threading.Event()
def derive():
    with deriving:
        held.set()
        time.sleep(0.3)
threading.Thread(target=derive).start()
held.wait()
child = os.fork()
if child == 0:
    pa.KeyPadding.from_lengths([1], 1).bind(torch.device("cpu"), (1, 1, 1, 8), (1, 1, 1, 8))
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "7", done.stderr
