"""Files of a server's options, in TOML, and the files that options name."""

from __future__ import annotations

import os
import ssl
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from ...bundle.regular_file import MOST_JSON_BYTES, read_regular
from ...shared.errors import RequestError
from .options import ServerOptions


def options_from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the fields of ServerOptions in a TOML file. Raises RequestError naming the file and the key."""
    file = Path(path)
    try:
        values = tomllib.loads(read_regular(file, most=MOST_JSON_BYTES).decode())
        known = ServerOptions.__struct_fields__
        unknown = next((name for name in values if name not in known), None)
        if unknown is not None:
            raise ValueError(f"there is no option {unknown!r}")
        msgspec.convert({"models": {}} | values, ServerOptions)
    except (OSError, ValueError, msgspec.ValidationError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise RequestError(f"config: {file}: {why}", hint="`optimize serve --print-config` shows all options.") from e
    return values


def as_toml(options: ServerOptions) -> str:
    """Returns the options as the text of an option file."""
    plain = msgspec.to_builtins(options)
    lines = [
        f"{name} = {_value(value)}"
        for name, value in plain.items()
        if not isinstance(value, dict) and value is not None
    ]
    for name in ("models", "aliases", "llm"):
        lines += ["", f"[{name}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in plain[name].items() if value is not None]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    return msgspec.json.encode(value).decode()


def check_files(options: ServerOptions) -> None:
    """Raises RequestError naming a file of TLS that can't be used."""
    if options.tls_certificate is None or options.tls_key is None:
        return
    for name in ("tls_certificate", "tls_key"):
        try:
            read_regular(Path(getattr(options, name)), most=MOST_JSON_BYTES)
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise RequestError(f"{name}: {getattr(options, name)}: {why}", hint="Pass a file in PEM.") from e
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_certificate, options.tls_key, password="")  # nobody is asked for one
    except (OSError, ValueError) as e:
        pair = f"{options.tls_certificate} and {options.tls_key}"
        hint = "Pass a certificate in PEM and its own key, which isn't encrypted."
        raise RequestError(f"tls_certificate: {pair} aren't a certificate and its key", hint=hint) from e
