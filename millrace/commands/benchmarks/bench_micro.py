"""`millrace bench` of parts of the engine: `plan`, `counting`, `step`, `adapters`, `adapter-load` and `replay`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.commands.benchmarks import bench_gpu
from millrace.commands.benchmarks.printing import print_figures
from millrace.terminal.parser import UsageError
from millrace.terminal.settings_options import load_settings

if TYPE_CHECKING:
    pass


def run_plan(args: argparse.Namespace) -> int:
    from millrace.bench.micro.plan import plan_figures

    title = "Host time: plan and apply of one steady decode step; first token of a lone request; steps as bytes"
    return print_figures(plan_figures(), title, "local", as_json=args.json)


def run_counting(args: argparse.Namespace) -> int:
    from millrace.bench.micro.counting import counting_figures

    title = "Host time that the engine's figures add to a decode step, in alternating steps"
    return print_figures(counting_figures(), title, "local", as_json=args.json)


def run_step(args: argparse.Namespace) -> int:
    from millrace.bench.micro.step import step_figures

    title = "One CPU step by kind of work, fastest of many"
    return print_figures(step_figures(load_settings(args).config), title, "step", as_json=args.json)


def run_adapters(args: argparse.Namespace) -> int:
    from millrace.bench.micro.adapters import adapter_figures

    configs = [model.config for model in bench_gpu.chosen_models(args)] if args.models else [load_settings(args).config]
    title = "One step with adapters of rank 16 and without, in alternating rounds"
    figures = (figure for config in configs for figure in adapter_figures(config))
    return print_figures(figures, title, "adapters", as_json=args.json)


def run_adapter_load(args: argparse.Namespace) -> int:
    from millrace.bench.micro.adapter_load import adapter_figures
    from millrace.terminal.local_backend import llm_settings

    configs = [model.config for model in bench_gpu.chosen_models(args)] if args.models else [load_settings(args).config]
    figures = (figure for config in configs for figure in adapter_figures(config.model.source, llm_settings(config)))
    return print_figures(figures, "Many adapters, room for few", "adapter-load", as_json=args.json)


def run_replay(args: argparse.Namespace) -> int:
    from millrace.bench.micro.replay import replay_log

    config = load_settings(args).config
    if not config.plan.step_log:
        raise UsageError("Name the log of the steps to run again: millrace bench replay --step-log FILE.")
    done = replay_log(Path(config.plan.step_log).expanduser(), config.run)
    print_figures(done.figures(), f"Steps of {config.plan.step_log}", "replay", as_json=args.json)
    return 1 if done.num_different else 0
