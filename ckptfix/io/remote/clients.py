"""The clients of stores: the module of this package that opens the names of each scheme, imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ckptfix.errors import MissingExtra
from ckptfix.io.remote.store import Facts, Object
from ckptfix.urls import scheme_of


@dataclass(frozen=True, slots=True)
class Client:
    """The module that opens the names of a scheme.

    Attributes:
        module: of this package.
        package: the package that it imports; empty if it needs only Python.
        install: the argument for pip, beside the extra.
        extra: the extra of ckptfix that it needs.
    """

    module: str
    package: str = ""
    install: str = ""
    extra: str = "remote"


_S3 = Client("s3", "botocore", extra="s3")
_GCS = Client("fsspec_store", "gcsfs", "gcsfs")
_AZURE = Client("fsspec_store", "adlfs", "adlfs")
_SSH = Client("fsspec_store", "paramiko", "paramiko")

CLIENTS: Mapping[str, Client] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("http", "https"), Client("http")),
    "hf": Client("hub", "huggingface_hub", "huggingface_hub"),
    "oss": Client("fsspec_store", "ossfs", "ossfs"),
    **dict.fromkeys(("memory", "ftp", "webhdfs", "dbfs"), Client("fsspec_store")),
    "hdfs": Client("fsspec_store", "pyarrow", "pyarrow"),
    "github": Client("fsspec_store", "requests", "requests"),
    **dict.fromkeys(("sftp", "ssh"), _SSH),
}
"""Scheme -> the client that opens its names."""


def client_of(name: str) -> Client:
    """Return the client that opens `name`.

    Raises:
        MissingExtra: a package that it needs is not installed.
    """
    scheme = scheme_of(name)
    client = CLIENTS[scheme]
    needed = {"fsspec_store": ("fsspec", client.package)}.get(client.module, (client.package,))
    for package in filter(None, needed):
        try:
            import_module(package)
        except ImportError as error:
            install = " ".join(dict.fromkeys(filter(None, (f"'ckptfix[{client.extra}]'", client.install))))
            if _is_there(package):
                raise MissingExtra(
                    f"{package} fails to import: {error}", name=package, hint=f"pip install -U {install}"
                ) from error
            message = f"{scheme}:// needs {package}, which is not installed"
            raise MissingExtra(message, name=package, hint=f"pip install {install}") from None
    return client


def _is_there(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _module_of(name: str) -> Any:
    return import_module(f"ckptfix.io.remote.{client_of(name).module}")


def object_of(name: str) -> Object:
    """Return the object called `name`. Raises like `client_of`."""
    found: Object = _module_of(name).object_of(name)
    return found


def listing(folder: str) -> Iterator[tuple[str, Facts]]:
    """Yield the objects below `folder`: (name relative to it, facts). Raises like `client_of`."""
    rows: Iterator[tuple[str, Facts]] = _module_of(folder).listing(folder)
    return rows
