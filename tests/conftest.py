"""Shared test setup: thread settings, reproducible property tests, and skipped GPU tests on machines without a GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
from pathlib import Path

import pytest
from helpers import starter
from helpers.suite import FUZZ, SEED, LiveGuard, Outcomes, can_have, examples, seed_generators, send_at_once
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Set before torch is imported: OpenMP threads of two test workers must not spin on the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A script starts its background jobs with SIGINT ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` uses the same examples every time; `make fuzz` draws new ones.
settings.register_profile(
    "millrace",
    max_examples=examples(40),
    deadline=None,
    derandomize=not FUZZ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("millrace")
if not FUZZ:
    # Hypothesis also tries constants of the modules that are loaded, and those depend on what else a process has run.
    providers.is_local_module_file = lambda path: False


LONG_FILES = (
    *("engine/test_parity.py", "engine/test_features_together.py", "run/test_cuda_runner.py"),
    *("docs/test_examples.py", "commands/test_terminals.py", "web/test_accessibility.py", "web/test_dashboard.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="write counts and the ends of failed tests' logs to this file")


@pytest.hookimpl(trylast=True)  # After the plugin for second tries has opened its connection.
def pytest_configure(config: pytest.Config) -> None:
    send_at_once(config)
    config.pluginmanager.register(LiveGuard())
    starter.install()
    if not hasattr(config, "workerinput"):  # The controller sees the reports of every worker.
        config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


def pytest_report_header() -> str:
    hash_seed = os.environ.get("PYTHONHASHSEED", "random")
    return f"seed {SEED} (FUZZ_SEED), hash seed {hash_seed}, generated cases {'new' if FUZZ else 'fixed'}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and not can_have(collection_path.read_text(), config.getoption("markexpr")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    starter.switch(on=item.get_closest_marker("fresh") is None)
    seed_generators(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_generators(SEED + 1)  # A test draws the same after fixtures that are shared, and made only once.


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Triton kernel tests run on the GPU if there is one, so `-m gpu` includes them.
        if getattr(getattr(item, "module", None), "interpreted", None) is False:
            item.add_marker("gpu")
    # Long files first: a worker that began one last would go on alone.
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG_FILES))
    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    """Leave what collection imported (torch, transformers) out of every later garbage collection: a closing `LLM`
    collects, and so do its tests."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logstart() -> None:
    """Undo `setup_logging` of an earlier test: after it, pytest would record our log lines twice or not at all."""
    logger = logging.getLogger("millrace")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
    root.setLevel(logging.WARNING)
