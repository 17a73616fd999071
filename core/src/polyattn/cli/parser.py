"""The commands and their arguments. Commands are imported when they run, so that `--help` needs no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from polyattn import __version__
from polyattn.cli.words import above_0, count, counts, names, seconds, shape, window
from polyattn.quant import METHODS

STRUCTURES = ("dense", "key_padding", "mask", "bias", "packed", "spans", "paged", "video_tiles", "block_map")
#: Names of polyattn.bench.shapes.SHAPES, which needs torch.
SHAPES = (
    "flux", "sd3", "hunyuan", "prefill", "wan480", "wan720", "padded", "padded64", "documents", "spans", "paged16",
    "paged64", "paged128", "paged256", "tiny",
)  # fmt: skip

_EXIT_CODES = """\
exit codes:
  0  done, and the answer is good
  1  a check failed, or nothing can run here
  2  wrong arguments, or a missing package
"""
_INFO = """\
What a bug report needs: versions, every platform found or not and why, devices, backends usable or not and why,
capabilities, limits, and the environment variables that matter. It runs even where `import torch` fails.
"""
_EXPLAIN = """\
Which backend pa.attention would run for tensors of these shapes, and for every other one why not. No tensor is made;
with --machine not even the device is needed.

  polyattn explain --q 1,4608,24,128 --dtype bfloat16
  polyattn explain --q 9216,24,128 --structure packed --documents 4 --lse
  polyattn explain --q 1,32760,40,128 --structure video_tiles --grid 21,30,52 --tile 4,8,8
  polyattn info --machine > h100.json      (there)
  polyattn explain --q 1,4608,24,128 --machine h100.json      (here)
"""
_VERIFY = """\
Compare backends with the float64 reference on this machine: every structure, dtype, head layout, stride and edge that
a backend claims must be equal, and what it does not claim must be refused.
"""
_BENCH = """\
Time every backend of the current platform on named shapes of real models, in turns, and compare. On a processor the
shapes are scaled down.

  polyattn bench --shapes flux,wan480 --backends fa3,cudnn
  polyattn bench --write-order order.json --plot bench.png
  polyattn bench --json > new.json; polyattn bench --compare old.json new.json
"""
_DEMO = """\
Embed real sentences with a pretrained transformer three ways (its own SDPA, polyattn on the padded batch, polyattn on
packed documents) and compare embeddings, routes and times.
"""

_PLAN = """\
What each strategy over many ranks is expected to cost: time, bytes that a rank sends, memory beyond its shard. And
which is the fastest and why. Nothing is measured, no device is needed: it is a model, fitted to figures of two H200.

  polyattn plan --shape wan720 --ranks-per-host 8 --hosts 1,8,64
  polyattn plan --q 1,75600,40,128 --k 1,75600,8,128 --inside 400 --across 90
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the result has `.command` and `.run(args) -> exit code`."""
    parser = _Parser(
        prog="polyattn",
        description="One attention call, correct and fastest on whatever accelerator is present.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"polyattn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_info(commands)
    _add_explain(commands)
    _add_verify(commands)
    _add_bench(commands)
    _add_demo(commands)
    _add_plan(commands)
    return parser


def _add(commands: Any, name: str, summary: str, description: str, run: Any) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.set_defaults(run=run)
    return command


def _add_info(commands: Any) -> None:
    info = _add(commands, "info", "what is installed and found here, for a bug report", _INFO, _info)
    parts = info.add_mutually_exclusive_group()
    parts.add_argument(
        "--machine",
        nargs="?",
        const="",
        metavar="DEVICE",
        help="only the facts of one device (default: the first), as JSON for explain --machine",
    )
    parts.add_argument(
        "--capabilities",
        action="store_true",
        help="only the capability matrix of every installed platform, as Markdown",
    )


def _add_explain(commands: Any) -> None:
    explain = _add(commands, "explain", "which backend a call would take, and why no other", _EXPLAIN, _explain)
    shapes = explain.add_argument_group("tensors")
    shapes.add_argument(
        "--q", required=True, type=shape, metavar="B,S,H,D", help="shape of q; packed: T,H,D, paged: B,S,H,D or T,H,D"
    )
    shapes.add_argument(
        "--k", type=shape, metavar="SHAPE", help="shape of k (default: q's); paged: the pool, PAGES,PAGE_SIZE,H,D"
    )
    shapes.add_argument("--v", type=shape, metavar="SHAPE", help="shape of v (default: k's)")
    shapes.add_argument("--dtype", default="bfloat16", metavar="NAME", help="bfloat16 (default), float16, float32, ...")
    shapes.add_argument("--device", metavar="TYPE[:N]", help="cpu, cuda, npu:1, ... (default: the current platform's)")
    shapes.add_argument(
        "--machine", metavar="FILE.json", help="ask about the device described there ('-': standard input)"
    )
    call = explain.add_argument_group("the call")
    call.add_argument("--structure", choices=STRUCTURES, default="dense", help="who attends to whom (default: dense)")
    call.add_argument("--documents", type=count, metavar="N", help="packed, or paged with q of T,H,D (default: 2)")
    call.add_argument("--grid", type=shape, metavar="T,H,W", help="video_tiles: frames, height and width, in tokens")
    call.add_argument("--tile", type=shape, default=(4, 4, 4), metavar="T,H,W", help="video_tiles (default: 4,4,4)")
    call.add_argument("--sparsity", type=float, default=0.9, metavar="X", help="video_tiles: tiles left out (0.9)")
    call.add_argument("--gate", action="store_true", help="video_tiles: with the gated coarse term")
    call.add_argument("--causal", action="store_true", help="bottom-right aligned causal attention")
    call.add_argument(
        "--window", type=window, metavar="L,R", help="keys seen left and right of the diagonal; 'none' is unbounded"
    )
    call.add_argument("--softcap", type=float, default=0.0, metavar="X", help="c of c*tanh(scores/c); 0: none")
    call.add_argument("--lse", action="store_true", help="return the log-sum-exp too")
    call.add_argument("--grad", action="store_true", help="gradients are needed")
    call.add_argument("--deterministic", action="store_true", help="the same bits run to run")
    call.add_argument("--quant", choices=METHODS, help="quantised attention")
    call.add_argument(
        "--backend", metavar="CHOICE", help="as backend= of pa.attention: --backend fa3,auto or --backend=-sdpa"
    )


def _add_verify(commands: Any) -> None:
    verify = _add(commands, "verify", "prove backends against the reference", _VERIFY, _verify)
    verify.add_argument("--platform", metavar="NAME", help="only this platform (default: every one that is found here)")
    verify.add_argument("--backend", metavar="NAME", help="only this backend: sdpa, or cpu:sdpa (default: all)")


def _add_bench(commands: Any) -> None:
    bench = _add(commands, "bench", "time backends on named shapes of real models", _BENCH, _bench)
    bench.add_argument("--shapes", type=names, default=(), metavar="A,B", help=f"{', '.join(SHAPES)} (default: all)")
    bench.add_argument(
        "--backends",
        type=names,
        default=(),
        metavar="A,B",
        help="only these, slow generic routes too (default: all that need none)",
    )
    bench.add_argument("--dtype", metavar="NAME", help="default: bfloat16, on a processor float32")
    bench.add_argument("--seconds", type=seconds, default=2.0, metavar="N", help="time for each shape (default: 2)")
    bench.add_argument("--write-order", type=Path, metavar="FILE", help="write the measured order as JSON")
    bench.add_argument("--plot", type=Path, metavar="FILE.png", help="draw bars (needs matplotlib)")
    bench.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("OLD.json", "NEW.json"),
        help="measure nothing: what became slower between two results of --json; exit code 1 where something did",
    )


def _add_demo(commands: Any) -> None:
    demo = _add(commands, "demo", "a real transformer on real text, three ways", _DEMO, _demo)
    demo.add_argument("--sentences", type=Path, metavar="FILE", help="text to embed, one sentence a line")


def _add_plan(commands: Any) -> None:
    plan = _add(commands, "plan", "what attention over many ranks would cost", _PLAN, _plan)
    what = plan.add_argument_group("the call")
    what.add_argument(
        "--shape", type=names, default=(), metavar="A,B", help="shapes of bench (default: flux,wan480,wan720)"
    )
    what.add_argument("--q", type=shape, metavar="B,S,H,D", help="a dense call of your own")
    what.add_argument("--k", type=shape, metavar="B,S,H,D", help="its keys (default: q's shape)")
    where = plan.add_argument_group("the ranks")
    where.add_argument("--ranks-per-host", type=count, default=8, metavar="N", help="default: 8")
    where.add_argument("--hosts", type=counts, default=(1, 8, 64), metavar="A,B", help="default: 1,8,64")
    where.add_argument("--tflops", type=above_0, metavar="X", help="dense attention of one rank (default: an H200's)")
    where.add_argument("--inside", type=above_0, metavar="GB/s", help="that a rank sends to its own host's ranks")
    where.add_argument("--across", type=above_0, metavar="GB/s", help="that a rank sends to other hosts' ranks")


def _info(args: argparse.Namespace) -> int:
    from polyattn.cli.info import info

    return info(device=args.machine, only_capabilities=args.capabilities, as_json=args.json)


def _explain(args: argparse.Namespace) -> int:
    from polyattn.cli.ready import need_platform, need_torch

    need_torch()
    need_platform()
    from polyattn.cli.explain import explain

    return explain(args)


def _verify(args: argparse.Namespace) -> int:
    from polyattn.cli.ready import need_platform, need_torch, split_backend

    platform, backend = split_backend(args.platform, args.backend)
    need_torch()
    need_platform()
    from polyattn.cli.verify import verify

    return verify(platform, backend, as_json=args.json)


def _bench(args: argparse.Namespace) -> int:
    if args.compare is not None:
        from polyattn.cli.bench_compare import bench_compare

        return bench_compare(*args.compare, as_json=args.json)
    from polyattn.cli.ready import need_platform, need_torch

    need_torch()
    need_platform()
    from polyattn.cli.bench import Wanted, bench

    wanted = Wanted(args.shapes, args.backends, args.dtype, args.seconds, args.write_order, args.plot)
    return bench(wanted, as_json=args.json)


def _demo(args: argparse.Namespace) -> int:
    from polyattn.cli.ready import need_platform, need_torch

    need_torch()
    need_platform()
    from polyattn.cli.demo import demo

    return demo(as_json=args.json, sentences=args.sentences)


def _plan(args: argparse.Namespace) -> int:
    from polyattn.cli.ready import need_torch

    if args.k is not None and args.q is None:
        from polyattn.cli.failure import UsageError

        raise UsageError("--k: --q is needed beside it")
    need_torch()
    from polyattn.cli.plan import Wanted, plan

    machine = (args.tflops, args.inside, args.across)
    return plan(Wanted(args.shape, args.q, args.k, args.ranks_per_host, args.hosts, *machine), as_json=args.json)
