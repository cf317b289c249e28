"""Write the recorded answers anew: ``PYTHONPATH=tests python -m recorded``."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor

from recorded.test_recorded import FILES, SAID, TEXTS, recorded


def record(name: str) -> dict[str, set[str]]:
    """Write the answers of one file, and return the sentences of each verb."""
    os.environ["COLUMNS"] = "80"
    texts: defaultdict[str, set[str]] = defaultdict(set)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for heading, found in recorded(name):
            lines += [heading] if heading else []
            lines += [answer.line for answer in found]
            for answer in found:
                texts[answer.verb] |= answer.sentences
        os.chdir("/")
    (SAID / f"{name}.txt").write_text("\n".join([*lines, ""]))
    return texts


def main() -> None:
    """Record all files, in two processes."""
    TEXTS.mkdir(parents=True, exist_ok=True)
    texts: defaultdict[str, set[str]] = defaultdict(set)
    with ProcessPoolExecutor(2) as pool:
        for one in pool.map(record, FILES):
            for verb, sentences in one.items():
                texts[verb] |= sentences
    for file in TEXTS.iterdir():
        file.unlink()
    for verb, sentences in texts.items():
        # `ls` is asked for JSON alone.
        if sentences:
            (TEXTS / f"{verb}.txt").write_text("\n".join([*sorted(sentences), ""]))


if __name__ == "__main__":
    main()
