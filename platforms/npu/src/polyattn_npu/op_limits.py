"""What torch-npu's attention ops take at most, on which chips, and in which words a request beyond it is refused."""

from __future__ import annotations

from polyattn.vendor import Machine, Request

#: What these devices compute in, and what the ops for inference do. They have no float64.
DTYPES, HALVES = frozenset({"float16", "bfloat16", "float32"}), frozenset({"float16", "bfloat16"})
#: Head dims of npu_fusion_attention: its tiling takes 512; a document says 768.
FUSION_HEAD_DIMS = range(1, 513)
#: Query heads, rows of q or k, and documents of one packed call, that it takes at most (of documents some say 2048).
MOST_HEADS, MOST_ROWS, MOST_DOCUMENTS = 256, 2**20, 1024
#: Device classes that have torch-npu's two ops.
ARCHS = ("A2", "A3", "A5")

#: How to install what has them.
HINT = "pip install torch-npu, of the release that fits your torch and CANN"


def not_on_this_chip(what: str, archs: tuple[str, ...], machine: Machine) -> tuple[str, ...]:
    """Against every device class but these. One that is not known before a context exists may be any of them."""
    if not machine.arch or machine.arch in archs:
        return ()
    classes = f"{', '.join(archs[:-1])} and {archs[-1]}" if len(archs) > 1 else archs[0]
    return (f"{what} runs on {classes}, and this is {machine.arch}",)


def beyond_fusion(request: Request, *, packs_samples: bool) -> tuple[str, ...]:
    """Sizes that npu_fusion_attention refuses; `packs_samples`: padding becomes one packed call of all samples."""
    samples = request.q.shape[0] if packs_samples else 1
    rows = samples * max(request.q.shape[-3], request.k.shape[-3])
    documents = samples if packs_samples else request.structure_facts.documents
    in_one_call = packs_samples or (request.structure_kind == "packed" and not request.structure_facts.spans)
    reasons = beyond_one_call(request, rows)
    if in_one_call and documents is not None and documents > MOST_DOCUMENTS:
        text = f"{documents} documents are more than the {MOST_DOCUMENTS} of one packed call: split the batch"
        return (*reasons, text)
    return reasons


def beyond_one_call(request: Request, rows: int) -> tuple[str, ...]:
    """What one call of npu_fusion_attention with so many rows refuses, whatever the structure."""
    reasons = []
    if request.v_head_dim > request.head_dim:
        reasons.append(
            f"value head_dim {request.v_head_dim} is larger than the {request.head_dim} of q and k, "
            "which npu_fusion_attention does not take: pad q and k with zeros"
        )
    if request.num_heads > MOST_HEADS:
        reasons.append(
            f"{request.num_heads} query heads are more than the {MOST_HEADS} of one call: split the heads over calls"
        )
    if rows > MOST_ROWS:
        reasons.append(f"{rows} rows are more than the {MOST_ROWS} of one call: split the batch or the queries")
    return tuple(reasons)
