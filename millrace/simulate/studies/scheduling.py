"""Studies: questions about serving that the simulator answers, each as a page with a table, plots and a conclusion that
is made of the figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from millrace.load.lengths import Lengths
from millrace.load.svg import Line, plot
from millrace.simulate.profile import Profile
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.simulation import Simulated
from millrace.simulate.studies.findings import CHAT, Findings, Study, milliseconds, run_settings, tokens_per_s
from millrace.simulate.studies.resources import MORE_STUDIES


def static_batching(profile: Profile, seed: int) -> Findings:
    rates, rows, kinds = (2.0, 4.0, 8.0), [], ("continuous", "static")
    for rate in rates:
        requests = replace(CHAT, rate=rate, seed=seed).requests()
        for kind in kinds:
            done = run_settings(requests, profile, f"batching={kind},max_running=32", seed)
            used = done.counts.step_tokens / max(1, done.counts.steps)
            figures = (
                milliseconds(done, "ttft", 50),
                milliseconds(done, "ttft", 99),
                milliseconds(done, "tpot", 50),
                tokens_per_s(done),
                used,
            )
            rows.append((f"{rate:g}", kind, *figures))
    lines = [Line(kind, list(rates), [float(row[3]) / 1e3 for row in rows if row[1] == kind]) for kind in kinds]
    last = {row[1]: row for row in rows[-2:]}
    ratio = last["static"][3] / last["continuous"][3]
    return Findings(
        ("requests/s", "batching", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "tokens/s", "tokens per step"),
        rows,
        [plot("TTFT p99", lines, "requests/s", "s")],
        f"At {rates[-1]:g} requests/s and 32 rows the TTFT p99 of static batching is {ratio:.0f} times that of"
        f" continuous batching, at {last['static'][5] / last['continuous'][5]:.2f} of its throughput: rows whose answer"
        " has ended stay empty until the longest one of the batch has ended. Continuous batching stays the default.",
    )


def chunk_size(profile: Profile, seed: int) -> Findings:
    sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
    requests = replace(CHAT, rate=4.0, prompt=Lengths("lognormal", 3000, 0.8), seed=seed).requests()
    rows: list[tuple[object, ...]] = []
    for size in sizes:
        done = run_settings(requests, profile, f"token_budget=8192,mixed_budget={size},step_ms=0", seed)
        figures = [milliseconds(done, *what) for what in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("itl", 99))]
        rows.append((size, *figures, tokens_per_s(done)))
    target = run_settings(requests, profile, "token_budget=8192", seed)
    figures = [milliseconds(target, *what) for what in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("itl", 99))]
    rows.append((f"by time ({profile.step_ms:g} ms)", *figures, tokens_per_s(target)))
    columns = np.array([row[1:] for row in rows[:-1]], float)
    lines = [Line("TTFT p99", sizes, columns[:, 1].tolist()), Line("ITL p99", sizes, columns[:, 3].tolist())]
    best = int(np.argmin(columns[:, 1]))
    return Findings(
        ("tokens in a mixed step", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "ITL p99 ms", "tokens/s"),
        rows,
        [plot("Latency by chunk size", lines, "tokens in a mixed step", "ms", log_x=True)],
        f"Larger chunks trade smooth streams for early first tokens: from {sizes[0]} to {sizes[-1]} tokens the ITL p99"
        f" goes from {columns[0, 3]:.0f} to {columns[-1, 3]:.0f} ms and the TTFT p99 from {columns[0, 1]:.0f} to"
        f" {columns[-1, 1]:.0f} ms (lowest at {sizes[best]}: {columns[best, 1]:.0f} ms). The default, chunks by step"
        f" time, has a TTFT p99 of {figures[1]:.0f} ms at an ITL p99 of {figures[3]:.0f} ms.",
    )


def policies(profile: Profile, seed: int) -> Findings:
    names, loads, base_rate = ("fcfs", "shortest", "feedback", "deadline"), (1, 2, 5), 5.0
    rows: list[tuple[object, ...]] = []
    for load in loads:
        requests = replace(CHAT, rate=base_rate * load, seconds=40.0, num_tenants=4, seed=seed).requests()
        for name in names:
            done = run_settings(requests, profile, f"policy={name},max_running=16,deadline_s=20,max_tokens=2048", seed)
            good = len(done.outcome.answered) / done.outcome.seconds
            figures = (milliseconds(done, "ttft", 50), milliseconds(done, "ttft", 99), good, _fairness(done))
            rows.append((f"{load} ×", name, *figures))
    lines = [Line(name, loads, [float(str(row[4])) for row in rows if row[1] == name]) for name in names]
    best = {load: max(rows[4 * at : 4 * at + 4], key=lambda row: float(str(row[4]))) for at, load in enumerate(loads)}
    said = "; ".join(f"{load} ×: {row[1]} with {row[4]:.2f}/s" for load, row in best.items())
    return Findings(
        ("load", "policy", "TTFT p50 ms", "TTFT p99 ms", "answered within 20 s, per s", "fairness"),
        rows,
        [plot("Goodput by load", lines, "load", "requests/s")],
        f"Highest goodput by load: {said}. Below saturation the order hardly matters; the TTFT of answered requests is"
        " shown, so a policy that lets long requests expire looks fast.",
    )


def _fairness(done: Simulated) -> float:
    """Jain's index over the tenants' share of answered requests."""
    shares = []
    for tenant in sorted({life.request.tenant for life in done.lives}):
        own = [life.reason in ("stop", "length") for life in done.lives if life.request.tenant == tenant]
        shares.append(sum(own) / len(own))
    values = np.array(shares)
    return float(values.sum() ** 2 / (len(values) * max((values**2).sum(), 1e-12)))


def shared_prefix(profile: Profile, seed: int) -> Findings:
    load = replace(CHAT, rate=10.0, seconds=10.0, arrivals="constant", prompt=Lengths("fixed", 100), seed=seed)
    requests = replace(load, prefix_tokens=2000).requests()
    rows: list[tuple[object, ...]] = []
    for text in ("prefix_cache=on", "prefix_cache=off"):
        done = run_settings(requests, profile, text, seed)
        computed = done.counts.prompt_tokens - done.counts.cached_tokens
        times = (
            milliseconds(done, "ttft", 50),
            milliseconds(done, "ttft", 99),
            done.outcome.seconds,
            done.counts.device_s,
        )
        rows.append((text.removeprefix("prefix_cache="), computed, 100 * done.counts.hit_share, *times))
    on, off = (np.array(row[1:], float) for row in rows)
    return Findings(
        (
            "prefix cache",
            "prompt tokens computed",
            "hits %",
            "TTFT p50 ms",
            "TTFT p99 ms",
            "all done after s",
            "device s",
        ),
        rows,
        [
            plot(
                "TTFT p50 and p99",
                [Line("cache on", (50, 99), on[2:4].tolist()), Line("cache off", (50, 99), off[2:4].tolist())],
                "percentile",
                "ms",
            )
        ],
        f"{len(requests)} requests with 2,000 shared tokens and 100 of their own: the cache leaves {on[0]:,.0f} of"
        f" {off[0]:,.0f} prompt tokens to compute and lowers the TTFT p50 from {off[2]:.0f} to {on[2]:.0f} ms.",
    )


def drafts(profile: Profile, seed: int) -> Findings:
    lengths, acceptances, batches = (1, 3, 7), (0.4, 0.6, 0.8), (1, 8, 32, 128)
    rows: list[tuple[object, ...]] = []
    gains: dict[tuple[int, float], list[float]] = {}
    for batch in batches:
        requests = [SimulatedRequest(0.0, 200, 100)] * batch
        plain = _decode_rate(run_settings(requests, profile, "noise=off", seed))
        for length in lengths:
            for acceptance in acceptances:
                done = run_settings(requests, profile, f"drafts={length},acceptance={acceptance},noise=off", seed)
                gain = _decode_rate(done) / plain
                gains.setdefault((length, acceptance), []).append(gain)
                rows.append((batch, length, acceptance, gain))
    lines = [Line(f"{length} drafts", batches, gains[length, 0.6]) for length in lengths]
    best = max(rows, key=lambda row: float(str(row[3])))
    worst = min(rows, key=lambda row: float(str(row[3])))
    return Findings(
        ("rows", "drafts", "acceptance", "speed against none"),
        rows,
        [plot("Decode speed at acceptance 0.6", lines, "rows", "of the speed without drafts", log_x=True)],
        f"Drafts gain most with few rows: {best[3]:.2f} times the speed at {best[0]} rows with {best[1]} drafts and"
        f" acceptance {best[2]}; least {worst[3]:.2f} at {worst[0]} rows with {worst[1]} drafts and acceptance"
        f" {worst[2]}. A draft place is priced as a decode row, and proposing drafts as nothing.",
    )


def _decode_rate(done: Simulated) -> float:
    return 1 / float(np.mean([record.tpot_s for record in done.outcome.answered]))


STUDIES: dict[str, Study] = {
    "static-batching": Study(
        "Static against continuous batching",
        "What does it cost if a batch starts only when the one before has ended?",
        "Poisson arrivals for 60 s, prompts of 600 tokens and answers of 120 (medians, log-normal), 32 rows.",
        static_batching,
    ),
    "chunk-size": Study(
        "Chunk size against TTFT and inter-token latency",
        "How many tokens may a step have that also decodes?",
        "Poisson arrivals, 4 requests/s for 60 s, prompts of 3,000 tokens (median); the last row has a step target.",
        chunk_size,
    ),
    "policies": Study(
        "Scheduling policies under load",
        "Which order of requests answers most of them in time at 1, 2 and 5 times the load?",
        "Poisson arrivals for 40 s, 16 rows, four tenants, every request expires after 20 s.",
        policies,
    ),
    "shared-prefix": Study(
        "100 requests with 2,000 shared tokens",
        "What does the prefix cache save?",
        "Ten requests per second for 10 s, each with the same 2,000 tokens and 100 of its own.",
        shared_prefix,
    ),
    "drafts": Study(
        "Draft length, acceptance and batch size",
        "When do drafts pay?",
        "Requests of 200 prompt tokens and 100 output tokens that arrive together.",
        drafts,
    ),
    **MORE_STUDIES,
}
