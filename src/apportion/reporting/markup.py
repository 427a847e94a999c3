"""HTML put together from text that is escaped unless it is HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"meta", "line", "rect", "circle", "path", "polyline", "br"})
# Characters that have no place in a page; user text with them shows the replacement character.
_CONTROL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "�")


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Return user text as HTML; what is HTML already comes back as it is."""
    return text if isinstance(text, Html) else Html(html.escape(text.translate(_CONTROL), quote=True))


def join(parts: Iterable[str]) -> Html:
    """Return the parts one after the other, text escaped."""
    return Html("".join(escape(part) for part in parts))


def element(tag: str, /, *children: str, **attributes: str | float | None) -> Html:
    """Return an element; `class_` stands for class, `_` for `-`, and an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{given}>" if tag in ("meta", "br") else f"<{tag}{given}/>")
    return Html(f"<{tag}{given}>{join(children)}</{tag}>")


def table(
    headings: Iterable[str], rows: Iterable[Iterable[str]], *, caption: str, text_columns: frozenset[int]
) -> Html:
    """Return a table that scrolls sideways on a narrow page; columns of numbers are aligned to the right."""

    def kind(i: int) -> str | None:
        return None if i in text_columns else "number"

    head = [element("th", text, scope="col", class_=kind(i)) for i, text in enumerate(headings)]
    body = [element("tr", *(element("td", text, class_=kind(i)) for i, text in enumerate(row))) for row in rows]
    content = element(
        "table",
        element("caption", caption, class_="hidden"),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
