"""Joint and replicated tokens on one rank: plain concatenation, undone by `split`."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa

IMAGE = torch.randn(2, 5, 2, 8)
TEXT = torch.randn(2, 3, 2, 8)


@pytest.mark.parametrize("where", ["front", "rear"])
def test_joint_is_concatenation_and_split_undoes_it(where: str) -> None:
    joint = pa.Joint(TEXT, TEXT, TEXT, where=where)  # type: ignore[arg-type]
    out = pa.attention(IMAGE, IMAGE, IMAGE, joint=joint, causal=True)
    glued = torch.cat([TEXT, IMAGE] if where == "front" else [IMAGE, TEXT], dim=1)
    want = pa.attention(glued, glued, glued, causal=True)
    assert torch.equal(out, want)
    text, image = joint.split(out)
    assert torch.equal(torch.cat([text, image] if where == "front" else [image, text], dim=1), want)


def test_a_joint_of_keys_alone_has_no_query_rows() -> None:
    joint = pa.Joint(TEXT[:, :0], TEXT, TEXT)
    out = pa.attention(IMAGE, IMAGE, IMAGE, joint=joint)
    keys = torch.cat([TEXT, IMAGE], dim=1)
    assert torch.equal(out, pa.attention(IMAGE, keys, keys))


def test_replicated_rows_given_apart_are_glued_in_global_order() -> None:
    replicated = pa.Replicated(prefix=(TEXT, TEXT, TEXT), suffix=(TEXT, TEXT, TEXT))
    joint = pa.Joint(TEXT, TEXT, TEXT, where="front")
    glued = torch.cat([TEXT, TEXT, IMAGE, TEXT], dim=1)
    out = pa.attention(IMAGE, IMAGE, IMAGE, joint=joint, replicated=replicated)
    assert torch.equal(out, pa.attention(glued, glued, glued))
    kv = pa.Replicated(kv_prefix=(TEXT, TEXT))
    keys = torch.cat([TEXT, IMAGE], dim=1)
    assert torch.equal(pa.attention(IMAGE, IMAGE, IMAGE, replicated=kv), pa.attention(IMAGE, keys, keys))


def test_replicated_counts_and_complete_keys_change_nothing_on_one_rank() -> None:
    want = pa.attention(IMAGE, IMAGE, IMAGE)
    assert torch.equal(pa.attention(IMAGE, IMAGE, IMAGE, replicated=pa.Replicated(prefix=2, suffix=1)), want)
    assert torch.equal(pa.attention(IMAGE, IMAGE, IMAGE, replicated=pa.Replicated(kv=True)), want)
    assert torch.equal(pa.attention(IMAGE, IMAGE, IMAGE, parallel=pa.distributed.SequenceParallel()), want)


def test_a_layer_takes_them_too() -> None:
    layer = pa.Attention(2, 8, parallel=pa.distributed.SequenceParallel())
    joint = pa.Joint(TEXT, TEXT, TEXT)
    assert torch.equal(layer(IMAGE, IMAGE, IMAGE, joint=joint), pa.attention(IMAGE, IMAGE, IMAGE, joint=joint))


def test_what_is_malformed_or_not_done_here_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'front' or 'rear'.*'back'"):
        pa.Joint(TEXT, TEXT, TEXT, where="back")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"joint\.k"):
        pa.Joint(TEXT, None, TEXT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"replicated\.prefix"):
        pa.Replicated(prefix=(TEXT, TEXT))
    with pytest.raises(ValueError, match="prefix and kv_prefix"):
        pa.Replicated(prefix=1, kv_prefix=1)
    four = pa.distributed.SequenceParallel(ulysses=2, ring=2)
    with pytest.raises(pa.UnsupportedRequest, match="4 ranks.*not initialised"):
        pa.attention(IMAGE, IMAGE, IMAGE, parallel=four)
    with pytest.raises(pa.UnsupportedRequest, match="4 ranks.*not initialised"):
        pa.Attention(2, 8, parallel=four)(IMAGE, IMAGE, IMAGE)
    with pytest.raises(TypeError, match="parallel"):
        pa.attention(IMAGE, IMAGE, IMAGE, parallel=2)
    with pytest.raises(ValueError, match="gate.*VideoTiles"):
        pa.attention(IMAGE, IMAGE, IMAGE, gate=IMAGE)
