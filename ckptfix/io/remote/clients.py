"""The one table of stores: the module of this package that knows the names of a scheme, imported on first use."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from ckptfix.dataclass import dataclass
from ckptfix.errors import MissingExtra
from ckptfix.io.remote.store import ObjectStore, WritableStore
from ckptfix.urls import scheme_of


@dataclass(frozen=True, slots=True)
class Client:
    """The module that opens the names of a scheme.

    Attributes:
        module: of this package; its `STORE` is the store.
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

CLIENTS: dict[str, Client] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), _AZURE),
    **dict.fromkeys(("http", "https"), Client("http")),
    "hf": Client("hub", "huggingface_hub", "huggingface_hub"),
    "oss": Client("fsspec_store", "ossfs", "ossfs"),
    **{scheme: Client("fsspec_store") for scheme in ("memory", "ftp", "webhdfs", "dbfs")},
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


def store_of(name: str) -> ObjectStore:
    """Return the store that has the name. Raises like `client_of`."""
    found = import_module(f"ckptfix.io.remote.{client_of(name).module}").STORE
    assert isinstance(found, ObjectStore)
    return found


def writable(name: str) -> WritableStore:
    """Return the store that has the name, which is not of a `READ_ONLY` scheme. Raises like `client_of`."""
    found = store_of(name)
    assert isinstance(found, WritableStore)
    return found


def same_store(one: str, other: str) -> bool:
    """Return whether two names are of stores of one kind, such as ``s3://`` and ``s3a://``."""
    schemes = scheme_of(one), scheme_of(other)
    return all(schemes) and CLIENTS[schemes[0]] is CLIENTS[schemes[1]]
