"""Merges the metrics pages of several fronts: counts are summed, process metrics get a `front` label."""

from __future__ import annotations

PER_PROCESS = ("process_", "python_")


def merge(pages: dict[int, bytes]) -> bytes:
    """Pages by front, in Prometheus text format. All must come from the same version of Millrace."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    """By family name: its comment lines, and the sum of each series."""
    for front, page in pages.items():
        comments: list[str] = []
        series: dict[str, float] = {}
        for line in page.decode("utf-8").splitlines():
            if line.startswith("# HELP "):
                comments, series = families.setdefault(line.split(" ", 3)[2], ([], {}))
            if line.startswith("#"):
                if line not in comments:
                    comments.append(line)
                continue
            name, _, value = line.rpartition(" ")
            name = _with_front(name, front) if name.startswith(PER_PROCESS) else name
            if name not in series:
                series[name] = float(value)
            elif not name.partition("{")[0].endswith("_created"):  # A creation time is not summed.
                series[name] += float(value)
    lines = []
    for comments, series in families.values():
        lines += [*comments, *(f"{name} {value!r}" for name, value in series.items())]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _with_front(name: str, front: int) -> str:
    if name.endswith("}"):
        return f'{name[:-1]},front="{front}"}}'
    return f'{name}{{front="{front}"}}'
