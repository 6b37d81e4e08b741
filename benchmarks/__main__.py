"""``python -m benchmarks [NAME ...] [--quick]``: run, save under results/, rewrite docs/."""

from __future__ import annotations

import argparse
import importlib

from benchmarks import record

NAMES = (
    "frontend_cost",
    "engine_speed",
    "ttft",
    "preprocess",
    "video_sampling",
    "embedding_cache",
    "media_flood",
    "fetch",
    "memory",
    "planes",
    "kv_index",
    "grammar",
    "routing",
    "agent_loop",
    "transfer",
)
WITH_VLLM = ("engine_compare", "vllm_overhead")  # run when named: they need .venv-vllm


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES + WITH_VLLM)}"
    )
    parser.add_argument("--quick", action="store_true", help="short, to see that it runs")
    args = parser.parse_args()
    if unknown := set(args.names) - {*NAMES, *WITH_VLLM}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in args.names or NAMES:
        print(f"{name} ...", flush=True)
        figures, details = importlib.import_module(f"benchmarks.{name}").run(args.quick)
        for figure in figures:
            print("  " + figure.row().strip("| "))
        print(f"  saved in {record.save(name, figures, details, args.quick).name}", flush=True)
    record.write_page()


if __name__ == "__main__":
    main()
