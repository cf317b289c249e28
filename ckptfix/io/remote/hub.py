"""``hf://[datasets/|spaces/]ORG/REPO[@REVISION]/FILE``: files of the Hugging Face hub, read by ranges.

The endpoint (``HF_ENDPOINT``) and the token are those of huggingface_hub. The first answer names its commit, and all
later data is read from that commit, so that a push in the meantime has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import unquote

from ckptfix.errors import NoSuchFile, NotPermitted, Unsupported
from ckptfix.io.remote.http import Resource, configured, origin_of
from ckptfix.io.remote.store import Facts, ObjectStore, Passing, failed, retried, size_said
from ckptfix.urls import scheme_of

_NAME = re.compile(
    r"hf://(?:(?P<kind>models|datasets|spaces)/)?(?P<repo>[^/@]+/[^/@]+)(?:@(?P<rev>refs/(?:pr|convert)/[^/]+|[^/]+))?"
    r"(?:/(?P<file>.*))?$",
    re.DOTALL,
)


class RepoEntry(NamedTuple):
    """A file or folder of a repository."""

    kind: str
    repo: str
    revision: str
    file: str


def placed(name: str) -> RepoEntry:
    """Parse `name` as a place in a repository.

    Raises:
        Unsupported: it names no repository.
    """
    found = _NAME.match(name)
    if found is None:
        raise Unsupported("names no repository", path=name, hint="hf://ORG/REPO[@REVISION]/FILE")
    kind = (found["kind"] or "models").removesuffix("s")
    return RepoEntry(kind, found["repo"], unquote(found["rev"] or "main"), (found["file"] or "").strip("/"))


def _headers() -> dict[str, str]:
    made: dict[str, str] = import_module("huggingface_hub.utils").build_hf_headers(library_name="ckptfix")
    return {name: value for name, value in made.items() if value}


class HubFile(Resource):
    """A file of a repository, read from the address that the hub redirects to, which is renewed when it expires."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import hf_hub_url

        where = placed(name)
        url = hf_hub_url(where.repo, where.file, repo_type=where.kind, revision=where.revision)
        super().__init__(name, url, {**configured(scheme_of(name)), **_headers()})
        self._where = where
        self._direct: Resource | None = None

    def get(self, start: int, length: int, expected: Facts | None) -> tuple[bytes, Facts]:
        direct = self._direct
        if direct is not None and expected is not None:
            try:
                return direct.get(start, length, expected)
            except (NotPermitted, NoSuchFile):
                if self._direct is direct:  # another thread may already have renewed it
                    self._direct = None
        return super().get(start, length, expected)

    def came_from(self, url: str, said: Mapping[str, str]) -> None:
        from huggingface_hub import hf_hub_url

        commit = next((value for name, value in said.items() if name.lower() == "x-repo-commit"), None)
        if commit is not None and commit != self._where.revision:
            where = self._where = self._where._replace(revision=commit)
            self.url = hf_hub_url(where.repo, where.file, repo_type=where.kind, revision=commit)
        if origin_of(url) != origin_of(self.url):
            self._direct = Resource(self.name, url, {})


class HubStore(ObjectStore):
    def object_of(self, name: str) -> HubFile:
        return HubFile(name)

    def listing(self, folder: str) -> Iterator[tuple[str, Facts]]:
        """Yield (name relative to the folder, its facts) for all files below `folder`."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

        where = placed(folder)

        def ask() -> list[tuple[str, Facts]]:
            try:
                rows = HfApi(library_name="ckptfix").list_repo_tree(
                    where.repo, where.file or None, recursive=True, revision=where.revision, repo_type=where.kind
                )
                return [_row(row, where.file) for row in rows if hasattr(row, "blob_id")]
            except EntryNotFoundError:
                return []
            except RepositoryNotFoundError:
                hint = "the repository does not exist, or it is private: run `hf auth login`, or set HF_TOKEN"
                raise NoSuchFile(folder, hint=hint) from None
            except HfHubHTTPError as error:
                status = getattr(error.response, "status_code", 0)
                raise failed(folder, status, hint="run `hf auth login`, or set HF_TOKEN") from None
            except OSError as error:
                raise Passing(str(error)) from None

        yield from retried(folder, ask)


def _row(row: Any, folder: str) -> tuple[str, Facts]:
    below = row.path[len(folder) + 1 :] if folder else row.path
    tag = row.lfs.sha256 if row.lfs is not None else row.blob_id
    return below, Facts(size_said(below, row.size), f'"{tag}"')


STORE = HubStore()
