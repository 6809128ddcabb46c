"""The report as one HTML file, without network or server.

All foreign text enters the page in one way: as a JSON block in which `<`, `>`, `&` and U+2028/9 are escaped, and which
the viewer shows by textContent alone. The content security policy forbids every load and every script and style but the
two inlined here, which it names by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
from typing import Any

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws itself with JavaScript; its command prints the same figures as text.</noscript>
<main id="memo"></main>
<script type="application/json" id="memo-data">{data}</script>
<script type="text/plain" id="memo-licenses">{licenses}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(data: dict[str, Any], *, title: str) -> str:
    """Renders the HTML file.

    Args:
        data: of `page_data`, or of another page's maker.
        title: of the page; may hold any text.
    """
    script, style = _asset("viewer.js"), _asset("viewer.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=policy,
        title=html.escape(title),
        style=style,
        data=embedded_json(data),
        licenses=_asset("LICENSES.txt").replace("<", "&lt;"),
        script=script,
    )


def embedded_json(data: Any) -> str:
    """Writes JSON that cannot end the script element it is embedded in, whatever names it holds."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char, escape in _ESCAPES.items():
        text = text.replace(char, escape)
    return text


def _asset(name: str) -> str:
    return importlib.resources.files("memo.trace").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(inline: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(inline.encode("utf-8")).digest()).decode("ascii")
