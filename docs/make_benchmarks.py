"""Writes the tables and pictures of ``docs/benchmarks.md`` from ``docs/benchmarks/results.json``.

Run it as ``python docs/make_benchmarks.py``. With ``--add FILE...`` it takes results of ``recipes/benchmarks/run.py`` first:
the newest run of a case stays for each kind of GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
RESULTS = DOCS / "benchmarks" / "results.json"
sys.path.insert(0, str(DOCS.parent / "recipes" / "benchmarks"))

import bench_report as report  # noqa: E402
from bench_report import OURS, STOCK, Document, Row, work  # noqa: E402

LONG_TOKENS, LARGE_PARAMETERS = 65536, 20e9
"""From where on a sequence is long and a model is large."""
KEPT = ("gpu", "cpu", "cpus", "memory", "python", "versions", "commit", "date", "settings", "steps", "warmup")
"""What stays of a run's document beside its rows."""
COMPARED = ("beside_peers", "beside_stock")
"""Tables whose rows are drawn as speeds."""
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def results() -> list[Document]:
    """The committed documents, the newest last."""
    documents: list[Document] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return documents


def table_of(document: Document) -> str:
    """The table of the page that a document's rows belong to."""
    rows = document["rows"]
    systems = {row["system"] for row in rows}
    if "generate_seconds" in rows[0]:
        return "generation"
    if STOCK in systems:
        return "beside_stock"
    if systems != {OURS}:
        return "beside_peers"
    if document["settings"].get("placement.kept_layers") == 0:
        return "streamed"
    if rows[0]["shape"][2] >= LONG_TOKENS:
        return "long"
    is_large = rows[0]["parameters"] >= LARGE_PARAMETERS or "layers" in rows[0].get("note", "")
    return "large" if is_large else "alone"


def added(documents: list[Document], new: Document) -> list[Document]:
    """The documents with a new one, without the rows that it is newer than."""

    def compared(document: Document) -> tuple[object, ...]:
        return table_of(document), document["gpu"], document["settings"], {row["system"] for row in document["rows"]}

    newer = {work(row) for row in new["rows"]}
    left = []
    for old in documents:
        rows = [row for row in old["rows"] if compared(old) != compared(new) or work(row) not in newer]
        if any(row["system"] == OURS for row in rows):
            left.append({**old, "rows": rows})
    return sorted([*left, new], key=lambda document: str(document["date"]))


def condensed(document: Document) -> Document:
    """What the page needs of `run.py`'s document: no path, and no row that failed or is of an earlier version."""
    raw = {(result["case"], result["system"]): result for result in document["results"]}
    rows = []
    for row in document["rows"]:
        if "error" in row or row.get("has_settings"):
            continue
        result = raw[row["case"], row["system"]]
        made = report.trainer_row(row["case"], tuple(row["shape"]), row["system"], result) if "log_medians" in result else row
        rows.append({key: value for key, value in made.items() if value not in (None, {})})
    report.add_ratios(rows)
    return {**{key: document[key] for key in KEPT}, "command": command(document), "rows": rows}


def command(document: Document) -> str:
    """The command that made a document, without its folders."""
    raw = document["results"]
    ours = [result for result in raw if result["system"] == OURS]
    words = ["--cases", *dict.fromkeys(result["case"] for result in ours)]
    words += ["--steps", str(document["steps"]), "--warmup", str(document["warmup"])]
    words += ["--stock"] * any(result["system"] == STOCK for result in raw)
    others = [result["system"] for result in raw if result["system"] not in (OURS, STOCK)]
    if peers := list(dict.fromkeys(system for system in others if system in report.SYSTEMS)):
        words += ["--peers", "FOLDER", "--peer-benches", *peers]
    for option, key, default in (("--accumulation", "accumulation", 1), ("--max-grad-norm", "max_grad_norm", 1.0)):
        words += [option, str(ours[0][key])] if ours[0][key] != default else []
    words += ["--emulate", *(f"{value:g}" for value in ours[0]["emulated"])] if ours[0].get("emulated") else []
    if document["settings"]:
        words += ["--set", *(f"{name}={json.dumps(value)}" for name, value in document["settings"].items())]
    return "python recipes/benchmarks/run.py " + shlex.join(words)


def figure(value: float | None, form: str, predicted: float | None = None) -> str:
    """A cell: a figure, what was predicted in parentheses; nothing if it wasn't measured."""
    if value is None:
        return ""
    return format(value, form) + (f" ({predicted:{form}})" if predicted is not None else "")


def _speed_cells(row: Row) -> list[str]:
    return [
        figure(row.get("step_ms"), ",.0f", row.get("predicted_step_ms")),
        figure(row.get("gpu_peak_gib"), ",.1f", row.get("gpu_predicted_gib")),
        figure(row.get("host_peak_gib"), ",.1f"),
    ]


def _flops_cells(row: Row) -> list[str]:
    parameters, active = row.get("parameters"), row.get("active_parameters")
    if parameters is None or active is None:
        return ["", ""]
    met = f", a token meets {active / 1e9:.2f}" if active != parameters else ""
    return [f"{parameters / 1e9:.2f}{met}", f"{6 * active * row['tokens_per_second'] / 1e12:,.0f}"]


def _where(document: Document) -> str:
    star = "*" if document.get("transcribed") else ""
    return f"{report.machine(document)}; {document['date'][:10]}{star}"


def _peers(document: Document) -> Iterator[list[str]]:
    for row in document["rows"]:
        ratios = " and ".join(f"**{ratio:.2f}**" for ratio in row.get("ratios", {}).values())
        name, speed = report.SYSTEMS.get(row["system"], row["system"]), figure(row["tokens_per_second"], ",.0f")
        yield [work(row), name, speed, ratios, *_flops_cells(row), *_speed_cells(row), _where(document)]


def _stock(document: Document) -> Iterator[list[str]]:
    stocks = {work(row): row for row in document["rows"] if row["system"] == STOCK}

    def both(ours: Row, key: str, form: str) -> str:
        values = (row.get(key) for row in (ours, stocks[work(ours)]))
        return " / ".join(figure(value, form) or "?" for value in values)

    for row in document["rows"]:
        if row["system"] == OURS:
            speeds = [both(row, "tokens_per_second", ",.0f"), f"**{row['ratios'][STOCK]:.2f}**"]
            seconds = [both(row, f"{name}_step_seconds", form) for name, form in _SECONDS]
            yield [work(row), *speeds, *_flops_cells(row), *seconds, both(row, "gpu_peak_gib", ".1f"), _where(document)]


def _alone(document: Document) -> Iterator[list[str]]:
    for row in document["rows"]:
        yield [work(row), figure(row["tokens_per_second"], ",.0f"), *_flops_cells(row), *_speed_cells(row), _where(document)]


def _long(document: Document) -> Iterator[list[str]]:
    for row in document["rows"]:
        speed = figure(row["tokens_per_second"], ",.0f")
        yield [work(row), speed, figure(row["tflops_with_attention"], ",.0f"), *_speed_cells(row), _where(document)]


def _generation(document: Document) -> Iterator[list[str]]:
    plain, ours = (row["tokens_per_second"] for row in document["rows"])
    yield [document["rows"][0]["case"], f"{ours:,}", f"{plain:,}", f"**{ours / plain:.2f}**", _where(document)]


_SECONDS = (("mean", ".3f"), ("late", ".3f"), ("first", ".1f"))
_FLOPS_TITLES = ("parameters, G", f"TFLOPS = {report.FLOPS}")
_REST = ("step, ms (predicted)", "GPU, GiB (predicted)", "host, GiB", "machine; date")
TABLES: dict[str, tuple[tuple[str, ...], Callable[[Document], Iterator[list[str]]]]] = {
    "beside_peers": (("model, a step", "system", "tokens/s", "ours over it", *_FLOPS_TITLES, *_REST), _peers),
    "beside_stock": (
        (
            "model, a step", "tokens/s: ours / stock", "ratio", *_FLOPS_TITLES, "mean step, s", "late step, s",
            "first step, s", "GPU, GiB: ours / stock", "machine; date",
        ),
        _stock,
    ),
    "alone": (("model, a step", "tokens/s", *_FLOPS_TITLES, *_REST), _alone),
    "large": (("model, a step", "tokens/s", *_FLOPS_TITLES, *_REST), _alone),
    "streamed": (("model, a step", "tokens/s", *_FLOPS_TITLES, *_REST), _alone),
    "long": (
        (
            "model, a step", "tokens/s",
            f"TFLOPS = ({report.FLOPS}) + (6 x layers x hidden size x length x tokens a second)", *_REST,
        ),
        _long,
    ),
    "generation": (("model, prompts", "tokens/s: ours", "plain transformers", "ratio", "machine; date"), _generation),
}  # fmt: skip
"""The page's tables: titles of the columns, and the rows of a document."""


def table(name: str, documents: list[Document]) -> str:
    """One table in Markdown, and the commands that its rows were measured with; or how good predictions are, in a sentence."""
    if name == "predictions":
        return predictions(documents)
    titles, rows_of = TABLES[name]
    mine = [document for document in documents if table_of(document) == name]
    mine.sort(key=lambda document: (document["gpu"], document["rows"][0].get("parameters", 0)))
    rows = [cells for document in mine for cells in rows_of(document)]
    lines = [titles, ["---"] * len(titles), *rows]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    commands = "\n".join(dict.fromkeys(f"    {document['command']}" for document in mine))
    return f"\n{text}\n\nMeasured with:\n\n{commands}\n\n"


def predictions(documents: list[Document]) -> str:
    """How near the measured figures are to those that plans predicted."""

    def errors(measured: str, predicted: str) -> list[tuple[float, str]]:
        rows = [row for document in documents for row in document["rows"] if predicted in row]
        return sorted((abs(row[predicted] / row[measured] - 1), work(row)) for row in rows)

    sentences = []
    for what, names in (("time", ("step_ms", "predicted_step_ms")), ("GPU memory", ("gpu_peak_gib", "gpu_predicted_gib"))):
        found = errors(*names)
        (worst, case), (most, _) = found[-1], found[math.ceil(0.9 * len(found)) - 1]
        sentences.append(
            f"Of {len(found)} predictions of {what} nine in ten are within {most:.1%}; the worst is {worst:.1%} off ({case})."
        )
    return "\n" + "\n".join(sentences) + "\n\n"


def page(documents: list[Document]) -> str:
    """The page, its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    return _BLOCK.sub(lambda block: block[1] + table(block[2], documents) + block[3], text)


def digest(documents: list[Document]) -> str:
    """What the pictures' files say that they were drawn of."""
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()


def main() -> None:
    """Adds documents if any are named, and writes the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="results.json of run.py")
    documents = results()
    for path in parser.parse_args().add:
        new: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        documents = added(documents, condensed(new))
    RESULTS.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(documents), encoding="utf-8")
    compared = [document for document in documents if table_of(document) in COMPARED]
    source = {"Source": digest(documents)}
    pictures = report.draw(compared, RESULTS.parent, report.SPEED_AND_MEMORY, source) + report.draw(
        documents, RESULTS.parent, report.SPLIT, source
    )
    print("written:", PAGE, RESULTS, *pictures)


if __name__ == "__main__":
    main()
