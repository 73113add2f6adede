"""The metrics of several fronts as one page: what each counted is added up, what each process is stays apart."""

from __future__ import annotations

PER_PROCESS = ("process_", "python_")


def merge(pages: dict[int, bytes]) -> bytes:
    """Expositions by front, in Prometheus's text format, all made by the same version of this program."""
    families: dict[str, tuple[list[str], dict[str, float]]] = {}
    """By name: its comments, and the sum of each of its series."""
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
            name = _of_front(name, front) if name.startswith(PER_PROCESS) else name
            if name not in series:
                series[name] = float(value)
            elif not name.partition("{")[0].endswith("_created"):  # When a counter came into being is no amount.
                series[name] += float(value)
    lines = []
    for comments, series in families.values():
        lines += [*comments, *(f"{name} {value!r}" for name, value in series.items())]
    return ("\n".join(lines) + "\n").encode("utf-8")


def _of_front(name: str, front: int) -> str:
    if name.endswith("}"):
        return f'{name[:-1]},front="{front}"}}'
    return f'{name}{{front="{front}"}}'
