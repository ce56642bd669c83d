"""Parses HTML strictly as a tree: every opened element is closed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Element]:
        """This element and all within it, in the order of the page."""
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child

    def all(self, tag: str, kind: str = "") -> list[Element]:
        """All elements within that have a tag and a class."""
        return [each for each in self if each.tag == tag and (not kind or kind in each["class"].split())]

    def one(self, tag: str, kind: str = "") -> Element:
        (found,) = self.all(tag, kind)
        return found

    def at(self, place: str) -> Element:
        (found,) = (each for each in self if each["id"] == place)
        return found

    def __getitem__(self, name: str) -> str:
        return self.attributes.get(name, "")

    @property
    def text(self) -> str:
        """Its text, with one space for any blank."""
        return " ".join(self.raw.split())

    @property
    def raw(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(page: str) -> Element:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == [reader.root], f"<{reader.open[-1].tag}> is not closed"
    return reader.root


def cells(table: Element) -> list[list[str]]:
    """The texts of a table's body, row by row."""
    return [[each.text for each in row.children if isinstance(each, Element)] for row in table.one("tbody").all("tr")]
