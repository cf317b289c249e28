"""Edits and reads of objects in S3 while requests fail, or the object is replaced.

After each call the output is absent, the old object or the new one, whole; no multipart upload is left behind; and what
was read is one version of the object.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from campaigns.frame import Table, report, start
from stores import Bucket, Traffic, environment, moto

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.io.remote import s3, store

FAULTS = ("500", "503", "reset", "slow", "cut", "replaced", "403")
ERROR = b"<Error><Code>%s</Code><Message>no</Message></Error>"


class Breaking:
    """A WSGI application whose requests fail by number: each of `broken`, or all from the first of it on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.fault, self.broken, self.lasting = "", frozenset[int](), False
        self.count = self.hits = 0
        self.armed = False
        self.replace: Any = None

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if not self.armed:
            return self.inner(environ, start_response)
        number, self.count = self.count, self.count + 1
        hit = number in self.broken or (self.lasting and number >= min(self.broken))
        # Nobody can take an upload away that the store refuses to take away, or where it never answers again.
        final = environ["REQUEST_METHOD"] == "DELETE" and (self.lasting or self.fault == "403")
        if not hit or final:
            return self.inner(environ, start_response)
        self.hits += 1
        if self.fault == "replaced":
            self.armed = False
            self.replace()
            self.armed = True
            return self.inner(environ, start_response)
        if self.fault == "slow":
            time.sleep(0.05)
            return self.inner(environ, start_response)
        if self.fault == "cut":
            return self._cut(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if self.fault == "reset":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("by the campaign")
        code = {"500": b"InternalError", "503": b"SlowDown", "403": b"AccessDenied"}[self.fault]
        words = {"500": "500 Internal Server Error", "503": "503 Slow Down", "403": "403 Forbidden"}
        body = ERROR % code
        start_response(words[self.fault], [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    def _cut(self, environ: Any, start_response: Any) -> Any:
        """The whole answer is promised, and half of it sent."""
        body = b"".join(self.inner(environ, start_response))
        if environ["REQUEST_METHOD"] != "GET" or len(body) < 2:
            return [body]
        return [body[: len(body) // 2]]


@contextmanager
def broken_bucket() -> Iterator[tuple[Bucket, Breaking]]:
    """A bucket of moto whose requests can be made to fail; retries do not wait."""
    with moto() as (url, _, app):
        breaking = Breaking(app._inner)
        app._inner = breaking
        kept = {name: os.environ.get(name) for name in environment(url)}
        client: Any = s3
        waited = store.FIRST_WAIT, client.TIMEOUT, client.PATIENCE
        os.environ.update(environment(url))
        store.FIRST_WAIT, client.TIMEOUT, client.PATIENCE = 0.001, 3.0, 3.0
        s3.forget_client()
        try:
            made = Bucket("bucket", s3.client(), Traffic(), "moto")
            made.client.create_bucket(Bucket=made.name)
            yield made, breaking
        finally:
            store.FIRST_WAIT, client.TIMEOUT, client.PATIENCE = waited
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            s3.forget_client()


def inputs(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Two generations of a file of more than one part, each with what strip-module makes of it."""
    made: list[dict[str, bytes]] = []
    for generation in (1.0, 2.0):
        path, out = folder / "in.pth", folder / "out.pth"
        rows = {f"module.layer{number}": torch.full((1 << 20,), generation) for number in range(3)}
        torch.save(rows, path)
        ckptfix.strip_module(path, out, force=True)
        made.append({"in": path.read_bytes(), "out": out.read_bytes()})
    return made[0], made[1]


def run(folder: Path, count: int, first: int = 0) -> Table:
    """`count` calls, by number from `first` on; how they ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    one, two = inputs(folder)
    (folder / "local.pth").write_bytes(one["in"])
    old = b"what was there"
    with broken_bucket() as (bucket, breaking):
        url, dest = bucket.url("in"), bucket.url("out")
        for number in range(first, first + count):
            dice = random.Random(number)
            breaking.armed = False
            bucket.clear()
            bucket.put("in", one["in"])
            replacing = dice.random() < 0.4
            if replacing:
                bucket.put("out", old)
            verb = dice.choice(("edit", "upload", "load", "digest"))
            breaking.fault = FAULTS[number % len(FAULTS)]
            breaking.broken = frozenset(dice.sample(range(14), dice.choice((1, 1, 2, 4))))
            breaking.lasting = dice.random() < 0.3 and breaking.fault not in ("replaced", "slow")
            breaking.replace = lambda: bucket.put("in", two["in"])
            breaking.count, breaking.hits, breaking.armed = 0, 0, True
            what = f"{number} {verb}, {breaking.fault} at {sorted(breaking.broken)}{' on' * breaking.lasting}"
            values: Mapping[str, Any] | None = None
            try:
                if verb == "edit":
                    ckptfix.strip_module(url, dest, force=replacing)
                elif verb == "upload":
                    ckptfix.strip_module(folder / "local.pth", dest, force=replacing)
                elif verb == "load":
                    values = ckptfix.load_state_dict(url, strip=None)
                else:
                    ckptfix.digest(url)
                end = "done"
            except CkptfixError as error:
                end = "refused"
                if not str(error) or "bug in ckptfix" in str(error):
                    wrong.append(f"{what}: {error}")
            except Exception as error:  # a fault is a line of the report
                end = "crashed"
                wrong.append(f"{what}: {error!r}")
            breaking.armed = False
            ends[f"{breaking.fault if breaking.hits else 'no fault met'}: {end}"] += 1
            if bucket.uploads():
                wrong.append(f"{what}: {end}, and an upload is left")
                for row in bucket.uploads():
                    bucket.client.abort_multipart_upload(Bucket=bucket.name, Key=row["Key"], UploadId=row["UploadId"])
            now = bucket.get("out") if bucket.below("out") else None
            news = (one["out"], two["out"]) if verb == "edit" else (one["out"],)
            writes = verb in ("edit", "upload")
            before = old if replacing else None
            if now != before and not (writes and now in news):
                wrong.append(f"{what}: {end}, and the output is neither the old nor the new object")
            if end == "done" and writes and now == before:
                wrong.append(f"{what}: done, and nothing was written")
            limits = {float(limit) for value in (values or {}).values() for limit in (value.min(), value.max())}
            if len(limits) > 1:
                wrong.append(f"{what}: values of two generations")
    return ends, wrong


def main(folder: Path, count: int = 600) -> int:
    """Print the table; the number of faults that were found."""
    return report(f"store faults  {count:6} calls", run(folder, count))


if __name__ == "__main__":
    start(main)
